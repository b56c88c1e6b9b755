"""Trials and their scores: the metrics of their runs, epoch by epoch, and means over seeds and folds."""

import contextlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_runtime.companions.sweeps.space import Values
from mlx_runtime.companions.views.report import OF_TRAINING, read_curves
from mlx_runtime.errors import StorageError
from mlx_runtime.runs.checkpoints.index import score
from mlx_runtime.runs.folder import RunFolder, run_folder
from mlx_runtime.runs.queries.listing import UNREADABLE, Row, map_concurrently, summarize
from mlx_runtime.runs.tables import format_number

STATUSES = (UNREADABLE, "FAILED", "PRUNED", "STALE", "STOPPED", "RUNNING", "WAITING", "PENDING", "SUCCEEDED")
"""Statuses by precedence: a trial has the first one that any of its runs has."""

Epochs = dict[int, dict[str, float]]
"""Last value of each metric in each epoch, counted from 1."""


@dataclass
class TrialRun:
    """A run of a trial.

    Attributes:
        name: Name of its folder, recorded before it is created; None before that.
        status: Its status; PENDING if it has not been started or, in a driver, resumed.
        row: Its record, if it was started before the trial was read, or has ended.
        epochs: Its metrics.
    """

    name: str | None = None
    status: str = "PENDING"
    row: Row | None = None
    epochs: Epochs = field(default_factory=dict)

    def curve(self, metric: str) -> dict[int, float]:
        """Return a metric by epoch, for epochs in which it was recorded."""
        return {epoch: values[metric] for epoch, values in sorted(self.epochs.items()) if metric in values}


