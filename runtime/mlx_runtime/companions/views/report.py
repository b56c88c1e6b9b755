"""Web pages about runs, each in a single file that can be opened offline.

The content of runs is not trusted: `pages/*.html` escape all text, and the Content-Security-Policy of a page allows
only its own two scripts, and no external images or addresses.
"""

import base64
import functools
import hashlib
import html
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_runtime.errors import StorageError, UsageError, short_message
from mlx_runtime.extras import require
from mlx_runtime.runs import logs
from mlx_runtime.runs.checkpoints.index import list_checkpoints, position
from mlx_runtime.runs.folder import RunFolder, read_rows
from mlx_runtime.runs.queries.listing import AskJobs, Row, summarize
from mlx_runtime.runs.tables import format_duration, format_number, plural
from mlx_runtime.storage.documents import NUMBER
from mlx_runtime.storage.files import join_path, size_text, split_options, storage_at
from mlx_runtime.storage.redaction import redact

if TYPE_CHECKING:
    import jinja2

PAGES = Path(__file__).parent / "pages"

PAGE_FILE = "report.html"

LOG_LINES = 100

FACTS = ("training_iteration", "timestamp", "date", "time_this_iter_s", "time_total_s", "hostname", "node_ip", "pid")
"""Fields of a report that are not metrics, in addition to `step` and `epoch`."""

MAX_POINTS = 2_000
"""Maximum number of points per curve; longer ones are reduced to the minimum and maximum of each section."""

GROUP = "lr"
"""Prefix of the curves that share a chart, like `lr/adam`. Other charts show one metric: `train/loss`, `val/loss`."""

INTERVAL = "_interval"
"""Suffix of averages since the previous record; they share a chart with the average of the same name."""

OF_WORKERS = ("fragments", "replicas")
"""Prefixes of numbers about workers, of which each has a chart with its ranks, like `fragments/bytes/rank_0`."""

OF_TRAINING = re.compile(rf"({'|'.join((GROUP, 'time', 'gpu', *OF_WORKERS))})/|.*_per_s$")
"""Names of numbers that are not results: learning rates, times, speeds, and the use of devices and networks."""

Point = tuple[int, float | None, int, float | None]
"""Step, value (None for NaN), epoch counted from 1, seconds since 1970 if they are known."""


def render_run(folder: RunFolder, ask: AskJobs | None = None) -> str:
    """Render the page of a run: facts, config, curves, checkpoints and the end of its log. List unreadable parts."""
    [row] = summarize([folder], ask)
    problems: list[str] = []
    text = functools.partial(_text, problems=problems)
    curves = text(folder.read, folder.metrics.name) or ""
    charts = group_charts(read_curves(curves, problems), row.monitor)
    return render(
        PAGES / "run.html",
        title=folder.title,
        row=row,
        facts=known_facts(row),
        charts=charts,
        metrics={name: format_number(value) for name, value in sorted(row.metrics.items())},
        checkpoints=checkpoint_table(row),
        config=text(folder.document, folder.conf.name),
        log=_log(text(folder.read, logs.log_name())),
        problems=problems,
    )


def write(page: str, file: Path) -> None:
    """Write a page to a file."""
    try:
        file.write_bytes(page.encode(errors="backslashreplace"))
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror or error}; choose another file") from error


def store(page: str, folder: RunFolder) -> str:
    """Write the page of a run to its folder or object store. Return its path or URI."""
    path = join_path(folder.location, PAGE_FILE)
    try:
        storage_at(folder.location).write(page.encode(errors="backslashreplace"), PAGE_FILE)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}; choose another file with -o FILE") from error
    return path


def render(template: Path, *, charts: Sequence[Mapping[str, Any]] = (), **values: Any) -> str:
    """Render a page whose only scripts are those that draw its charts."""
    require("jinja2", "a report")
    from markupsafe import Markup

    scripts = []
    if charts:
        require("plotly", "a report")
        from plotly.offline import get_plotlyjs

        scripts = [get_plotlyjs(), (PAGES / "charts.js").read_text()]
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{item}'" for item in hashes) or "'none'"
    page = _environment(template.parent).get_template(template.name)
    return page.render(scripts=[Markup(script) for script in scripts], allowed=allowed, charts=charts, **values)


