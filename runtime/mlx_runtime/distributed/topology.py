"""`Topology`: the position of this process among the workers of a run."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.nn.parallel import DistributedDataParallel

from mlx_runtime.errors import MlxError

_current: "Topology | None" = None


@dataclass(frozen=True)
class Topology:
    """The position of this worker in the group: the only source of ranks, world size and device.

    Rows, metrics and the global batch depend on the data-parallel rank and size: workers that share one replica of
    the model read the same rows.
    """

    rank: int  # global rank, from 0
    world_size: int
    device: torch.device  # of the models and batches of this worker
    local_rank: int = 0  # among the workers on this machine
    model_parallel_size: int = 1  # number of ranks that share a replica of the model, or the most; see `DDP`
    replica_ranks: tuple[tuple[int, ...], ...] = ()  # of each replica; by default, consecutive ones
    replicate: Callable[..., torch.nn.Module] = DistributedDataParallel  # called by `prepare_model`

    @contextlib.contextmanager
    def entered(self) -> Iterator["Topology"]:
        """Make this the position of the process within the block."""
        global _current
        before, _current = _current, self
        try:
            yield self
        finally:
            _current = before

    @cached_property
    def replicas(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that share each replica of the model. Rank 0 is one of the first."""
        size = self.model_parallel_size
        starts = range(0, self.world_size - size + 1, size)
        return self.replica_ranks or tuple(tuple(range(first, first + size)) for first in starts)

    @property
    def data_parallel_rank(self) -> int:
        """Rank among the replicas of the model."""
        return next(number for number, ranks in enumerate(self.replicas) if self.rank in ranks)

    @property
    def data_parallel_size(self) -> int:
        """Number of replicas of the model, each reading its own rows."""
        return len(self.replicas)

    @property
    def model_parallel_rank(self) -> int:
        """Rank among the workers that share this replica of the model."""
        return self.replicas[self.data_parallel_rank].index(self.rank)

    @property
    def writes(self) -> bool:
        """True on the one worker that writes the record, metrics and checkpoints."""
        return self.rank == 0


def entered() -> Topology | None:
    """Return the position of this process; None outside of workers."""
    return _current


def current(name: str) -> Topology:
    """Return the position of this process.

    Raises:
        MlxError: the process is not a worker; `name` is the public function that was called.
    """
    if _current is None:
        raise MlxError(f"{name}() works on workers: in worker_loop, eval_loop, or a function that a Trainer calls")
    return _current


def device_here() -> torch.device:
    """Return the GPU that torch uses in this process, or the CPU if it sees none."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def get_device() -> torch.device:
    """Return the device of this worker: its GPU, or the CPU. Outside of a worker, return the one that torch uses.

    Models in the group `models` and batches are there already; use this for other modules and tensors.
    """
    return device_here() if _current is None else _current.device
