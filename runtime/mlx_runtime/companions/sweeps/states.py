"""The state of each trial of a sweep: its runs, their outcomes, and the metric by epoch."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_runtime.companions.sweeps.scores import (
    best_checkpoint,
    best_epoch,
    curve_of,
    mean_curve,
    read_epochs,
    with_checkpoint,
)
from mlx_runtime.companions.sweeps.space import Values
from mlx_runtime.runs import drivers, records
from mlx_runtime.runs.checkpoints.index import score
from mlx_runtime.runs.folder import RunFolder, run_folder
from mlx_runtime.storage.files import storage_at

Curve = dict[int, float]
"""Value of the sweep's metric by epoch, from 0."""


@dataclass
class TrialState:
    """A trial: a configuration with one run, or with one per fold.

    Attributes:
        number: Number of the trial, from 1.
        values: Text of each value by key.
        runs: Name of each run, recorded before its folder is created; None for those not started.
        statuses: Status of each run: empty before it is started or resumed, RUNNING, or its outcome.
        curves: Values of the metric of each run at the ends of epochs.
        checkpoint: Epoch and value of the best checkpoint of a trial without folds, perhaps within an epoch.
    """

    number: int
    values: Values
    runs: list[str | None]
    statuses: list[str] = field(default_factory=list)
    curves: list[Curve] = field(default_factory=list)
    checkpoint: tuple[int, float] | None = None

    def __post_init__(self) -> None:
        self.statuses = self.statuses or [""] * len(self.runs)
        self.curves = self.curves or [{} for _ in self.runs]

    @property
    def next_index(self) -> int | None:
        """Index of the next run to start; None if none is left, or if one has failed or was pruned."""
        if {"FAILED", "PRUNED"} & {*self.statuses} or "" not in self.statuses:
            return None
        return self.statuses.index("")

    @property
    def status(self) -> str:
        """SUCCEEDED, PRUNED or FAILED when the trial is done, RUNNING before, STOPPED if it can be resumed."""
        for status in ("RUNNING", "FAILED", "PRUNED", "STOPPED"):
            if status in self.statuses:
                return status
        return "STOPPED" if "" in self.statuses else "SUCCEEDED"

    @property
    def done(self) -> bool:
        return self.status not in ("RUNNING", "STOPPED")

    @property
    def curve(self) -> Curve:
        """Mean over all runs, at the epochs that all of them have finished."""
        return mean_curve(self.curves)

    def best(self, mode: str) -> tuple[int, float] | None:
        """Return the best epoch and its value."""
        return best_of(with_checkpoint(self.curve, self.checkpoint, mode), mode)

    def deviation(self, epoch: int) -> float | None:
        """Return the standard deviation over the folds at an epoch; None without folds."""
        return statistics.stdev(curve[epoch] for curve in self.curves) if len(self.curves) > 1 else None

    def as_json(self) -> dict[str, Any]:
        """Return the fields of the trial for the record of the sweep."""
        return {"trial": self.number, "values": self.values, "runs": [*self.runs]}


def best_of(curve: Curve, mode: str) -> tuple[int, float] | None:
    """Return the best epoch and its value."""
    epoch = best_epoch(curve, mode)
    return None if epoch is None else (epoch, curve[epoch])


def best_trial(trials: Sequence[TrialState], mode: str) -> TrialState | None:
    """Return the trial with the best value, except failed ones."""
    known = [(best[1], trial) for trial in trials if trial.status != "FAILED" and (best := trial.best(mode))]
    return max(known, key=lambda item: score(item[0], mode))[1] if known else None


def read_trial(
    sweep: RunFolder, entry: Mapping[str, Any], metric: str, mode: str, *, folds: bool, retry_failed: bool = False
) -> TrialState:
    """Rebuild the state of a trial from the records and metrics of its runs.

    Raises:
        UsageError: one of its runs is training.
    """
    trial = TrialState(entry["trial"], entry["values"], list(entry["runs"]))
    for index, name in enumerate(trial.runs):
        run = run_folder(sweep.root, sweep.experiment, name) if name is not None else None
        record = read_record(run, sweep.name, trial.number, index if folds else None) if run is not None else None
        if run is None or not record:
            continue
        if records.status_of(record) in records.LIVING:
            drivers.refuse_living(run)
        if not folds:
            trial.checkpoint = best_checkpoint(record, metric, mode)
        trial.curves[index] = {epoch - 1: value for epoch, value in curve_of(read_epochs(run), metric).items()}
        if record["status"] in ("SUCCEEDED", "PRUNED") or (record["status"] == "FAILED" and not retry_failed):
            trial.statuses[index] = record["status"]
    return trial


def read_record(run: RunFolder, sweep: str, trial: int, fold: int | None) -> dict[str, Any] | None:
    """Return the record of a run of a trial; empty if it has none yet, None if the folder belongs to another run."""
    if storage_at(run.location).size_bytes(run.record.name) is None:
        return {}
    record = records.load_record(run)
    facts = record.get("sweep") or {}
    return record if (facts.get("name"), facts.get("trial"), facts.get("fold")) == (sweep, trial, fold) else None
