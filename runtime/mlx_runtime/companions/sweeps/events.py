"""Events of a sweep, in addition to those of its runs."""

from collections.abc import Mapping
from dataclasses import dataclass

from mlx_runtime.companions.sweeps.definition import Definition
from mlx_runtime.companions.sweeps.scores import Trial
from mlx_runtime.companions.sweeps.space import Part
from mlx_runtime.events import Event
from mlx_runtime.runs.folder import RunFolder


@dataclass(frozen=True)
class SweepStarted(Event):
    """This process drives the sweep."""

    folder: RunFolder
    definition: Definition
    done: tuple[Trial, ...]  # trials that ended before this start of the sweep


@dataclass(frozen=True)
class TrialStarted(Event):
    """A run of a trial is about to start or resume."""

    trial: int  # from 1
    part: Part  # `WHOLE` without seeds and folds
    values: Mapping[str, str]
    run: str  # like `run_007`


@dataclass(frozen=True)
class TrialProgress(Event):
    """A run of a trial has ended an epoch, or recorded something after its checkpoint."""

    trial: int
    part: Part
    epoch: int  # from 0
    epochs: int  # in total
    value: float | None  # of the sweep's metric, if it was recorded


@dataclass(frozen=True)
class TrialEnded(Event):
    """A run of a trial has ended; with several, sent again for the `WHOLE` trial."""

    trial: int
    part: Part
    status: str
    best: tuple[int, float] | None = None  # best epoch, from 0, and its value of the metric
    error: str = ""


@dataclass(frozen=True)
class SweepEnded(Event):
    """The last event of a sweep."""

    status: str  # `SUCCEEDED`, `FAILED` if every trial has failed, or `STOPPED` if some are not done
    best: int | None = None  # trial with the best value of the metric
    unfinished: int = 0  # number of remaining trials
    failed: int = 0  # number of failed trials
