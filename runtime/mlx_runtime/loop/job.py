"""Objects that engines and the runtime exchange: a cluster, a job for its workers, and the error for a lost worker."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_runtime.errors import WorkerLostError
from mlx_runtime.events import Event, RunInfo

if TYPE_CHECKING:  # they import torch, which the fork server of spawned workers does not need
    from mlx_runtime.companions.prepared.store import PreparedSet
    from mlx_runtime.data.sampling import Subset
    from mlx_runtime.runs.folder import RunFolder

Handle = Callable[[Event], None]
"""Called with an event of the run, in the driver's thread."""

StopAsked = Callable[[], bool]
"""Returns True once the run should save a checkpoint and end; polled by the in-process engine."""


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
    shares_cores: bool = True  # workers share the cores of this machine, rather than reserve CPUs
    captures_output: bool = True  # the engine reports the output of workers; otherwise, they write logs themselves
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
    def folder(self) -> "RunFolder":
        """The run folder on this machine."""
        from mlx_runtime.runs.folder import run_folder  # here: the fork server of spawned workers loads little

        return run_folder(self.root, self.run.experiment, self.run.name)


def backend_of(*, use_gpu: bool) -> str:
    """Return the backend of collectives: gloo for tensors on the CPU, NCCL for those on GPUs."""
    return "cpu:gloo,cuda:nccl" if use_gpu else "gloo"


def lost(why: str, max_failures: int) -> WorkerLostError:
    """Return the error for a lost worker that is not replaced."""
    used = f"; no replacements are left (cfg.elastic.max_failures={max_failures})" if max_failures > 0 else ""
    return WorkerLostError(f"a worker was lost: {why}{used}")
