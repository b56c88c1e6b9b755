"""Web pages about runs: one file each that holds all it shows, so that it opens anywhere, also without a network.

What runs say of themselves is not trusted: `pages/*.html` escape every text, and a page allows no script but its own
two (Content-Security-Policy), no picture and no address outside it.
"""

import base64
import contextlib
import functools
import hashlib
import html
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_runtime import logs
from mlx_runtime.documents import COUNT, NUMBER, from_json
from mlx_runtime.errors import StorageError, UsageError
from mlx_runtime.layout import RunFolder
from mlx_runtime.listing import COLUMNS, Row, number, of, span
from mlx_runtime.redaction import redacted
from mlx_runtime.saved import saved_in
from mlx_runtime.storage import Storage, joined, size_text, split_options, write_atomic
from mlx_runtime.tracking import FACTS

if TYPE_CHECKING:
    import jinja2

PAGES = Path(__file__).parent / "pages"

REPORT = "report.html"
"""Name of the page of a run, in its folder."""

REPEATED = 100
"""Characters of a text that may well be said of many runs."""

LOG_LINES = 100

POINTS = 2_000
"""Of a curve; of longer ones each stretch is drawn by its smallest and its largest value."""

GROUPED = ("lr", "time")
"""What the runtime writes as `lr/adam`: one chart for all of them. Of others, `train/loss` and `val/loss` share one."""

ASIDE = (*GROUPED, "samples_per_s")

Point = tuple[int, float | None, int]
"""Step, value (None for NaN), epoch counted from 1."""


def of_run(folder: RunFolder) -> str:
    """The page of one run: what it is, its config, curves, checkpoints and the end of its log.

    What cannot be read is said to be missing; the page is made from the rest.
    """
    from plotly.offline import get_plotlyjs

    [row] = of([folder])
    charts = _charts(_series(_text(folder, folder.metrics.name) or ""), row.monitor)
    return _page(
        "run.html",
        scripts=[get_plotlyjs(), (PAGES / "charts.js").read_text()] if charts else [],
        title=folder.title,
        row=row,
        facts=_facts(row),
        packages=row.record.get("packages") or {},
        changes=(row.record.get("git") or {}).get("diff"),
        charts=charts,
        metrics={name: number(value) for name, value in sorted(row.metrics.items())},
        checkpoints=_checkpoints(row),
        config=_text(folder, folder.conf.name),
        log=_log(folder),
    )


def of_runs(rows: Sequence[Row]) -> str:
    """The page of many runs: one table per experiment, and what is known of each run."""
    experiments: dict[str, list[tuple[int, Row]]] = {}
    for index, row in enumerate(rows):
        experiments.setdefault(row.folder.experiment, []).append((index, row))
    columns = [name for name in COLUMNS if name != "experiment"]
    facts = [_facts(row) for row in rows]
    return _page("runs.html", title="Runs", experiments=experiments, columns=columns, facts=facts, count=len(rows))


def write(page: str, file: Path) -> None:
    """Store a page. A link stays one, and so does what is no file, like a pipe or a device: the page goes through it.

    Raises:
        UsageError: it cannot be written there.
    """
    content = page.encode(errors="backslashreplace")
    try:
        if file.exists() and not file.is_file():
            file.write_bytes(content)
        else:
            write_atomic(file.resolve(), content)
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror or error}; choose another file") from error


def _finalized(value: Any) -> Any:
    """A text without its secrets. Pages of many runs say the same short texts again and again."""
    if type(value) is not str:
        return value
    return _redacted_once(value) if len(value) <= REPEATED else redacted(value)


_redacted_once = functools.lru_cache(maxsize=1 << 16)(redacted)


@functools.cache
def _environment() -> "jinja2.Environment":
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(PAGES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalized,
    )
    environment.filters["number"] = number
    return environment


def keep(page: str, folder: RunFolder) -> str:
    """Store the page of a run in its folder or on its object store. Returns where.

    Raises:
        UsageError: it cannot be written there.
    """
    where = joined(folder.place, REPORT)
    try:
        Storage(folder.place).write(page.encode(errors="backslashreplace"), REPORT)
    except OSError as error:
        raise UsageError(
            f"cannot write {where}: {error.strerror or error}; choose another place with -o FILE"
        ) from error
    return where


def _page(template: str, *, scripts: Sequence[str] = (), **values: Any) -> str:
    """A page from its template, in which scripts other than these do not run."""
    from markupsafe import Markup

    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    return (
        _environment()
        .get_template(template)
        .render(
            scripts=[Markup(script) for script in scripts],
            allowed=" ".join(f"'sha256-{item}'" for item in hashes) or "'none'",
            **values,
        )
    )


