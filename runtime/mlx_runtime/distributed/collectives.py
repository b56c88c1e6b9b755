"""Collectives on plain Python values. Every worker must call each of them; without a process group they are local."""

from typing import Any

import torch

from mlx_runtime.distributed.topology import Topology


def data_parallel_group(topology: Topology) -> Any:
    """Create a gloo group of the workers at the same position of each replica, or None if there is no process group.

    It runs on the CPU, so that its collectives overlap with the work of the model.
    """
    if not torch.distributed.is_initialized():
        return None
    size = topology.model_parallel_size
    groups = [list(range(first, topology.world_size, size)) for first in range(size)]
    mine, _ = torch.distributed.new_subgroups_by_enumeration(groups, backend="gloo")  # type: ignore[no-untyped-call]
    return mine


def agree(flags: list[bool], device: torch.device) -> list[bool | None]:
    """Return each flag on which all workers agree, None where they differ. The collective runs on `device`."""
    if not torch.distributed.is_initialized():
        return list(flags)
    votes = torch.tensor([[flag, not flag] for flag in flags], dtype=torch.int32, device=device)
    torch.distributed.all_reduce(votes, torch.distributed.ReduceOp.MIN)
    return [True if yes else False if no else None for yes, no in votes.tolist()]


def mean_of(value: torch.Tensor) -> torch.Tensor:
    """Return the mean of a tensor over all workers. The collective runs on its device, which it does not wait for."""
    if not torch.distributed.is_initialized():
        return value
    total = value.clone()
    torch.distributed.all_reduce(total)
    return total / torch.distributed.get_world_size()


def broadcast(value: Any) -> Any:
    """Return the value of rank 0; those of other ranks are ignored."""
    if not torch.distributed.is_initialized():
        return value
    values = [value]
    torch.distributed.broadcast_object_list(values, src=0)
    return values[0]


def gather(value: Any) -> list[Any] | None:
    """Return the values of all workers by rank on rank 0, None elsewhere."""
    if not torch.distributed.is_initialized():
        return [value]
    world_size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    values: list[Any] | None = [None] * world_size if rank == 0 else None
    torch.distributed.gather_object(value, values, dst=0)
    return values
