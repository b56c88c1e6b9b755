"""The protocol of all engines: start a group of workers for a job, report its state, and end it."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from mlx_runtime.events import Event

if TYPE_CHECKING:  # it imports torch, which the fork server of spawned workers does not need
    from mlx_runtime.training.job import Job

Handle = Callable[[Event], None]
"""Called with an event of the run, in the driver's thread."""

StopAsked = Callable[[], bool]
"""Returns True once the run should save a checkpoint and end."""


class Group(Protocol):
    """The workers of a run. The engine replaces lost workers, up to `cfg.max_failures` times."""

    def poll(self) -> bool:
        """Return True while workers train. The driver calls this repeatedly.

        Raises:
            MlxError: the group failed.
        """
        ...

    def close(self) -> None:
        """Kill the remaining workers. Those of Ray end when Ray is shut down."""
        ...


class Engine(Protocol):
    """Starts the workers of one run.

    Attributes:
        notice: A start line about how workers are started, or None.
    """

    @property
    def notice(self) -> str | None: ...

    def start(self, job: "Job", handle: Handle, stop_asked: StopAsked) -> Group:
        """Start a group.

        Args:
            job: The run.
            handle: Called with events from the engine itself, such as a lost worker.
            stop_asked: Polled by the in-process engine.
        """
        ...

    def close(self) -> None:
        """Release what the engine holds, such as a fork server."""
        ...