def _facts(row: Row) -> dict[str, str]:
    """What a run is, in words; what is not known is left out."""
    record = row.record
    best, git, cells = record.get("best") or {}, record.get("git") or {}, row.cells()
    job = record.get("job") or {}
    workers = record.get("workers")
    facts = {
        "epochs": cells["epoch"],
        "best": f"{row.monitor} {number(row.best)} (epoch {best['epoch'] + 1})" if row.best is not None else "",
        "started": (row.start or "").replace("T", " ").replace("+00:00", " UTC"),
        "took": span(row.duration_s),
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
        "folder": row.folder.place,
    }
    return {name: value for name, value in facts.items() if value not in ("", "-")}


def _series(lines: str) -> dict[str, list[Point]]:
    """The curve of each number in metrics.jsonl. A line that is not whole is passed over."""
    found: dict[str, list[Point]] = {}
    for line in lines.splitlines():
        with contextlib.suppress(ValueError):
            values = from_json(line.encode(), {"step": COUNT, "epoch": COUNT}, needs=("step", "epoch"))
            for name, value in values.items():
                if name not in ("step", "epoch", *FACTS) and NUMBER.or_null().fits(value):
                    found.setdefault(name, []).append((values["step"], value, values["epoch"] + 1))
    return found


def _charts(series: Mapping[str, Sequence[Point]], monitor: str | None) -> list[dict[str, Any]]:
    """Charts with the curves that belong together, that of the monitored metric first, speed and the like last."""
    charts: dict[str, dict[str, Any]] = {}
    for name, points in series.items():
        group, _, short = name.partition("/")
        title, label = (group, short) if group in GROUPED or not short else (short, group)
        chart = charts.setdefault(title, {"title": title, "place": 2 if title in ASIDE else 1, "curves": []})
        chart["place"] = 0 if name == monitor else chart["place"]
        steps, values, epochs = zip(*_thinned(points), strict=True)
        # Plotly takes tags and %{...} in names for its own markup.
        shown = html.escape(label or title).replace("%", "&#37;")
        chart["curves"].append({"name": shown, "x": steps, "y": values, "epochs": epochs})
    return sorted(charts.values(), key=lambda chart: chart["place"])


def _thinned(points: Sequence[Point]) -> Sequence[Point]:
    """At most `POINTS` points that look the same: peaks stay."""
    if len(points) <= POINTS:
        return points
    kept: dict[int, Point] = {0: points[0], len(points) - 1: points[-1]}
    stretches = POINTS // 2 - 1
    for stretch in range(stretches):
        first, end = (len(points) * edge // stretches for edge in (stretch, stretch + 1))
        known = [(value, index) for index in range(first, end) if (value := points[index][1]) is not None]
        for _, index in (min(known), max(known)) if known else [(None, first)]:
            kept[index] = points[index]
    return [kept[index] for index in sorted(kept)]


def _checkpoints(row: Row) -> list[dict[str, str]]:
    """A table of the checkpoints that are kept, newest first."""
    try:
        found = saved_in(row.folder.checkpoints)
    except StorageError:
        return []
    best = split_options(str((row.record.get("best") or {}).get("path") or ""))[0].rpartition("/")[2]
    return [
        {
            "checkpoint": item.name,
            "": " ".join(_marks(item.name, found[-1].name, best)),
            "epoch": str(item.epoch + 1) if item.finished else f"in {item.epoch + 1}",
            "step": f"{item.global_step:,}",
            "size": size_text(item.size_bytes),
            "numbers": ", ".join(f"{name} {number(value)}" for name, value in sorted(item.metrics.items())),
        }
        for item in reversed(found)
    ]


def _marks(name: str, latest: str, best: str) -> Iterable[str]:
    if name == best:
        yield "best"
    if name == latest:
        yield "latest"


def _log(folder: RunFolder) -> str | None:
    """The last lines of the driver's log, without what colours them on a terminal."""
    with contextlib.suppress(StorageError):
        found = logs.stored(folder)
        if found is not None:
            lines = found.decode(errors="replace").splitlines()[-LOG_LINES:]
            return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", "\n".join(lines))
    return None


def _text(folder: RunFolder, name: str) -> str | None:
    with contextlib.suppress(OSError, StorageError):
        return Storage(folder.place).read(name).decode(errors="replace")
    return None
