"""Objects that drivers, engines and workers exchange: a cluster, a job, and the channel between driver and workers.

Workers send events for the driver to display, because Ray delivers the output of workers late and line by line: a
progress bar would be unreadable, and the last lines could arrive after the end.
"""

import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mlx_runtime.errors import WorkerLostError
from mlx_runtime.events import Event, RunInfo, WorkerPosition

if TYPE_CHECKING:  # they import torch, which the fork server of spawned workers does not need
    from mlx_runtime.companions.prepared.store import PreparedSet
    from mlx_runtime.data.sampling import Subset
    from mlx_runtime.runs.folder import RunFolder

Handle = Callable[[Event], None]
"""Called with an event of the run, in the driver's thread."""

StopAsked = Callable[[], bool]
"""Returns True once the run should save a checkpoint and end; polled by the in-process engine."""

STOP, LOCATE = b"stop", b"locate"
"""Orders from the driver to its workers: save a checkpoint and end; report your position."""


@dataclass(frozen=True)
class Cluster:
    """The machine or cluster that a run trains on, with all traits of the engine that the runtime depends on."""

    title: str  # for the start lines, like `in embedded Ray on 2 cores`
    cpus: float  # in total; 0 when training runs inside this process
    gpus: float  # in total
    engine: str = ""  # name or import path; set by the runtime
    host: str = "127.0.0.1"  # address of the driver as seen by workers
    why: str = ""  # reason for the choice of the engine, for the start lines
    use_gpu: bool = False  # True if each worker trains on GPUs
    gpus_per_worker: float = 1.0  # or the share of one
    in_driver: bool = False  # training runs in the process of the driver
    captures_output: bool = True  # the engine reports the output of workers; otherwise, they write logs themselves
    shares_storage: bool = True  # all workers see the storage; otherwise, rank 0 sends the others what they restore
    reads_streams: bool = False  # workers can read streams of Ray Data
    preempted: Callable[[], bool] | None = None  # collective that returns True if a node is about to be preempted


@dataclass(frozen=True)
class Job:
    """Everything that a worker needs to take part in a run. It is pickled, so all of it is plain data."""

    experiment: str  # import path of the experiment's class
    tree: dict[str, Any]  # resolved conf.yaml of the run
    run: RunInfo  # its `folder` is a path on the driver's machine
    root: str  # storage of the run
    project: Path  # folder of the experiment
    cluster: Cluster
    verbose: bool  # let Ray print
    prepared: "dict[str, PreparedSet]"  # by name of the dataset, which is not read itself
    subsets: "dict[str, Subset]"  # by name of the dataset; others are read whole
    receiver: tuple[tuple[str, int], bytes]  # address and key of the driver's `Receiver`
    evaluate: bool  # run `eval_loop` instead of `worker_loop`

    @property
    def prepares(self) -> bool:
        """True if the workers prepare datasets before they train."""
        return any(item.attempt for item in self.prepared.values())

    @property
    def folder(self) -> "RunFolder":
        """The run folder on this machine."""
        from mlx_runtime.runs.folder import run_folder  # here: the fork server of spawned workers loads little

        return run_folder(self.root, self.run.experiment, self.run.name)


class Sink(Protocol):
    """A worker's end of the channel."""

    def send(self, event: Event) -> None: ...

    def stop_asked(self) -> bool:
        """Return True once the driver wants this worker to stop."""
        ...


class Direct:
    """A sink in the driver's own process."""

    def __init__(self, handle: Callable[[Event], None], stop_asked: Callable[[], bool]) -> None:
        self.send, self.stop_asked = handle, stop_asked
        self.position: Callable[[], WorkerPosition] = lambda: WorkerPosition(0)


class Inbox:
    """The driver's end of the channel. This one is of a driver that trains itself, so that no worker connects."""

    address: tuple[str, int] = ("127.0.0.1", 9)
    key = b""

    def events(self, timeout_s: float) -> Iterable[Event]:
        """Yield the events that have arrived, waiting up to `timeout_s` for the first."""
        return ()

    def drain(self) -> Iterable[Event]:
        """Yield the remaining events, once the workers are done."""
        return ()

    def broadcast(self, order: bytes) -> None:
        """Send an order to every connected worker."""

    def close(self) -> None:
        """End the channel."""


def address_towards(peer: tuple[str, int]) -> str:
    """Return the address of this machine in the network of a peer. Sends nothing."""
    with socket.socket(socket.AF_INET6 if ":" in peer[0] else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(peer)
        return str(probe.getsockname()[0])


def backend_of(*, use_gpu: bool) -> str:
    """Return the backend of collectives: gloo for tensors on the CPU, NCCL for those on GPUs."""
    return "cpu:gloo,cuda:nccl" if use_gpu else "gloo"


def lost(why: str, max_failures: int) -> WorkerLostError:
    """Return the error for a lost worker that is not replaced."""
    used = f"; no replacements are left (cfg.elastic.max_failures={max_failures})" if max_failures > 0 else ""
    return WorkerLostError(f"a worker was lost: {why}{used}")
