"""The score of a trial: the metrics of its runs, epoch by epoch, and their mean over folds."""

import contextlib
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_runtime.companions.views.report import OF_TRAINING, read_curves
from mlx_runtime.errors import StorageError
from mlx_runtime.runs.checkpoints.index import score
from mlx_runtime.runs.folder import RunFolder
from mlx_runtime.runs.queries.listing import UNREADABLE, Row

STATUSES = (UNREADABLE, "FAILED", "PRUNED", "STALE", "STOPPED", "RUNNING", "WAITING", "PENDING", "SUCCEEDED")
"""Statuses by precedence: a trial has the first one that any of its runs has."""

Epochs = Mapping[int, Mapping[str, float]]
"""Last value of each metric in each epoch, counted from 1."""


@dataclass(frozen=True)
class RunResult:
    """A run of a sweep."""

    row: Row
    fold: int | None  # from 0; None without folds
    epochs: Epochs


@dataclass(frozen=True)
class Trial:
    """A configuration that a sweep has tried."""

    number: int  # from 1
    overrides: tuple[str, ...]  # its values as overrides, like `optimizers.adam.lr=0.001`
    values: Mapping[str, Any]  # the same by key, as numbers where they are numbers
    status: str  # status of its run; with folds, the worst one
    runs: tuple[RunResult, ...] = field(repr=False)  # those that were started; with folds, one per fold
    curve: Mapping[int, float] = field(repr=False)  # the metric by epoch, from 1; with folds, the mean
    epoch: int | None  # best epoch of the curve; None if it has no finite value
    metrics: Mapping[str, float]  # metrics at that epoch, and of a final test; with folds, means; NaN if there is none
    spread: Mapping[str, float]  # standard deviations of the metrics over the folds

    @property
    def score(self) -> float | None:
        """Value of the sweep's metric at the best epoch."""
        return None if self.epoch is None else self.curve[self.epoch]

    @property
    def duration_s(self) -> float | None:
        """Total duration of its runs in seconds."""
        known = [run.row.duration_s for run in self.runs if run.row.duration_s is not None]
        return sum(known) if known else None

    @property
    def error(self) -> str | None:
        """Error of the first run that failed."""
        problems = (run.row.problem or run.row.record.get("error") for run in self.runs)
        return next((problem for problem in problems if problem), None)


def score_trial(
    number: int, values: Mapping[str, str], runs: Sequence[RunResult], folds: int, metric: str, mode: str
) -> Trial:
    """Return a trial with its score, which requires that each of its `folds` runs has recorded the metric."""
    statuses = {run.row.status for run in runs} | ({"PENDING"} if len(runs) < folds else set())
    curve = mean_curve([curve_of(run.epochs, metric) for run in runs]) if len(runs) == folds else {}
    if folds == 1 and runs:
        curve = with_checkpoint(curve, best_checkpoint(runs[0].row.record, metric, mode, first_epoch=1), mode)
    epoch = best_epoch(curve, mode)
    found: list[dict[str, float]] = [{metric: math.nan}] if curve else []
    if epoch is not None:
        found = [metrics_at(run.epochs, epoch) for run in runs]
    if folds == 1 and epoch is not None:
        found = [{**found[0], metric: curve[epoch]}]
    names = [name for name in found[0] if all(name in one for one in found)] if found else []
    shared = {name: [one[name] for one in found] for name in names}
    return Trial(
        number=number,
        overrides=tuple(f"{key}={text}" for key, text in values.items()),
        values={key: parse_value(text) for key, text in plain_keys(values).items()},
        status=min(statuses, key=_rank),
        runs=tuple(runs),
        curve=curve,
        epoch=epoch,
        metrics={name: statistics.fmean(known) for name, known in shared.items()},
        spread={name: _deviation(known) for name, known in shared.items()} if folds > 1 else {},
    )


def plain_keys(values: Mapping[str, str]) -> dict[str, str]:
    """Return the values of a trial with the keys of conf.yaml, without Hydra's `+`."""
    return {key.lstrip("+"): text for key, text in values.items()}


def read_epochs(run: RunFolder) -> dict[int, dict[str, float]]:
    """Read the metrics of a run; empty if there are none yet."""
    found: dict[int, dict[str, float]] = {}
    with contextlib.suppress(OSError, StorageError):
        curves = read_curves(run.read(run.metrics.name).decode(errors="replace"))
        for name, points in curves.items():
            if not OF_TRAINING.match(name):
                for _, value, epoch in points:
                    found.setdefault(epoch, {})[name] = math.nan if value is None else value
    return dict(sorted(found.items()))


def mean_curve(folds: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """Return the mean of the curves of folds, at the epochs that all of them have."""
    shared = [epoch for epoch in sorted(folds[0]) if all(epoch in curve for curve in folds)]
    return {epoch: statistics.fmean(curve[epoch] for curve in folds) for epoch in shared}


def curve_of(epochs: Epochs, metric: str) -> dict[int, float]:
    """Return a metric by epoch, for epochs in which it was recorded."""
    return {epoch: values[metric] for epoch, values in epochs.items() if metric in values}


def best_epoch(curve: Mapping[int, float], mode: str) -> int | None:
    """Return the epoch with the best value, of equal values the last one; None if no value is finite."""
    found, epoch = max(((score(value, mode), epoch) for epoch, value in curve.items()), default=(-math.inf, None))
    return epoch if found > -math.inf else None


def best_checkpoint(
    record: Mapping[str, Any], metric: str, mode: str, *, first_epoch: int = 0
) -> tuple[int, float] | None:
    """Return the epoch and value of the best checkpoint in the record of a run, if it was chosen by this metric."""
    best = record.get("best") or {}
    if best.get("value") is None or (record.get("monitor"), record.get("mode")) != (metric, mode):
        return None
    return best["epoch"] + first_epoch, best["value"]


def with_checkpoint(curve: Mapping[int, float], saved: tuple[int, float] | None, mode: str) -> dict[int, float]:
    """Return a curve with the value of a checkpoint within an epoch, if it is better than the value of that epoch."""
    if saved is None or score(saved[1], mode) <= score(curve.get(saved[0]), mode):
        return dict(curve)
    return dict(sorted({**curve, saved[0]: saved[1]}.items()))


def metrics_at(epochs: Epochs, epoch: int | None) -> dict[str, float]:
    """Return the metrics of an epoch, and those recorded only once in the run, like those of a final test.

    Others have a value of another epoch only, which does not belong to this one.
    """
    counts = Counter(name for values in epochs.values() for name in values)
    once = {name: value for values in epochs.values() for name, value in values.items() if counts[name] == 1}
    return once | dict(epochs.get(epoch or 0, {}))


def parse_value(text: str) -> Any:
    """Return a value of an override as a number, a boolean or None, or else as text."""
    words = {"true": True, "false": False, "null": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Return the shortest unique suffix of each key: `optimizers.adam.lr` → `lr`."""

    def short(key: str) -> str:
        words = key.split(".")
        endings = (".".join(words[first:]) for first in range(len(words) - 1, 0, -1))
        return next((end for end in endings if sum(f".{other}".endswith(f".{end}") for other in keys) == 1), key)

    return {key: short(key) for key in keys}


def _rank(status: str) -> int:
    return STATUSES.index(status) if status in STATUSES else 0


def _deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan
