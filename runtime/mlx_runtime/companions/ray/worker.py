"""A worker started by Ray Train."""

import pickle
from collections.abc import Mapping
from typing import Any

import ray.train
import ray.train.torch

from mlx_runtime.companions.ray.private import quiet_ray_train
from mlx_runtime.distributed import Topology
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
    train_to(Remote(*job.receiver, topology.rank), job, topology)
