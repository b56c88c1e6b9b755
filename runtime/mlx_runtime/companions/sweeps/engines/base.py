"""The protocol between a sweep and the engine that runs its trials."""

from typing import Protocol

from mlx_runtime.companions.sweeps.trial import TrialJob
from mlx_runtime.events import Event


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
    """Runs trials, several at the same time. Signals and output are not its business."""

    def run(self, sweep: Trials) -> None:
        """Run all that the sweep gives, until nothing is left."""
        ...

    def close(self) -> None:
        """Kill what is still running, and release what the engine holds."""
        ...
