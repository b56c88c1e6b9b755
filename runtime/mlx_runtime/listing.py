"""Which runs there are and how they do, read from what they have stored: their machine or cluster may be gone.

Epochs are counted from 1 here, as they are printed.
"""

import collections
import datetime
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TextIO, TypeVar

from mlx_runtime import registry, xp
from mlx_runtime.errors import StorageError, UsageError, near, plain
from mlx_runtime.layout import RunFolder, find_run, list_runs

UNREADABLE = "UNREADABLE"
"""Shown for a run whose run.json is missing, half-written or no record."""

STATUSES = ("PENDING", "RUNNING", "SUCCEEDED", "FAILED", "STOPPED", "STALE", UNREADABLE)

READERS = 16
"""Records read at the same time: an object store answers slowly, but many at once."""

SLOW_S = 0.02
"""How long reading one run may take on average before many are read at the same time."""

COLUMNS = ("experiment", "run", "status", "epoch", "metric", "best", "last", "workers", "age", "duration")

LONG = ("experiment", "metric")
"""Columns that a narrow terminal breaks into several lines."""

COLORS = {"RUNNING": "cyan", "SUCCEEDED": "green", "FAILED": "red", "STALE": "red", UNREADABLE: "red"}

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Row:
    """A run in a listing.

    Attributes:
        folder: of the run.
        status: one of `STATUSES`.
        record: what run.json says; empty when it cannot be read.
        problem: why it cannot be read, else None.
    """

    folder: RunFolder
    status: str
    record: Mapping[str, Any]
    problem: str | None = None

    @property
    def monitor(self) -> str | None:
        """The metric that decides which of its checkpoints is best."""
        return self.record.get("monitor")

    @property
    def metrics(self) -> Mapping[str, float]:
        """Its latest numbers."""
        return self.record.get("metrics") or {}

    @property
    def best(self) -> float | None:
        """The best value of `monitor`."""
        return (self.record.get("best") or {}).get("value")

    @property
    def epoch(self) -> int | None:
        """Epochs that are over."""
        if self.record.get("epoch") is not None:
            return int(self.record["epoch"]) + 1
        latest = self.record.get("latest")  # its checkpoint, perhaps in the middle of an epoch
        return int(latest["epoch"]) + ("step" not in latest) if latest else None

    @property
    def start(self) -> str | None:
        """When its first attempt began, in UTC."""
        first: Mapping[str, Any] = (self.record.get("attempts") or [self.record])[0]
        return first.get("start") or self.record.get("start")

    @property
    def age_s(self) -> float | None:
        """Seconds since then."""
        return _seconds(self.start, registry.now())

    @property
    def duration_s(self) -> float | None:
        """Seconds of work, until the end, the last sign of life or now; of earlier attempts those that have an end."""
        last = registry.now() if self.status in registry.LIVING else self.record.get("heartbeat")
        latest = _seconds(self.record.get("start"), self.record.get("end") or last)
        earlier = [_seconds(item.get("start"), item.get("end")) for item in self.record.get("attempts") or []]
        known = [seconds for seconds in [*earlier, latest] if seconds is not None]
        return sum(known) if known else None

    def value(self, metric: str) -> float | None:
        """What it is ranked by: the best value of the metric when it is the run's monitor, else the last one."""
        return self.best if metric == self.monitor and self.best is not None else self.metrics.get(metric)

    def fields(self) -> dict[str, Any]:
        """For `--json`."""
        best = self.record.get("best") or {}
        return {
            "experiment": self.folder.experiment,
            "run": self.folder.name,
            "status": self.status,
            "problem": self.problem,
            "epoch": self.epoch,
            "epochs": self.record.get("epochs"),
            "monitor": self.monitor,
            "mode": self.record.get("mode"),
            "best": self.best,
            "best_epoch": best["epoch"] + 1 if best else None,
            "best_checkpoint": best.get("path"),
            "metrics": dict(self.metrics),
            "workers": self.record.get("workers"),
            "start": self.start,
            "end": self.record.get("end"),
            "age_s": self.age_s,
            "duration_s": self.duration_s,
            "error": self.record.get("error"),
            "job": self.record.get("job"),
            "place": self.folder.place,
        }

    def cells(self, metric: str | None = None) -> dict[str, str]:
        """For a table.

        Args:
            metric: to show; by default the run's monitor, else its first number.
        """
        shown = metric or self.monitor or next(iter(self.metrics), None)
        epochs = self.record.get("epochs")
        epoch = "" if self.epoch is None else f"{self.epoch}/{epochs}" if epochs else str(self.epoch)
        workers = self.record.get("workers")
        values = {
            "experiment": self.folder.experiment,
            "run": self.folder.name,
            "status": self.status,
            "epoch": epoch,
            "metric": shown or "",
            "best": number(self.best) if shown == self.monitor else "",
            "last": number(self.metrics.get(shown or "")),
            "workers": "" if workers is None else str(workers),
            "age": span(self.age_s, units=1),
            "duration": span(self.duration_s),
        }
        return {name: value or "-" for name, value in values.items()}


def rows(
    name: str | None = None, *, status: str | None = None, sort: str | None = None, mode: str | None = None
) -> list[Row]:
    """The runs of an experiment, or all of the storage, oldest first.

    Args:
        name: of an experiment in the storage.
        status: only runs that have this one.
        sort: metric to sort by, best first. What is best, the runs that monitor it say (`cfg.mode`); of another metric
            the smallest comes first. Runs without a value come last.
        mode: `max` or `min`, wins over what the runs say.

    Raises:
        UsageError: no such experiment, or no run has such a metric.
        StorageError: the storage does not answer.
    """
    root = xp.storage()
    folders = list_runs(root, name)
    if name is not None and not folders:
        find_run(root, name)  # tells what there is instead
    found = of(folders)
    if sort is not None:
        found = _sorted(found, sort, mode)
    return [row for row in found if status in (None, row.status)]


def nothing(status: str | None) -> str:
    """What to say of an empty listing."""
    root = xp.storage()
    if status is not None:
        return f"no run in {root} is {status}"
    return f"there are no runs in {root} yet; make one with: mlx train run"


def of(folders: Sequence[RunFolder]) -> list[Row]:
    """What these runs say of themselves, and the clusters of those that live."""
    records = at_once(_record, folders)
    jobs: dict[tuple[str, str], str] = {}
    living = [_job(record) for record in records if isinstance(record, dict)]
    if asked := {job for job in living if job is not None}:
        from mlx_runtime.jobs import statuses

        jobs = statuses(asked)
    return [_row(folder, record, jobs) for folder, record in zip(folders, records, strict=True)]


def show(table: Sequence[Mapping[str, str]], stream: TextIO) -> None:
    """Print rows with the same columns: drawn on a terminal, plain and aligned in a pipe and where there is no room."""
    if not table:
        return
    table = [{plain(key, one_line=True): plain(text, one_line=True) for key, text in row.items()} for row in table]
    if stream.isatty() and (width := shutil.get_terminal_size().columns) >= 80:
        from rich.console import Console
        from rich.table import Column, Table
        from rich.text import Text

        fixed = [name for name in COLUMNS if name not in LONG]
        columns = [Column(name, no_wrap=name in fixed, min_width=None if name in fixed else 8) for name in table[0]]
        drawn = Table(
            *columns, box=None, pad_edge=False, header_style="bold", padding=(0, 2 if width >= 100 else 1, 0, 0)
        )
        for row in table:
            drawn.add_row(*(Text(value, style=COLORS.get(value, ""), overflow="fold") for value in row.values()))
        Console(file=stream).print(drawn)
        return
    lines = [list(table[0]), *(list(row.values()) for row in table)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    for line in lines:
        print("  ".join(f"{value:<{width}}" for value, width in zip(line, widths, strict=True)).rstrip(), file=stream)


def number(value: Any) -> str:
    """A metric for a person; nothing when there is none."""
    if not isinstance(value, int | float):
        return ""
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e4 else f"{value:.3g}"


def span(seconds: float | None, units: int = 2) -> str:
    """A length of time in its largest units: `45 s`, `3 min 20 s`, `2 d 4 h`; nothing when it is not known."""
    if seconds is None:
        return ""
    rest, parts = max(0, round(seconds)), []
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1)):
        count, rest = divmod(rest, length)
        parts.append((count, unit))
    first = next((index for index, (count, _) in enumerate(parts) if count), len(parts) - 1)
    return " ".join(f"{count} {unit}" for count, unit in parts[first : first + units] if count) or "0 s"


def at_once(function: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """The same for many runs: one after the other while the storage is fast, many at the same time when it is slow.

    Threads that only parse what a local disk returns at once would wait for each other.
    """
    waiting, found = iter(items), []
    started = time.monotonic()
    for item in waiting:
        found.append(function(item))
        if time.monotonic() - started > SLOW_S * len(found):
            break
    with ThreadPoolExecutor(READERS) as pool:
        return found + list(pool.map(function, waiting))


def _record(folder: RunFolder) -> Any:
    """What run.json holds, or the error of reading it."""
    try:
        return registry.recorded(folder)
    except StorageError as error:
        return error


def _job(record: Mapping[str, Any]) -> tuple[str, str] | None:
    """Address and id of the job of a run that lives, if it has one."""
    job = record.get("job")
    if record.get("status") not in registry.LIVING or not isinstance(job, dict):
        return None
    return str(job.get("address")), str(job.get("id"))


def _row(folder: RunFolder, record: Any, jobs: Mapping[tuple[str, str], str]) -> Row:
    if isinstance(record, StorageError):
        return Row(folder, UNREADABLE, {}, str(record))
    job = _job(record)
    return Row(folder, registry.status_of(record, jobs.get(job) if job else None), record)


def mode_of(found: Iterable[Row], metric: str) -> str | None:
    """Whether a max or a min of a metric is best, as most of the runs that monitor it have it."""
    said = collections.Counter(str(row.record.get("mode") or "min") for row in found if row.monitor == metric)
    return said.most_common(1)[0][0] if said else None


def _sorted(found: Sequence[Row], metric: str, mode: str | None) -> list[Row]:
    values = [(row.value(metric), row) for row in found]
    if found and all(value is None for value, _ in values):
        raise UsageError(f"no run has a value of {metric}.{known(found, metric)}")
    sign = -1 if (mode or mode_of(found, metric)) == "max" else 1
    ranked = [(sign * value, row) for value, row in values if value is not None]
    ranked.sort(key=lambda pair: pair[0])
    return [row for _, row in ranked] + [row for value, row in values if value is None]


def known(found: Iterable[Row], metric: str) -> str:
    """What to say when no run has a metric: those that there are, or one that looks like it."""
    names = {name for row in found for name in row.metrics}
    return near(metric, names) if len(names) <= 30 else " See all with: mlx xp ls --json"


def _seconds(start: Any, end: Any) -> float | None:
    if not start or not end:
        return None
    first, last = (datetime.datetime.fromisoformat(str(item)) for item in (start, end))
    return (last - first).total_seconds()
