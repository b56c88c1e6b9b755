"""Data jobs in the storage: each has a folder like that of a run, besides the folder that it fills.

<storage>/.jobs/<name>/run_001/
    run.json        status, output, command, job on a cluster (see `records`)
    conf.yaml       the resolved config
    logs/driver.log output of the job
"""

from dataclasses import dataclass
from typing import Any

from mlx_runtime.runs.folder import RunFolder, find_run, list_runs
from mlx_runtime.runs.outputs.filling import job_record
from mlx_runtime.runs.queries.listing import AskJobs, Row, map_concurrently, summarize
from mlx_runtime.runs.queries.lookup import resolve_run
from mlx_runtime.storage.files import join_path, size_text, storage_at, storage_errors

JOBS = ".jobs"
"""Folder in the storage."""


@dataclass(frozen=True)
class JobRow:
    """A data job in a listing.

    Attributes:
        row: the job as a run.
        gone: what has happened to its output since: `removed` or `replaced`; empty if it is there, or was never.
    """

    row: Row
    gone: str

    def fields(self) -> dict[str, Any]:
        """Return plain values for `--json`."""
        names = ("status", "problem", "start", "end", "age_s", "duration_s", "error", "job", "attempts", "place")
        known, record = self.row.fields(), self.row.record
        fields = {"name": known["experiment"], "run": known["run"], **{name: known[name] for name in names}}
        return (
            fields
            | {"gone": self.gone or None}
            | {name: record.get(name) for name in ("output", "files", "size_bytes")}
        )

    def cells(self, root: str) -> dict[str, str]:
        """Return the cells of a table row by column, with the output relative to the storage at `root`."""
        known, record = self.row.cells(), self.row.record
        output = str(record.get("output") or "-").removeprefix(f"{root.partition('?')[0].rstrip('/')}/")
        size = record.get("size_bytes")
        return {
            "name": known["experiment"],
            "run": known["run"],
            "status": known["status"],
            "output": f"{output} ({self.gone})" if self.gone else output.partition("?")[0],
            "files": "-" if size is None else f"{record.get('files'):,}",
            "size": "-" if size is None else size_text(size),
            "age": known["age"],
            "duration": known["duration"],
            "job": (record.get("job") or {}).get("id", "-"),
        }


def jobs_root(root: str) -> str:
    """Return the folder or URI of the folders of all data jobs in a storage."""
    return join_path(root, JOBS)


def find_job(root: str, name: str, run: str = "latest") -> RunFolder:
    """Return the folder of a data job by its name and `run_003`, `3` or `latest`, or by its path or URI."""
    return resolve_run(name) if "/" in name else find_run(jobs_root(root), name, run)


def list_jobs(root: str, name: str | None = None, ask: AskJobs | None = None) -> list[JobRow]:
    """Return all data jobs of a storage, or those of one name, oldest first per name."""
    rows = summarize(list_runs(jobs_root(root), name), ask)
    return [JobRow(*pair) for pair in zip(rows, map_concurrently(_gone, rows), strict=True)]


def _gone(row: Row) -> str:
    output = row.record.get("output")
    if row.status != "SUCCEEDED" or not output:
        return ""
    with storage_errors(f"cannot read {output}"):
        present = job_record(storage_at(output))
    if present is None:
        return "removed"
    return "" if present.get("filling") == row.record.get("filling") else "replaced"
