"""`Topology`: the position of this process among the workers of a run."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Topology:
    """The position of this worker in the group. The only object to ask for a rank, a world size or a device.

    Rows, metrics and the global batch go by the data-parallel rank and size: workers that hold one replica of the
    model together read the same rows.
    """

    rank: int  # global rank, from 0
    world_size: int
    device: torch.device  # of the models and batches of this worker
    local_rank: int = 0  # among the workers on this machine
    model_parallel_size: int = 1  # workers with consecutive ranks that hold one replica of the model

    @classmethod
    def current(cls) -> "Topology":
        """Return the topology that Ray Train reports. Call it on a worker, inside the training function."""
        import ray.train.torch  # here, because reading checkpoints must not import Ray

        context = ray.train.get_context()
        rank, world_size, local_rank = context.get_world_rank(), context.get_world_size(), context.get_local_rank()
        return cls(rank, world_size, ray.train.torch.get_device(), local_rank)

    @property
    def data_parallel_rank(self) -> int:
        """Rank among the replicas of the model."""
        return self.rank // self.model_parallel_size

    @property
    def data_parallel_size(self) -> int:
        """Number of replicas of the model, each reading its own rows."""
        return self.world_size // self.model_parallel_size

    @property
    def writes(self) -> bool:
        """True on the one worker that writes the record, the logs of metrics, and checkpoints."""
        return self.rank == 0
