"""A worker started by Ray Train."""

import pickle
from collections.abc import Mapping
from typing import Any

import ray.train
import ray.train.torch
import ray.util

from mlx_runtime.companions.ray.private import quiet_ray_train
from mlx_runtime.distributed import Topology
from mlx_runtime.errors import StorageError
from mlx_runtime.runs import RunFolder
from mlx_runtime.training.engines import Job
from mlx_runtime.training.loop import Remote, train_to


def train(config: Mapping[str, Any]) -> None:
    """Train in a worker process of Ray Train, which calls this on every worker."""
    job: Job = pickle.loads(config["job"])
    context = ray.train.get_context()
    rank, world_size, local_rank = context.get_world_rank(), context.get_world_size(), context.get_local_rank()
    topology = Topology(rank, world_size, ray.train.torch.get_device(), local_rank)
    if not job.verbose:
        quiet_ray_train()
    check_storage(job.folder)
    train_to(Remote(*job.receiver, topology.rank), job, topology)


def check_storage(folder: RunFolder) -> None:
    """Raise a StorageError if this node, which may have joined after the preflight check, lacks the run's storage."""
    if folder.uri is None and not folder.record.is_file():
        node = ray.util.get_node_ip_address()
        line = f"the node {node} does not see {folder.path}, which the driver has created"
        raise StorageError(f"{line}: mount the storage on every node, also on those that the autoscaler starts")
