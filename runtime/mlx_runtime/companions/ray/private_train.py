"""Ray Train 2.60 in workers that it did not start: its functions, and its private API. `test_private.py` checks it.

Imported only if user code has imported `ray.train`.
"""

import atexit
import functools
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.tune  # early, because Ray Train would import it within a loop, and that draws from `random`
import torch.distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mlx_runtime.distributed.collectives import broadcast
from mlx_runtime.distributed.topology import Topology, current
from mlx_runtime.distributed.wrapping import is_sharded
from mlx_runtime.errors import MlxError

try:
    from ray.train.v2._internal.execution import context
    from ray.train.v2._internal.execution.train_fn_utils import LocalTrainFnUtils, set_train_fn_utils
    from ray.train.v2.torch import train_loop_utils
except ImportError as error:
    raise MlxError(
        f'Ray {ray.__version__} lacks a part of the private API of Ray 2.60: {error}; type: pip install "ray==2.60.*"'
    ) from error


def quiet() -> None:
    """Silence Ray Train's message about each report, and its tracebacks of errors that the driver prints."""
    logging.getLogger("ray.train").setLevel(logging.WARNING)
    reported_by_the_driver = ("ray.train.v2._internal.util", context.__file__)
    for name in reported_by_the_driver:  # the second logger is named after its file
        logging.getLogger(name).setLevel(logging.CRITICAL)


class WorkerFunctions(LocalTrainFnUtils):  # type: ignore[misc]
    """Implementation of `ray.train.*` in the workers of all engines; collectives use the process group.

    `functions` has `report`, `save_checkpoint`, `load_checkpoint` and `get_dataset_shard` for a training function; None
    in the loop of an experiment. The files of its checkpoints are saved as tensors of bytes.
    """

    functions: Any = None

    def report(self, metrics: dict[str, Any], checkpoint: Any = None, *args: Any, **options: Any) -> None:
        if self.functions is None:
            raise MlxError("ray.train.report does not work in worker_loop; call self.log and self.save_checkpoint")
        rank = current("ray.train.report").rank
        if options.get("validation"):
            raise MlxError("ray.train.report does not take validation=")
        self.functions.report(metrics)
        files = None if checkpoint is None else _files(checkpoint, read=rank == 0)
        saved = self.broadcast_from_rank_zero(None if files is None else [*files])
        if lost := sorted((files or {}).keys() - (saved or [])):
            raise MlxError(f"ray.train.report saves the files of rank 0, which has no {lost[0]!r} of rank {rank}")
        if saved is not None:
            self.functions.save_checkpoint(files=files if rank == 0 else {})

    def get_checkpoint(self) -> Any:
        saved = None if self.functions is None else self.functions.load_checkpoint()
        if saved is None or "files" not in saved:
            return None
        root = Path(tempfile.mkdtemp())
        atexit.register(shutil.rmtree, root, ignore_errors=True)
        for name, content in saved["files"].items():
            path = (root / name).resolve()
            if not path.is_relative_to(root.resolve()):
                raise MlxError(f"the checkpoint has a file outside of its folder, {name!r}")
            path.parent.mkdir(parents=True, exist_ok=True)
            content.numpy().tofile(path)
        return ray.train.Checkpoint.from_directory(str(root))

    def get_dataset_shard(self, dataset_info: Any) -> Any:
        if self.functions is None:
            return super().get_dataset_shard(dataset_info)
        return self.functions.get_dataset_shard(dataset_info.dataset_name)

    def barrier(self) -> None:
        if torch.distributed.is_initialized():
            torch.distributed.barrier()

    def broadcast_from_rank_zero(self, data: Any) -> Any:
        return broadcast(data)  # Ray would unpickle it, and anyone who reaches the nodes could send it


def _files(checkpoint: Any, *, read: bool) -> dict[str, Any]:
    """Return the content of the files of a checkpoint, by their paths in its folder; without `read`, no bytes."""
    with checkpoint.as_directory() as folder:
        paths = [path for path in Path(folder).rglob("*") if path.is_file()]
        return {path.relative_to(folder).as_posix(): np.fromfile(path, np.uint8, -1 if read else 0) for path in paths}


def enter(name: str, topology: Topology | None) -> None:
    """See `private.enter_ray_train`."""
    WorkerFunctions.functions = None  # of a training function that this process has run before
    if topology is None:
        set_train_fn_utils(WorkerFunctions(experiment_name=name))
        return
    ranks = {"world_rank": topology.rank, "world_size": topology.world_size, "local_rank": topology.local_rank}
    # As torchrun sets them; without them, all workers are on this machine.
    ranks["local_world_size"] = int(os.environ.get("LOCAL_WORLD_SIZE", topology.world_size))
    ranks["node_rank"] = int(os.environ.get("NODE_RANK", 0))
    set_train_fn_utils(WorkerFunctions(experiment_name=name, **ranks))


def keep_sharded_models() -> None:
    """Make `ray.train.torch.prepare_model` return sharded models, and those cut into stages, unchanged.

    It looks up the replaced name at each call, so user code may already have imported `prepare_model`.
    """
    train_loop_utils.DistributedDataParallel = _replicate


@functools.wraps(DistributedDataParallel, updated=())  # Ray logs the name
def _replicate(model: nn.Module, **options: Any) -> nn.Module:
    kept = is_sharded(model) or current("prepare_model").model_parallel_size > 1
    return model if kept else current("prepare_model").replicate(model, **options)