@functools.cache
def _environment(folder: Path) -> "jinja2.Environment":
    """Return the Jinja environment of a folder of templates; each template is compiled once."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([folder, PAGES]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: redact(value) if type(value) is str else value,
    )
    environment.filters["number"] = format_number
    return environment


def known_facts(row: Row) -> dict[str, str]:
    """Describe a run in words, without unknown facts."""
    record = row.record
    best, git, job = record.get("best") or {}, record.get("git") or {}, record.get("job")
    workers, parameters = record.get("workers"), record.get("parameters")
    facts = {
        "epochs": row.cells()["epoch"],
        "best": f"{row.monitor} {format_number(row.best)} ({position(best)})" if row.best is not None else "",
        "started": f"{row.start[:19].replace('T', ' ')} UTC" if row.start else "",
        "duration": format_duration(row.duration_s),
        "attempts": record["attempt"] if record.get("attempt", 1) != 1 else None,
        "sweep": _sweep(row),
        "workers": "none: in the driver's process" if workers == 0 else workers,
        "device": record.get("device"),
        "parameters": f"{parameters:,}" if parameters is not None else None,
        "machine": record.get("host"),
        "job": f"{job['id']} on {job['address']}" if job else None,
        "python": record.get("python"),
        "seed": record.get("seed"),
        "commit": f"{git['commit']}{', with uncommitted changes' if git.get('diff') else ''}" if git else "",
        "command": record.get("command"),
        "overrides": " ".join(record.get("overrides") or []),
        "folder": row.folder.location,
    }
    return {name: str(value) for name, value in facts.items() if value not in (None, "", "-")}


def _sweep(row: Row) -> str:
    if not row.sweep:
        return ""
    fold = "" if row.sweep.get("fold") is None else f", fold {row.sweep['fold'] + 1}"
    values = " ".join(f"{name}={value}" for name, value in row.sweep.get("values", {}).items())
    return f"{row.sweep['name']}, trial {row.sweep['trial']}{fold}: {values}"


def checkpoint_table(row: Row) -> list[dict[str, str]]:
    """Return a table of the checkpoints of a run, newest first."""
    try:
        found = list_checkpoints(row.folder.checkpoints)
    except StorageError:
        return []
    best = split_options(str((row.record.get("best") or {}).get("path") or ""))[0].rpartition("/")[2]
    return [
        {
            "checkpoint": item.name,
            "": " ".join(name for name, holds in (("best", item.name == best), ("latest", item is found[-1])) if holds),
            "epoch": str(item.epoch + 1) if item.finished else f"in {item.epoch + 1}",
            "step": f"{item.global_step:,}",
            "size": size_text(item.size_bytes + item.shards_bytes),
            "metrics": ", ".join(f"{name} {format_number(value)}" for name, value in sorted(item.metrics.items())),
        }
        for item in reversed(found)
    ]


def _log(content: str | None) -> str | None:
    """Return the last lines of a log, without escape sequences."""
    if content is None:
        return None
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", "\n".join(content.splitlines()[-LOG_LINES:]))


def _text(read: Callable[[str], bytes], name: str, problems: list[str]) -> str | None:
    """Return the text of a file of a run; None if it is missing or, with an entry in `problems`, unreadable."""
    try:
        return read(name).decode(errors="replace")
    except FileNotFoundError:
        return None
    except (OSError, StorageError) as error:
        problems.append(f"{name} cannot be read: {short_message(error)}")
        return None


def read_curves(lines: str, problems: list[str] | None = None) -> dict[str, list[Point]]:
    """Read the curve of each metric from metrics.jsonl. The number of damaged lines is added to the problems."""
    found: dict[str, list[Point]] = {}
    damaged = 0
    for _, row in read_rows(lines.encode()):
        if row is None:
            damaged += 1
            continue
        time = time if NUMBER.fits(time := row.get("timestamp")) else None
        for name, value in row.items():
            if name not in ("step", "epoch", *FACTS) and NUMBER.or_null().fits(value):
                known = None if value is None or math.isnan(value) else value
                found.setdefault(name, []).append((row["step"], known, row["epoch"] + 1, time))
    if damaged and problems is not None:
        problems.append(f"{plural(damaged, 'line')} of metrics.jsonl cannot be read")
    return found


def group_charts(curves: Mapping[str, Sequence[Point]], monitor: str | None) -> list[dict[str, Any]]:
    """Group curves into charts: first the monitored metric, last learning rates and speed."""
    charts: dict[str, dict[str, Any]] = {}
    for name, points in curves.items():
        group, _, short = name.partition("/")
        title, label = (group, short) if group == GROUP or not short else (short, group)
        if group in OF_WORKERS:
            short, _, rank = short.partition("/")
            title, label = f"{group}/{short}", rank or group
        if name.endswith(INTERVAL) and name.removesuffix(INTERVAL) in curves:
            title, label = title.removesuffix(INTERVAL), f"{label} interval"
        order = 2 if OF_TRAINING.match(name) else 1
        chart = charts.setdefault(title, {"title": title, "order": order, "curves": []})
        chart["order"] = 0 if name == monitor else chart["order"]
        steps, values, epochs, _ = zip(*thin(points), strict=True)
        chart["curves"].append({"name": escape(label or title), "x": steps, "y": values, "epochs": epochs})
    return sorted(charts.values(), key=lambda chart: chart["order"])


def escape(text: str) -> str:
    """Escape markup that Plotly would interpret in a text: tags and `%{...}`."""
    return html.escape(text, quote=False).replace("%", "&#37;")


def thin(points: Sequence[Any], most: int = MAX_POINTS) -> Sequence[Any]:
    """Reduce a curve to at most so many points without changing its look: peaks and gaps are kept.

    The second field of a point is its value, or None in a gap.
    """
    if len(points) <= most:
        return points
    kept, sections = {0, len(points) - 1}, max(1, (most - 2) // 3)
    for section in range(sections):
        first, end = (len(points) * edge // sections for edge in (section, section + 1))
        known = [(value, index) for index in range(first, end) if (value := points[index][1]) is not None]
        kept |= {index for _, index in (min(known), max(known))} if known else set()
        if len(known) < end - first:
            kept.add(next(index for index in range(first, end) if points[index][1] is None))
    return [points[index] for index in sorted(kept)]
