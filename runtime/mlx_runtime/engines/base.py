"""What every engine can do: start a group of workers for a job, report how it is doing, and end it."""

from collections.abc import Callable
from typing import Protocol

from mlx_runtime.progress import Event
from mlx_runtime.training import Job

Handle = Callable[[Event], None]
"""Takes an event of the run, in the driver's thread."""

StopAsked = Callable[[], bool]
"""True once the run should end with a checkpoint."""


class Group(Protocol):
    """The workers of a run. An engine replaces lost ones by itself, up to `cfg.max_failures` times."""

    def poll(self) -> bool:
        """True while workers train; called again and again by the driver.

        Raises:
            MlxError: the group failed.
        """
        ...

    def close(self) -> None:
        """End what is left of the workers, at once."""
        ...


class Engine(Protocol):
    """Starts the workers of one run.

    Attributes:
        remote: True if workers send their events over a connection to the driver's `Receiver`; otherwise they
            call `handle` themselves.
        notice: what the start lines should say about how workers are started, or None.
    """

    remote: bool

    @property
    def notice(self) -> str | None: ...

    def start(self, job: Job, handle: Handle, stop_asked: StopAsked) -> Group:
        """Start a group.

        Args:
            job: what each worker needs to know.
            handle: takes the events that the engine itself reports, such as a lost worker.
            stop_asked: polled by engines that are not `remote`.
        """
        ...

    def close(self) -> None:
        """Release what the engine holds, such as its fork server."""
        ...
