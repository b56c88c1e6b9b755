"""The protocol of all engines: start a group of workers for a job, report its state, and end it."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from mlx_runtime.errors import WorkerLostError
from mlx_runtime.events import Event

if TYPE_CHECKING:  # it imports torch, which the fork server of spawned workers does not need
    from mlx_runtime.training.job import Job

Handle = Callable[[Event], None]
"""Called with an event of the run, in the driver's thread."""

StopAsked = Callable[[], bool]
"""Returns True once the run should save a checkpoint and end; polled by the in-process engine."""


class Group(Protocol):
    """The workers of a run. The engine replaces lost workers, up to `cfg.max_failures` times."""

    def poll(self) -> bool:
        """Return True while workers train, or raise an `MlxError` if they failed. The driver calls this repeatedly."""
        ...

    def waits_for(self) -> str | None:
        """Return the resources that are missing while workers cannot be placed, like `3 CPUs, 2 free`."""
        ...

    def close(self) -> None:
        """Kill the remaining workers. Those of Ray end when Ray is shut down."""
        ...


class Engine(Protocol):
    """Starts the workers of one run."""

    @property
    def notice(self) -> str | None:
        """A start line about how workers are started, or None."""

    def start(self, job: "Job", handle: Handle, stop_asked: StopAsked) -> Group:
        """Start a group. The engine passes its own events, such as a lost worker, to `handle`."""
        ...

    def close(self) -> None:
        """Release what the engine holds, such as a fork server."""
        ...


def backend_of(*, use_gpu: bool) -> str:
    """Return the backend of collectives: gloo for tensors on the CPU, NCCL for those on GPUs."""
    return "cpu:gloo,cuda:nccl" if use_gpu else "gloo"


def lost(why: str, max_failures: int, advice: str = "") -> WorkerLostError:
    """Return the error for a worker that is not replaced any more. `advice` is a line of its own."""
    used = f"; no replacements are left (cfg.max_failures={max_failures})" if max_failures > 0 else ""
    return WorkerLostError(f"a worker was lost: {why}{used}\n{advice}".rstrip())
