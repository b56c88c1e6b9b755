"""Listings of runs and their status, from their records alone, because their machine or cluster may be gone.

Epochs are counted from 1 here, as in the output.
"""

import collections
import contextlib
import datetime
import functools
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from mlx_runtime.companions import is_remote, jobs_at, reader_of
from mlx_runtime.errors import StorageError, UsageError, suggest
from mlx_runtime.runs import records
from mlx_runtime.runs.checkpoints.index import score
from mlx_runtime.runs.folder import SWEEP, RunFolder, find_run, list_runs, run_folder
from mlx_runtime.runs.queries import lookup
from mlx_runtime.runs.tables import format_duration, format_number
from mlx_runtime.storage import documents

UNREADABLE = "UNREADABLE"
"""Status of a run whose run.json is missing or invalid."""

STATUSES = ("PENDING", "WAITING", "RUNNING", "SUCCEEDED", "FAILED", "STOPPED", "PRUNED", "STALE", UNREADABLE)

THREADS = 16
"""Number of records read at the same time; an object store is slow, but answers many requests at once."""

SLOW_S = 0.02
"""Average time to read a record above which several are read at the same time."""

NEW_S = 60.0
"""Age up to which a folder without a record belongs to a run that is starting."""

Item = TypeVar("Item")
Result = TypeVar("Result")

AskJobs = Callable[[set[tuple[str, str]]], Mapping[tuple[str, str], str]]
"""Returns the status of jobs by address and id, if their clusters know it."""

Load = Callable[[RunFolder], Mapping[str, Any]]
"""Returns the record of a run, or raises StorageError."""


