"""The main functions of workers: process group, Ray Train's functions, training, result for the driver."""

import datetime
import pickle
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch.distributed import FileStore, Store  # type: ignore[attr-defined]

from mlx_runtime.distributed.handshake import keep_groups_private
from mlx_runtime.distributed.topology import Topology, device_here
from mlx_runtime.errors import MlxError, WorkerLoopError, WorkerLostError, short_message, user_traceback
from mlx_runtime.loop.job import Job
from mlx_runtime.workers.connections import Remote
from mlx_runtime.workers.worker import enter_ray_train, train_to


@dataclass(frozen=True)
class WorkerJob:
    """The parameters that the workers of one attempt share."""

    job: Job
    world_size: int
    backend: str  # of collectives; with NCCL, each worker trains on the GPU of its rank, or sees its own
    timeout_s: float  # of collectives
    results: Path  # folder for the results of local workers; only this user can open it
    store: "Path | Callable[[], Store]"  # for the rendezvous: a file in the same folder, or what connects to a store
    host: str | None = None  # address of this machine for its peers; None if all workers are on this machine
    first_rank: int = 0  # lowest rank on this machine


def run_worker(shared: WorkerJob, rank: int, pipe: Any = None) -> int:
    """Train as one of the workers and store the result. Return the exit code.

    Pass it to `os._exit`: gloo's threads hold tensors and can abort an interpreter that is finalizing.
    """
    keep_groups_private(shared.host)
    error = train_in_group(shared, rank, pipe)
    part = shared.results / f"{rank}.part"
    part.write_bytes(pickle.dumps(error))
    part.replace(shared.results / str(rank))
    if error is None and torch.distributed.is_initialized():  # user code may have destroyed the group
        torch.distributed.destroy_process_group()
    return 0 if error is None else 1


def train_in_group(shared: WorkerJob, rank: int, pipe: Any = None) -> BaseException | None:
    """Join the process group and train. Return the error that ended the loop, if any."""
    error: BaseException | None = None
    try:
        local_rank = rank - shared.first_rank
        if "nccl" in shared.backend and (count := torch.cuda.device_count()):
            own = local_rank if shared.job.cluster.gpus_per_worker <= 1 else 0
            torch.cuda.set_device(own % count)  # several workers may share a GPU
        topology = Topology(rank, shared.world_size, device_here(), local_rank)
        enter_ray_train(shared.job, topology)
        # In a variable, because torch does not keep a store alive that is written in Python.
        store = FileStore(str(shared.store)) if isinstance(shared.store, Path) else shared.store()
        torch.distributed.init_process_group(
            shared.backend,
            store=store,
            rank=rank,
            world_size=topology.world_size,
            timeout=datetime.timedelta(seconds=shared.timeout_s),
            device_id=topology.device if "nccl" in shared.backend else None,
        )
        train_to(Remote(*shared.job.receiver, rank, pipe), shared.job, topology)
    except MlxError as caught:
        error = caught
    except KeyboardInterrupt as caught:  # raised by user code: signals do not raise it in workers
        trace = user_traceback(caught, shared.job.project)
        error = WorkerLoopError(f"KeyboardInterrupt (raised on rank {rank})\n{trace}".rstrip())
    except BaseException as caught:
        traceback.print_exception(caught)  # into the log of this rank
        error = WorkerLostError(f"rank {rank} failed: {type(caught).__name__}: {short_message(caught)}")
    return error


def load_results(folder: Path) -> dict[int, BaseException | None]:
    """Return the error of each worker that has ended, by rank; None for success."""
    return {int(file.name): pickle.loads(file.read_bytes()) for file in folder.iterdir() if file.name.isdecimal()}
