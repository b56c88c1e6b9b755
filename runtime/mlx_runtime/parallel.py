"""What one worker knows of its group: rank, device, seeds, and models in and out of their DDP wrapper."""

import contextlib
import logging
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray.train
import ray.train.torch
import ray.train.v2._internal.execution.context
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True)
class Worker:
    """This worker's place in the group.

    Attributes:
        rank: world rank; 0 is the one that writes.
        world_size: workers in all.
        device: where its models and batches live.
    """

    rank: int
    world_size: int
    device: torch.device

    @classmethod
    def current(cls) -> "Worker":
        """Read it from Ray Train. Only inside a training function."""
        context = ray.train.get_context()
        return cls(context.get_world_rank(), context.get_world_size(), ray.train.torch.get_device())

    @property
    def writes(self) -> bool:
        return self.rank == 0


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch (all devices)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_state() -> tuple[Any, ...]:
    """The state of Python's, NumPy's and torch's random numbers on the CPU."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def set_random_state(state: tuple[Any, ...]) -> None:
    """Go back to a state from `random_state`."""
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Everything seeded while the block runs, and afterwards as random as before."""
    before = random_state()
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else None
    seed_everything(seed)
    try:
        yield
    finally:
        set_random_state(before)
        if on_gpus is not None:
            torch.cuda.set_rng_state_all(on_gpus)


def quiet_ray_train() -> None:
    """Keep Ray Train's notices of every report out of a worker's output, and its tracebacks, which the driver tells."""
    logging.getLogger("ray.train").setLevel(logging.WARNING)
    told_by_the_driver = ("ray.train.v2._internal.util", ray.train.v2._internal.execution.context.__file__)
    for name in told_by_the_driver:  # the latter logs under the name of its file
        logging.getLogger(name).setLevel(logging.CRITICAL)


def agree(flags: list[bool], device: torch.device) -> list[bool | None]:
    """What all workers say to each of some questions, None where they differ; one small collective."""
    if not torch.distributed.is_initialized():
        return list(flags)
    votes = torch.tensor([[flag, not flag] for flag in flags], dtype=torch.int32, device=device)
    torch.distributed.all_reduce(votes, torch.distributed.ReduceOp.MIN)
    return [True if yes else False if no else None for yes, no in votes.tolist()]


def shared(value: Any) -> Any:
    """The value that rank 0 gives, on every worker; a collective."""
    if not torch.distributed.is_initialized():
        return value
    values = [value]
    torch.distributed.broadcast_object_list(values, src=0)
    return values[0]


def largest(value: float, device: torch.device) -> float:
    """The largest of all workers' values; a collective."""
    if not torch.distributed.is_initialized():
        return value
    tensor = torch.tensor(value, dtype=torch.float32, device=device)
    torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MAX)
    return float(tensor)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside `prepare_model`'s DDP wrapper, so that state names carry no `module.` prefix."""
    return model.module if isinstance(model, DistributedDataParallel) else model
