"""Web pages about runs, each a single file that opens anywhere, even without a network.

The content of runs is not trusted: `pages/*.html` escape every text, and a page allows only its own two scripts
(Content-Security-Policy), and no images or addresses outside it.
"""

import base64
import contextlib
import functools
import hashlib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_runtime.errors import StorageError, UsageError
from mlx_runtime.runs import logs
from mlx_runtime.runs.checkpoint_index import list_checkpoints
from mlx_runtime.runs.curves import group_charts, read_curves
from mlx_runtime.runs.folder import RunFolder
from mlx_runtime.runs.listing import AskJobs, Row, ask_nobody, summarize
from mlx_runtime.runs.tables import COLUMNS, format_duration, format_number
from mlx_runtime.storage.files import Storage, joined, size_text, split_options
from mlx_runtime.storage.local import write_atomic
from mlx_runtime.storage.redaction import redacted

if TYPE_CHECKING:
    import jinja2

PAGES = Path(__file__).parent / "pages"

REPORT = "report.html"
"""Name of the page in the folder of a run."""

CACHED_LENGTH = 100
"""Texts up to this length repeat in many runs; their redaction is cached."""

LOG_LINES = 100


def render_run(folder: RunFolder, ask: AskJobs = ask_nobody) -> str:
    """Render the page of a run: facts, config, curves, checkpoints and the end of its log.

    The page names what cannot be read, and shows the rest.
    """
    from plotly.offline import get_plotlyjs

    [row] = summarize([folder], ask)
    charts = group_charts(read_curves(_text(folder, folder.metrics.name) or ""), row.monitor)
    return _render(
        "run.html",
        scripts=[get_plotlyjs(), (PAGES / "charts.js").read_text()] if charts else [],
        title=folder.title,
        row=row,
        facts=_facts(row),
        packages=row.record.get("packages") or {},
        changes=(row.record.get("git") or {}).get("diff"),
        charts=charts,
        metrics={name: format_number(value) for name, value in sorted(row.metrics.items())},
        checkpoints=_checkpoints(row),
        config=_text(folder, folder.conf.name),
        log=_log(folder),
    )


def render_runs(rows: Sequence[Row]) -> str:
    """Render the page of many runs: one table per experiment, and the facts of each run."""
    experiments: dict[str, list[tuple[int, Row]]] = {}
    for index, row in enumerate(rows):
        experiments.setdefault(row.folder.experiment, []).append((index, row))
    columns = [name for name in COLUMNS if name != "experiment"]
    facts = [_facts(row) for row in rows]
    return _render("runs.html", title="Runs", experiments=experiments, columns=columns, facts=facts, count=len(rows))


def write(page: str, file: Path) -> None:
    """Write a page to a file. Links, pipes and devices are written through, not replaced.

    Raises:
        UsageError: the file cannot be written.
    """
    content = page.encode(errors="backslashreplace")
    try:
        if file.exists() and not file.is_file():
            file.write_bytes(content)
        else:
            write_atomic(file.resolve(), content)
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror or error}; choose another file") from error


def store(page: str, folder: RunFolder) -> str:
    """Write the page of a run to its folder or object store. Returns its path or URI.

    Raises:
        UsageError: it cannot be written there.
    """
    path = joined(folder.location, REPORT)
    try:
        Storage(folder.location).write(page.encode(errors="backslashreplace"), REPORT)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}; choose another file with -o FILE") from error
    return path


def _render(template: str, *, scripts: Sequence[str] = (), **values: Any) -> str:
    """Render a page in which no other scripts can run."""
    from markupsafe import Markup

    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{item}'" for item in hashes) or "'none'"
    page = _environment().get_template(template)
    return page.render(scripts=[Markup(script) for script in scripts], allowed=allowed, **values)


@functools.cache
def _environment() -> "jinja2.Environment":
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(PAGES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_without_secrets,
    )
    environment.filters["number"] = format_number
    return environment


def _without_secrets(value: Any) -> Any:
    if type(value) is not str:
        return value
    return _redacted_cached(value) if len(value) <= CACHED_LENGTH else redacted(value)


_redacted_cached = functools.lru_cache(maxsize=1 << 16)(redacted)


def _facts(row: Row) -> dict[str, str]:
    """Describe a run in words, leaving out what is not known."""
    record = row.record
    best, git, cells = record.get("best") or {}, record.get("git") or {}, row.cells()
    job = record.get("job") or {}
    workers = record.get("workers")
    facts = {
        "epochs": cells["epoch"],
        "best": f"{row.monitor} {format_number(row.best)} (epoch {best['epoch'] + 1})" if row.best is not None else "",
        "started": (row.start or "").replace("T", " ").replace("+00:00", " UTC"),
        "took": format_duration(row.duration_s),
        "attempts": str(record["attempt"]) if record.get("attempt", 1) != 1 else "",
        "workers": "none: in the driver's process" if workers == 0 else str(workers or ""),
        "device": str(record.get("device") or ""),
        "parameters": f"{record['parameters']:,}" if isinstance(record.get("parameters"), int) else "",
        "machine": str(record.get("host") or ""),
        "job": f"{job.get('id')} on {job.get('address')}" if job else "",
        "python": str(record.get("python") or ""),
        "seed": str(record.get("seed", "")),
        "commit": f"{git['commit']}{', with uncommitted changes' if git.get('diff') else ''}" if git else "",
        "command": str(record.get("command") or ""),
        "overrides": " ".join(str(item) for item in record.get("overrides") or []),
        "folder": row.folder.location,
    }
    return {name: value for name, value in facts.items() if value not in ("", "-")}


def _checkpoints(row: Row) -> list[dict[str, str]]:
    """Return a table of the checkpoints of a run, newest first."""
    try:
        found = list_checkpoints(row.folder.checkpoints)
    except StorageError:
        return []
    best = split_options(str((row.record.get("best") or {}).get("path") or ""))[0].rpartition("/")[2]
    return [
        {
            "checkpoint": item.name,
            "": " ".join(_labels(item.name, found[-1].name, best)),
            "epoch": str(item.epoch + 1) if item.finished else f"in {item.epoch + 1}",
            "step": f"{item.global_step:,}",
            "size": size_text(item.size_bytes),
            "metrics": ", ".join(f"{name} {format_number(value)}" for name, value in sorted(item.metrics.items())),
        }
        for item in reversed(found)
    ]


def _labels(name: str, latest: str, best: str) -> Iterable[str]:
    if name == best:
        yield "best"
    if name == latest:
        yield "latest"


def _log(folder: RunFolder) -> str | None:
    """Return the last lines of the driver's log, without escape sequences."""
    with contextlib.suppress(StorageError):
        content = logs.read_log(folder)
        if content is not None:
            lines = content.decode(errors="replace").splitlines()[-LOG_LINES:]
            return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", "\n".join(lines))
    return None


def _text(folder: RunFolder, name: str) -> str | None:
    with contextlib.suppress(OSError, StorageError):
        return Storage(folder.location).read(name).decode(errors="replace")
    return None
