"""What every engine can do: start a group of workers for a job, report how it is doing, and end it."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # torch comes with them, and the fork server of spawned workers needs none
    from mlx_runtime.progress import Event
    from mlx_runtime.training import Job

Handle = Callable[["Event"], None]
"""Takes an event of the run, in the driver's thread."""

StopAsked = Callable[[], bool]
"""True once the run should end with a checkpoint."""


class Group(Protocol):
    """The workers of a run. An engine replaces lost ones by itself, up to `cfg.max_failures` times."""

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
        notice: what the start lines should say about how workers are started, or None.
    """

    @property
    def notice(self) -> str | None: ...

    def start(self, job: "Job", handle: Handle, stop_asked: StopAsked) -> Group:
        """Start a group.

        Args:
            job: what each worker needs to know.
            handle: takes the events that the engine itself reports, such as a lost worker.
            stop_asked: polled by the in-process engine.
        """
        ...

    def close(self) -> None:
        """Release what the engine holds, such as its fork server."""
        ...
