"""Collectives on plain values and tensors. Every worker must call them; those of a single worker are local."""

import itertools
import re
import sys
from typing import Any

import torch

from mlx_runtime.distributed.topology import Topology, entered


def is_alone() -> bool:
    """Return True if there is no other worker in the process group, or no group."""
    return not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1


def data_parallel_group(topology: Topology) -> Any:
    """Create a gloo group of the workers at the same position of each replica, or None if this worker is alone.

    Smaller replicas have no worker at the last positions of larger ones. Collectives of the group run on the CPU, so
    that they overlap with computation on GPUs.
    """
    if is_alone():
        return None
    positions = itertools.zip_longest(*map(sorted, topology.replicas))  # rank 0 is in a group with all replicas
    groups = [[rank for rank in ranks if rank is not None] for ranks in positions]
    mine, _ = torch.distributed.new_subgroups_by_enumeration(groups, backend="gloo")  # type: ignore[no-untyped-call]
    return mine


def agree(flags: list[bool], device: torch.device) -> list[bool | None]:
    """Return each flag on which all workers agree, None where they differ. The collective runs on `device`."""
    if is_alone():
        return list(flags)
    votes = torch.tensor([[flag, not flag] for flag in flags], dtype=torch.int32, device=device)
    torch.distributed.all_reduce(votes, torch.distributed.ReduceOp.MIN)
    return [True if yes else False if no else None for yes, no in votes.tolist()]


def mean_of(value: torch.Tensor) -> torch.Tensor:
    """Return the mean of a tensor over the replicas of the model, whose workers all have the replica's value.

    The collective runs on its device, without waiting for it.
    """
    if is_alone():
        return value
    total, count, place = value.clone(), torch.distributed.get_world_size(), entered()
    if place is not None and len({*map(len, place.replicas)}) > 1:
        total, count = total / len(place.replicas[place.data_parallel_rank]), place.data_parallel_size
    torch.distributed.all_reduce(total)
    return total / count


def broadcast(value: Any, group: Any = None) -> Any:
    """Return the value of rank 0; those of other ranks are ignored. See `messages.encode` for its types.

    The group, by default that of all collectives, must contain all workers.
    """
    if is_alone():
        return value
    from mlx_runtime.distributed.messages import decode, encode  # here, because a single worker sends nothing

    message = encode(value) if torch.distributed.get_rank() == 0 else b""
    size = torch.tensor(len(message))
    torch.distributed.broadcast(size, src=0, group=group)
    content = padded(message, int(size))
    torch.distributed.broadcast(content, src=0, group=group)
    return decode(content.numpy().tobytes())


def gather(value: Any, group: Any = None) -> list[Any] | None:
    """Return the values of all workers by rank on rank 0, None elsewhere; see `broadcast`."""
    if is_alone():
        return [value]
    from mlx_runtime.distributed.messages import decode, encode

    world_size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    message = encode(value)
    sizes = [torch.tensor(0) for _ in range(world_size)]
    torch.distributed.all_gather(sizes, torch.tensor(len(message)), group=group)
    content = padded(message, int(max(sizes)))
    contents = [torch.empty_like(content) for _ in range(world_size)] if rank == 0 else None
    torch.distributed.gather(content, contents, dst=0, group=group)
    if contents is None:
        return None
    return [decode(part[:size].numpy().tobytes()) for part, size in zip(contents, sizes, strict=True)]


def padded(message: bytes, size: int) -> torch.Tensor:
    """Return a message as a tensor of this many bytes, with zeros at the end."""
    tensor = torch.zeros(size, dtype=torch.uint8)
    tensor[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8) if message else 0
    return tensor


_RAY_LOST = (
    "RayActorError",  # a reader or assigner of rows, or its owner
    "ObjectLostError",
    "WorkerCrashedError",
    "NodeDiedError",
)

_GLOO = re.compile(r"\[[^\]]*\bgloo/transport/[^\]]+:\d+\] ")
"""Part of the messages of gloo's connection errors: a location in its source."""


def lost_peer(error: BaseException) -> bool:
    """Return True if an error means only that another worker is lost.

    Gloo's errors have messages with a location in its source, also if JAX or user code reraises them. Any other
    RuntimeError, for example about a server that refuses connections, comes from user code.
    """
    ray_errors = sys.modules.get("ray.exceptions")  # if Ray is not imported, it raised no error
    lost = [getattr(ray_errors, name) for name in _RAY_LOST] if ray_errors is not None else []
    if isinstance(error, (torch.distributed.DistError, *lost)):
        return True
    raised = RuntimeError, ValueError, getattr(sys.modules.get("jax.errors"), "JaxRuntimeError", RuntimeError)
    return type(error) in raised and _GLOO.search(str(error)) is not None
