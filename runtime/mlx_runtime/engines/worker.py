"""A worker of the local engine: the process group, Ray Train's functions, and the result for the driver."""

import datetime
import os
import pickle
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from mlx_runtime.errors import MlxError, WorkerLostError, first_line
from mlx_runtime.ray_private import enter_ray_train
from mlx_runtime.training import Job, train


@dataclass(frozen=True)
class WorkerJob:
    """What the workers of one attempt share.

    Attributes:
        job: of the run.
        use_gpu: each worker trains on the GPU of its rank.
        timeout_s: of collectives.
        results: folder for how each worker ended.
    """

    job: Job
    use_gpu: bool
    timeout_s: float
    results: Path


def run(shared: WorkerJob, rank: int) -> int:
    """Train as one of the workers, and store how that ended. Returns the exit code."""
    error: BaseException | None = None
    try:
        world_size = int(os.environ["WORLD_SIZE"])
        if shared.use_gpu:
            torch.cuda.set_device(rank)
        enter_ray_train(shared.job.name, rank, world_size)
        # The store is the driver's, named by torchrun's environment variables.
        torch.distributed.init_process_group(
            "nccl" if shared.use_gpu else "gloo", timeout=datetime.timedelta(seconds=shared.timeout_s)
        )
        train({"job": pickle.dumps(shared.job)})
    except MlxError as caught:
        error = caught
    except BaseException as caught:
        traceback.print_exception(caught)  # into the log of this rank
        error = WorkerLostError(f"rank {rank} failed: {type(caught).__name__}: {first_line(caught)}")
    store(shared.results, rank, error)
    if error is None:
        torch.distributed.destroy_process_group()
    return 0 if error is None else 1


def store(results: Path, rank: int, error: BaseException | None) -> None:
    """Store how a worker ended, atomically."""
    part = results / f"rank_{rank}.part"
    part.write_bytes(pickle.dumps(error))
    part.replace(results / f"rank_{rank}")


def stored(results: Path, rank: int) -> tuple[bool, Any]:
    """Return whether a worker has stored its result, and its error or None."""
    file = results / f"rank_{rank}"
    return (True, pickle.loads(file.read_bytes())) if file.exists() else (False, None)
