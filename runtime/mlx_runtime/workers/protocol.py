"""The protocol of all engines: start a group of workers for a job, report its state, end it. Only for annotations."""

from contextlib import AbstractContextManager
from typing import Any, Protocol

from mlx_runtime.loop.job import Cluster, Handle, Job, StopAsked


class Group(Protocol):
    """The workers of a run. The engine replaces lost workers, up to `cfg.elastic.max_failures` times.

    A group that trains in the driver's process has a method `locate(folder)`, too, which answers `mlx xp ps`.
    """

    def poll(self) -> bool:
        """Return True while workers train, or raise an `MlxError` if they failed. The driver calls this repeatedly."""

    def waits_for(self) -> str | None:
        """Return the missing resources while workers cannot start, like `3 CPUs, 2 free`."""

    def close(self) -> None:
        """Kill the remaining workers. Those of Ray end when Ray is shut down."""


class Engine(Protocol):
    """Starts the workers of one run.

    If these inherit their end of the channel, its method `inbox()` returns the driver's end, in place of a `Receiver`.
    """

    def start(self, job: Job, handle: Handle, stop_asked: StopAsked) -> Group:
        """Start a group. The engine passes its own events, such as a lost worker, to `handle`."""

    def close(self) -> None:
        """Release resources of the engine, such as a fork server."""


class EngineClass(Protocol):
    """A class of engines, which `cfg.engine` names; see [the guide](guides/extending.md#an-engine)."""

    def refusal(self, cfg: Any, *, in_job: bool) -> str | None:
        """Return the reason why the engine cannot train with these settings, or None. A static method."""

    def connect(self, cfg: Any, why: str) -> AbstractContextManager[Cluster]:
        """Provide the machine or cluster on which workers start. A static method."""

    def start(self, *args: Any) -> Group:
        """As in `Engine`."""

    def __call__(self, cfg: Any, cluster: Cluster, *, timeout_s: float) -> Engine:
        """Construct the engine for one run. Collectives should time out after `timeout_s`."""
