"""The main function of a local worker: process group, Ray Train's functions, training, result for the driver."""

import datetime
import os
import pickle
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed

from mlx_runtime.distributed.ray_private import enter_ray_train
from mlx_runtime.errors import MlxError, WorkerLostError, short_message
from mlx_runtime.training.job import Job
from mlx_runtime.training.worker import train


@dataclass(frozen=True)
class WorkerJob:
    """What the workers of one attempt share.

    Attributes:
        job: The run.
        use_gpu: True if each worker trains on the GPU of its rank.
        timeout_s: Timeout of collectives.
        results: Folder for the results of workers.
    """

    job: Job
    use_gpu: bool
    timeout_s: float
    results: Path


def run(shared: WorkerJob, rank: int) -> int:
    """Train as one of the workers and store the result. Return the exit code."""
    error: BaseException | None = None
    try:
        if shared.use_gpu:
            torch.cuda.set_device(rank)
        enter_ray_train(shared.job.name, rank, int(os.environ["WORLD_SIZE"]))
        # The driver hosts the store; torchrun's environment variables name it.
        torch.distributed.init_process_group(
            "nccl" if shared.use_gpu else "gloo", timeout=datetime.timedelta(seconds=shared.timeout_s)
        )
        train({"job": pickle.dumps(shared.job)})
    except MlxError as caught:
        error = caught
    except BaseException as caught:
        traceback.print_exception(caught)  # into the log of this rank
        error = WorkerLostError(f"rank {rank} failed: {type(caught).__name__}: {short_message(caught)}")
    store_result(shared.results, rank, error)
    if error is None:
        torch.distributed.destroy_process_group()
    return 0 if error is None else 1


def store_result(results: Path, rank: int, error: BaseException | None) -> None:
    """Store the error of a worker, or None for success, atomically."""
    part = results / f"rank_{rank}.part"
    part.write_bytes(pickle.dumps(error))
    part.replace(results / f"rank_{rank}")


def load_result(results: Path, rank: int) -> tuple[bool, BaseException | None]:
    """Return whether a worker has stored a result, and its error."""
    file = results / f"rank_{rank}"
    return (True, pickle.loads(file.read_bytes())) if file.exists() else (False, None)