@dataclass(frozen=True)
class Row:
    """A run in a listing. If its run.json cannot be read, `record` is empty and `problem` gives the reason."""

    folder: RunFolder
    status: str
    record: Mapping[str, Any]
    problem: str | None = None
    reason: str | None = None  # of the status, from the scheduler of the run's job

    @property
    def sweep(self) -> Mapping[str, Any]:
        """Name of the run's sweep, with its trial, fold and values; empty without a sweep."""
        return self.record.get("sweep") or {}

    @property
    def sweep_folder(self) -> RunFolder | None:
        """Folder of the run's sweep."""
        return run_folder(self.folder.root, self.folder.experiment, self.sweep["name"]) if self.sweep else None

    @property
    def waits_for(self) -> str | None:
        """Resources for which a WAITING run waits."""
        return self.record.get("waits_for") if self.status == "WAITING" else None

    @property
    def monitor(self) -> str | None:
        """The metric by which the best checkpoint is chosen."""
        return self.record.get("monitor")

    @property
    def metrics(self) -> Mapping[str, float]:
        """Latest value of each metric."""
        return self.record.get("metrics") or {}

    @property
    def best(self) -> float | None:
        """Best value of `monitor`."""
        return (self.record.get("best") or {}).get("value")

    @property
    def epoch(self) -> int | None:
        """Number of finished epochs."""
        if self.record.get("epoch") is not None:
            return int(self.record["epoch"]) + 1
        latest = self.record.get("latest")  # checkpoint, perhaps in the middle of an epoch
        return int(latest["epoch"]) + ("step" not in latest) if latest else None

    @property
    def start(self) -> str | None:
        """Start of the first attempt, in UTC."""
        first: Mapping[str, Any] = (self.record.get("attempts") or [self.record])[0]
        return first.get("start") or self.record.get("start")

    @property
    def age_s(self) -> float | None:
        """Seconds since the start."""
        return _seconds_between(self.start, documents.now())

    @property
    def duration_s(self) -> float | None:
        """Seconds spent in all attempts; the latest one counts until its end, its last heartbeat, or now."""
        last_seen = documents.now() if self.status in records.LIVING else self.record.get("heartbeat")
        latest = _seconds_between(self.record.get("start"), self.record.get("end") or last_seen)
        earlier = [_seconds_between(item.get("start"), item.get("end")) for item in self.record.get("attempts") or []]
        known = [seconds for seconds in [*earlier, latest] if seconds is not None]
        return sum(known) if known else None

    def value(self, metric: str) -> float | None:
        """Return the value to rank by: the best one if the run monitors the metric, otherwise the latest."""
        return self.best if metric == self.monitor and self.best is not None else self.metrics.get(metric)

    def fields(self) -> dict[str, Any]:
        """Return plain values for `--json`."""
        best, labels, problem = self.record.get("best") or {}, {}, self.problem
        try:
            if self.folder.uri is not None or os.path.lexists(self.folder.path / records.LABELS):  # few runs have any
                labels = {} if is_remote(self.folder.location) else records.load_labels(self.folder)
        except StorageError as error:
            problem = problem or str(error)
        return {
            "experiment": self.folder.experiment,
            "run": self.folder.name,
            "status": self.status,
            "waits_for": self.waits_for,
            "reason": self.reason,
            "problem": problem,
            "tags": labels.get("tags", []),
            "note": labels.get("note"),
            "epoch": self.epoch,
            "epochs": self.record.get("epochs"),
            "monitor": self.monitor,
            "mode": self.record.get("mode"),
            "best": self.best,
            "best_epoch": best["epoch"] + 1 if best else None,
            "best_step": best.get("step"),
            "best_checkpoint": best.get("path"),
            "metrics": dict(self.metrics),
            "workers": self.record.get("workers"),
            "start": self.start,
            "end": self.record.get("end"),
            "age_s": self.age_s,
            "duration_s": self.duration_s,
            "error": self.record.get("error"),
            "attempts": self.record.get("attempts") or [],
            "job": self.record.get("job"),
            "sweep": self.record.get("sweep"),
            "config": self.record.get("values"),
            "place": self.folder.location,
        }

    def cells(self, metric: str | None = None) -> dict[str, str]:
        """Return the cells of a table row by column, for a metric: by default the monitored one, or else the first."""
        shown = metric or self.monitor or next(iter(self.metrics), None)
        epochs = self.record.get("epochs")
        epoch = "" if self.epoch is None else f"{self.epoch}/{epochs}" if epochs else str(self.epoch)
        workers, earlier = self.record.get("workers"), self.record.get("attempts")
        status = f"{self.status} ({self.reason})" if self.reason else self.status
        status += f", attempt {len(earlier) + 1}" if earlier and self.status == "RUNNING" else ""
        waiting = format_duration(_seconds_between(self.record.get("start"), documents.now()), units=1)
        values = {
            "experiment": self.folder.experiment,
            "run": self.folder.name,
            "status": f"{self.status} {waiting} for {self.waits_for}" if self.waits_for else status,
            "epoch": epoch,
            "metric": shown or "",
            "best": format_number(self.best) if shown == self.monitor else "",
            "last": format_number(self.metrics.get(shown or "")),
            "workers": "" if workers is None else str(workers),
            "age": format_duration(self.age_s, units=1),
            "duration": format_duration(self.duration_s),
        }
        return {name: value or "-" for name, value in values.items()}


def list_rows(
    name: str | None = None,
    *,
    status: str | None = None,
    sweep: str | None = None,
    sort: str | None = None,
    mode: str | None = None,
    ask: AskJobs | None = None,
    empty_sweeps: bool = False,
    root: str | None = None,
    load: Load = records.load_record,
) -> list[Row]:
    """List the runs of an experiment, of the whole storage, or of a repository like `hf://user/name`, oldest first.

    Optionally, list only runs with a status, or of a sweep, named with or without `sweep_`. `sort` names a metric to
    sort by, best first: by `mode`, or else by the `cfg.mode` of the runs that monitor it, or else smallest first. Runs
    without a value come last. With `empty_sweeps`, sweeps without runs are listed, too. `root` is the storage, if
    not that of the working directory, and `load` returns the records.
    """
    if name is not None and is_remote(name):
        return [_remote_row(name)]
    root = root or lookup.storage_root()
    folders = list_runs(root, name, sweeps=empty_sweeps)
    if name is not None and not folders:
        find_run(root, name)  # raises an error that lists the experiments
    found = summarize([folder for folder in folders if not folder.name.startswith(SWEEP)], ask, load)
    filled = {row.sweep_folder for row in found}
    empty = [folder for folder in folders if folder.name.startswith(SWEEP) and folder not in filled]
    found += summarize(empty, ask, load)
    found = [Row(row.folder, "PENDING", {}) if row.problem and _is_new(row.folder) else row for row in found]
    if sweep is not None:
        known = {row.sweep["name"] for row in found if row.sweep}
        found = [row for row in found if row.sweep and row.sweep["name"] in (sweep, f"sweep_{sweep}")]
        if not found:
            raise UsageError(f"no run in {root} belongs to a sweep {sweep!r}.{suggest(sweep, known)}")
    if sort is not None:
        found = _sort(found, sort, mode)
    return [row for row in found if status in (None, row.status)]


