"""`mlx data`.

A data job has a folder like that of a run, besides the folder that it fills:

<storage>/.jobs/<name>/run_001/
    run.json        status, output, command, job on a cluster (see `records`)
    conf.yaml       the resolved config
    logs/driver.log output of the job
"""

import json
import sys
from pathlib import Path
from typing import Any

import click

from mlx_runtime.cli import commands, options
from mlx_runtime.cli.options import confirm, job_statuses, say, word
from mlx_runtime.cli.verbs import projects, xp
from mlx_runtime.cli.xp import log_options, print_log
from mlx_runtime.companions.jobs import contents
from mlx_runtime.companions.jobs.filling import JOBS
from mlx_runtime.config.projects import DATA_JOB
from mlx_runtime.driver.arguments import Request
from mlx_runtime.errors import UsageError
from mlx_runtime.runs.folder import RunFolder, find_run, list_runs
from mlx_runtime.runs.queries import lookup
from mlx_runtime.runs.queries.listing import Row, summarize
from mlx_runtime.runs.tables import print_table
from mlx_runtime.storage.files import is_uri, join_path, size_text, to_json

data_new = commands.new_command(DATA_JOB)
data_bind = commands.bind_command(DATA_JOB)


@click.command("run", context_settings=commands.OVERRIDES)
@options.verbosity
@commands.resume_option
@click.argument("overrides", nargs=-1)
def data_run(resume: bool, overrides: tuple[str, ...]) -> None:
    """Run the data job on this machine. OVERRIDES are Hydra's: cfg.path=data/small cfg.start_workers=8"""
    projects.run(DATA_JOB, Request(overrides + ("cfg.resume=true",) * resume))


@click.command("ls")
@options.json
@click.argument("name", type=word, required=False)
def data_ls(as_json: bool, name: str | None) -> None:
    """List all data jobs in the storage, or those of NAME, and their outputs."""
    root = lookup.storage_root()
    rows = summarize(list_runs(join_path(root, JOBS), name), job_statuses)
    if as_json:
        click.echo(to_json([_fields(row) for row in rows]), nl=False)
    elif rows:
        print_table([_cells(row, root) for row in rows], sys.stdout)
        say(f"outputs are in {root}", err=True)
    else:
        say(f"there are no data jobs in {root} yet; start one with: mlx data run", err=True)


def _fields(row: Row) -> dict[str, Any]:
    """Return plain values for `--json`."""
    names = ("status", "problem", "start", "end", "age_s", "duration_s", "error", "job", "attempts", "place")
    known, own = row.fields(), ("output", "files", "size_bytes")
    fields = {"name": known["experiment"], "run": known["run"]} | {name: known[name] for name in names}
    return fields | {name: row.record.get(name) for name in own}


def _cells(row: Row, root: str) -> dict[str, str]:
    """Return the cells of a table row by column, with the output relative to the storage at `root`."""
    known, record = row.cells(), row.record
    output = str(record.get("output") or "-").partition("?")[0]
    size = record.get("size_bytes")
    return {
        "name": known["experiment"],
        "run": known["run"],
        "status": known["status"],
        "output": output.removeprefix(f"{root.partition('?')[0].rstrip('/')}/"),
        "files": "-" if size is None else f"{record.get('files'):,}",
        "size": "-" if size is None else size_text(size),
        "age": known["age"],
        "duration": known["duration"],
        "job": (record.get("job") or {}).get("id", "-"),
    }


@click.command("logs")
@click.argument("name", type=word)
@click.argument("run", type=word, default="latest")
@log_options
def data_logs(name: str, run: str, follow: bool | None, tail: int | None) -> None:
    """Print the output of a data job NAME, the latest or another RUN (run_003 or 3).

    Without --no-follow, the exit code is that of the job, as of mlx xp logs.
    """
    sys.exit(print_log(_find_job(name, run), follow=follow, tail=tail))


@click.command("stop")
@click.argument("name", type=word)
@click.argument("run", type=word, default="latest")
def data_stop(name: str, run: str) -> None:
    """Stop a data job NAME, the latest or another RUN (run_003 or 3). Its output is not published."""
    say(xp.stop(_find_job(name, run)))


def _find_job(name: str, run: str) -> RunFolder:
    """Return the folder of a data job in the storage, by its name and number, or by its path or URI."""
    return lookup.resolve_run(name) if "/" in name else find_run(join_path(lookup.storage_root(), JOBS), name, run)


@click.command("show")
@click.option("--depth", type=click.IntRange(min=0), default=2, show_default=True, help="Levels to list.")
@options.json
@click.argument("path", type=word, required=False)
def data_show(depth: int, as_json: bool, path: str | None) -> None:
    """Show the contents of the storage, or of PATH in it, with sizes."""
    root = lookup.storage_root()
    if not is_uri(root) and not Path(root).is_dir():
        raise UsageError(f"{root} does not exist on this machine; on a cluster: mlx --on http://HEAD:8265 data show")
    found = contents.survey(contents.path_in(root, path or ""), depth)
    if as_json:
        click.echo(json.dumps(found.as_json(), indent=2))
        return
    for line in found.lines():
        say(line)


@click.command("rm")
@options.yes
@click.argument("path", type=word)
def data_rm(yes: bool, path: str) -> None:
    """Remove PATH, a file or folder, from the storage, like data/old or .prepared.

    Runs, and folders that a run reads or a data job fills, are refused.
    """
    found = contents.path_in(lookup.storage_root(), path)
    contents.refuse_in_use(found)
    entry = contents.survey(found, 0)
    title = f"{found.title}, {entry.files:,} file{'s' * (entry.files != 1)}, {size_text(entry.size_bytes)}"
    if not yes:
        confirm(f"remove {title}?")
        contents.refuse_in_use(found)  # a run may have begun
    contents.remove(found)
    say(f"removed {title}")
