"""The protocol between a sweep and the engine that runs its trials."""

from typing import Protocol

from mlx_runtime.companions.sweeps.trial import TrialJob
from mlx_runtime.events import Event
from mlx_runtime.loop.options import TrainConfig

STOP = "the sweep stops"
"""Reason with which trials are asked to stop with a checkpoint."""


class Trials(Protocol):
    """The runs of a sweep, as an engine sees them."""

    @property
    def stopping(self) -> bool:
        """True if nothing new should start, and running trials should stop with a checkpoint."""
        ...

    @property
    def killing(self) -> bool:
        """True if running trials should end without a checkpoint."""
        ...

    def next(self) -> TrialJob | None:
        """Return the next run to start; None if there is nothing to start now."""
        ...

    def handle(self, job: TrialJob, event: Event) -> bool:
        """Take an event of a run. Return True if all runs of its trial should be pruned."""
        ...

    def ended(self, job: TrialJob, status: str, error: str = "") -> None:
        """Take the outcome of a run: SUCCEEDED, PRUNED, FAILED or STOPPED."""
        ...


class SweepEngine(Protocol):
    """Runs the trials of one sweep. Signals and output are not its business."""

    def run(self, sweep: Trials) -> None:
        """Run all trials of the sweep, until none is left or it wants them killed.

        Raises:
            MlxError: the engine cannot continue; what it was running has ended.
        """
        ...

    def close(self) -> None:
        """Kill runs that are still running, and release the engine's resources."""
        ...


class SweepEngineClass(Protocol):
    """A class of engines of sweeps, which the class that `cfg.engine` names has as `sweep_engine`.

    It is called in the main thread, before anything is written.

    Args:
        cfg: Settings that all trials have in common.
        parallel: Trials at the same time; None for as many as fit.
        gpus_per_trial: GPUs, or the share of one, of each trial; None for what its workers need.

    Raises:
        ConfigError, UsageError: It cannot run the trials like this.
    """

    def __call__(self, cfg: TrainConfig, *, parallel: int | None, gpus_per_trial: float | None) -> SweepEngine: ...