@dataclass
class Trial:
    """A configuration that a sweep tries.

    Attributes:
        number: Number of the trial, from 1.
        texts: Text of each value by key, as in overrides.
        runs: Its run or, with seeds or folds, one run per seed and fold.
        metric: Metric by which trials are compared.
        mode: `max` or `min`.
        trained: Number of its first runs that count until those of further seeds have ended, too; None for all.
    """

    number: int
    texts: Values
    runs: list[TrialRun] = field(repr=False)
    metric: str = field(repr=False)
    mode: str = field(repr=False)
    trained: int | None = field(default=None, repr=False)

    @property
    def overrides(self) -> tuple[str, ...]:
        """Its values as overrides, like `optimizers.adam.lr=0.001`."""
        return tuple(f"{key}={text}" for key, text in self.texts.items())

    @property
    def values(self) -> dict[str, Any]:
        """Its values by key, as numbers where they are numbers."""
        return {key: parse_value(text) for key, text in plain_keys(self.texts).items()}

    @property
    def status(self) -> str:
        """Status of its run; of several, the worst one."""
        statuses = [run.status for run in self.runs]
        return min(statuses, key=lambda status: STATUSES.index(status) if status in STATUSES else 0)

    @property
    def done(self) -> bool:
        """True if no run of the trial trains or will be started."""
        statuses = {run.status for run in self.runs}
        return "RUNNING" not in statuses and (bool({"FAILED", "PRUNED"} & statuses) or statuses == {"SUCCEEDED"})

    @property
    def next_index(self) -> int | None:
        """Index of the next run to start; None if none is left, or if one has failed or was pruned."""
        statuses = [run.status for run in self.runs]
        if {"FAILED", "PRUNED"} & {*statuses} or "PENDING" not in statuses:
            return None
        return statuses.index("PENDING")

    @property
    def started(self) -> list[tuple[Row, TrialRun]]:
        """The runs that were started, with their records."""
        return [(run.row, run) for run in self.runs if run.row is not None]

    @property
    def counted(self) -> list[TrialRun]:
        """The runs whose mean is the result."""
        return self.runs if {run.status for run in self.runs} == {"SUCCEEDED"} else self.runs[: self.trained]

    @property
    def means(self) -> dict[int, float]:
        """Mean of the metric over all runs that count, at the ends of epochs that all of them have finished."""
        curves = [run.curve(self.metric) for run in self.counted]
        shared = [epoch for epoch in curves[0] if all(epoch in curve for curve in curves)]
        return {epoch: sum(curve[epoch] for curve in curves) / len(curves) for epoch in shared}

    @property
    def curve(self) -> dict[int, float]:
        """The metric by epoch, from 1: the mean of several runs; of one, a better checkpoint within the epoch."""
        curve, row = self.means, self.runs[0].row
        if len(self.counted) > 1 or row is None or (row.monitor, row.record.get("mode")) != (self.metric, self.mode):
            return curve
        if row.best is not None:
            epoch = row.record["best"]["epoch"] + 1
            if score(row.best, self.mode) > score(curve.get(epoch), self.mode):
                curve[epoch] = row.best
        return dict(sorted(curve.items()))

    @property
    def epoch(self) -> int | None:
        """Best epoch of the curve; None if it has no finite value."""
        return best_epoch(self.curve, self.mode)

    @property
    def score(self) -> float | None:
        """Value of the sweep's metric at the best epoch."""
        return None if (epoch := self.epoch) is None else self.curve[epoch]

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics at the best epoch, and of a final test; with folds, means; NaN if no value is finite."""
        return {name: sum(values) / len(values) for name, values in self._metrics_of_runs().items()}

    @property
    def spread(self) -> dict[str, float]:
        """Standard deviations of these metrics over the runs."""
        found, means = self._metrics_of_runs() if len(self.counted) > 1 else {}, self.metrics
        return {
            name: math.dist(values, [means[name]] * len(values)) / math.sqrt(len(values) - 1)
            if all(map(math.isfinite, values))
            else math.nan
            for name, values in found.items()
        }

    @property
    def shown(self) -> dict[str, str]:
        """These metrics as text, with their standard deviations."""
        spread = self.spread
        return {
            name: format_number(value) + (f" ± {format_number(spread[name])}" if name in spread else "")
            for name, value in self.metrics.items()
        }

    @property
    def duration_s(self) -> float | None:
        """Total duration of its runs in seconds."""
        known = [row.duration_s for row, _ in self.started if row.duration_s is not None]
        return sum(known) if known else None

    @property
    def error(self) -> str | None:
        """Error of the first run that failed."""
        problems = (row.problem or row.record.get("error") for row, _ in self.started)
        return next((problem for problem in problems if problem), None)

    def as_json(self) -> dict[str, Any]:
        """Return the fields of the trial for the record of the sweep."""
        trained = {} if self.trained is None else {"trained": self.trained}
        return {"trial": self.number, "values": self.texts, "runs": [run.name for run in self.runs], **trained}

    def _metrics_of_runs(self) -> dict[str, list[float]]:
        """Return the metrics that all runs have recorded at the best epoch."""
        curve = self.curve
        if (epoch := best_epoch(curve, self.mode)) is None:
            return {self.metric: [math.nan]} if curve else {}
        found = [metrics_at(run.epochs, epoch) for run in self.counted]
        if len(found) == 1:
            found[0][self.metric] = curve[epoch]
        return {name: [one[name] for one in found] for name in found[0] if all(name in one for one in found)}


def best_epoch(curve: Mapping[int, float], mode: str) -> int | None:
    """Return the epoch with the best value, of equal values the last one; None if no value is finite."""
    found, epoch = max(((score(value, mode), epoch) for epoch, value in curve.items()), default=(-math.inf, None))
    return epoch if found > -math.inf else None


def ranked(trials: Sequence[Trial], mode: str) -> list[Trial]:
    """Return trials, best first; failed ones and those without a finite value come last."""

    def rank(trial: Trial) -> float:
        return score(trial.score if trial.status != "FAILED" else None, mode)

    return sorted(trials, key=rank, reverse=True)


def read_trials(sweep: RunFolder, entries: Sequence[Mapping[str, Any]], metric: str, mode: str) -> list[Trial]:
    """Read the trials of a sweep from its record, and the records and metrics of their runs.

    Trials are numbered in their order, as they begin.
    """
    trials = [
        Trial(number, entry["values"], [*map(TrialRun, entry["runs"] or [None])], metric, mode, entry.get("trained"))
        for number, entry in enumerate(entries, start=1)
    ]
    runs = [run for trial in trials for run in trial.runs if run.name is not None]
    folders = [run_folder(sweep.root, sweep.experiment, run.name or "") for run in runs]
    for run, row, epochs in zip(runs, summarize(folders), map_concurrently(read_epochs, folders), strict=True):
        run.row, run.status, run.epochs = row, row.status, epochs
    return trials


def read_epochs(run: RunFolder) -> Epochs:
    """Read the metrics of a run; empty if there are none yet."""
    found: Epochs = {}
    with contextlib.suppress(OSError, StorageError):
        curves = read_curves(run.read(run.metrics.name).decode(errors="replace"))
        for name, points in curves.items():
            if not OF_TRAINING.match(name):
                for _, value, epoch, _ in points:
                    found.setdefault(epoch, {})[name] = math.nan if value is None else value
    return found


def metrics_at(epochs: Epochs, epoch: int | None) -> dict[str, float]:
    """Return the metrics of an epoch, and those recorded only once in the run, like those of a final test.

    Others have a value of another epoch only, which does not belong to this one.
    """
    counts = Counter(name for values in epochs.values() for name in values)
    once = {name: value for values in epochs.values() for name, value in values.items() if counts[name] == 1}
    return once | epochs.get(epoch or 0, {})


def plain_keys(values: Mapping[str, str]) -> dict[str, str]:
    """Return the values of a trial with the keys of conf.yaml, without Hydra's `+`."""
    return {key.lstrip("+"): text for key, text in values.items()}


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