def summarize(folders: Sequence[RunFolder], ask: AskJobs | None = None, load: Load = records.load_record) -> list[Row]:
    """Read the records of runs, and ask the clusters of live ones."""
    rows = map_concurrently(functools.partial(_row, load), folders)
    jobs = {
        row.folder: (job["address"], job["id"])
        for row in rows
        if (job := row.record.get("job")) and (row.record["status"] in records.LIVING or _may_requeue(row.record))
    }
    if ask is None or not jobs:
        return rows
    statuses = ask(set(jobs.values()))
    return [_with_job(row, statuses.get(jobs[row.folder])) if row.folder in jobs else row for row in rows]


def _may_requeue(record: Mapping[str, Any]) -> bool:
    """Return True for a stopped run whose job its cluster may start again by itself."""
    kind = jobs_at(record["job"]["address"])
    return record["status"] == "STOPPED" and kind is not None and kind.requeues


def _with_job(row: Row, job: str | None) -> Row:
    """Return a row with the status that follows from that of its job, like `PENDING (Priority)`."""
    reason = (job or "").partition(" ")[2].strip("()") or None
    return replace(row, status=records.status_of(row.record, job), reason=reason)


def _row(load: Load, folder: RunFolder) -> Row:
    try:
        record = load(folder)
    except StorageError as error:
        return Row(folder, UNREADABLE, {}, str(error))
    return Row(folder, records.status_of(record), record)


def _is_new(folder: RunFolder) -> bool:
    """Return True for the folder of a run that may be about to write its first record."""
    with contextlib.suppress(OSError):
        return not os.path.lexists(folder.record) and time.time() - folder.path.stat().st_mtime < NEW_S
    return False


def _remote_row(uri: str) -> Row:
    """Return the row of a run in a repository."""
    run = reader_of(uri).find(uri)
    try:
        record = run.record()
    except StorageError as error:
        return Row(run.listing_folder, UNREADABLE, {}, str(error))
    living = record["status"] in records.LIVING
    return Row(run.listing_folder, record["status"] if not living or run.held else "STALE", record)


def map_concurrently(function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Call a function for many runs, in threads only if the storage is slow.

    With a fast local disk, threads would only contend: listing 10,000 runs would take a third longer.
    """
    waiting, results = iter(items), []
    started = time.monotonic()
    for item in waiting:
        results.append(function(item))
        if time.monotonic() - started > SLOW_S * len(results):
            break
    with ThreadPoolExecutor(THREADS) as pool:
        return results + list(pool.map(function, waiting))


def mode_of(rows: Iterable[Row], metric: str) -> str | None:
    """Return the most common mode, `max` or `min`, of the runs that monitor a metric; None if no run does."""
    modes = collections.Counter(str(row.record.get("mode") or "min") for row in rows if row.monitor == metric)
    return modes.most_common(1)[0][0] if modes else None


def suggest_metric(rows: Iterable[Row], metric: str) -> str:
    """Suggest a metric of the runs, for the error that they lack this one."""
    names = {name for row in rows for name in row.metrics}
    return suggest(metric, names) if len(names) <= 30 else " See all with: mlx xp ls --json"


def _sort(rows: Sequence[Row], metric: str, mode: str | None) -> list[Row]:
    direction = mode or mode_of(rows, metric) or "min"
    if rows and not any(metric in row.metrics or row.value(metric) is not None for row in rows):
        raise UsageError(f"no run has recorded {metric}.{suggest_metric(rows, metric)}")
    return sorted(rows, key=lambda row: score(row.value(metric), direction), reverse=True)


def _seconds_between(start: str | None, end: str | None) -> float | None:
    if not start or not end:
        return None
    return (datetime.datetime.fromisoformat(end) - datetime.datetime.fromisoformat(start)).total_seconds()
