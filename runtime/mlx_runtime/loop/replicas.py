"""Models and other objects of all workers: their buffers are copied from rank 0, and differences are reported."""

import gc
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, RandomSampler, Sampler, SequentialSampler

from mlx_runtime.distributed import torch_private
from mlx_runtime.distributed.collectives import broadcast, gather
from mlx_runtime.distributed.wrapping import is_sharded
from mlx_runtime.loop.context import Groups
from mlx_runtime.runs.checkpoints.groups import tensors


def sync_buffers(groups: Groups) -> None:
    """Copy the buffers of rank 0, which are those that a checkpoint contains, to all workers. All must call this."""
    torch_private.sync_buffers(model for model in groups.modules if not is_sharded(model))
    others = {name: torch_private.saved_buffers(item) for name, item in groups.shared_modules.items()}
    first = broadcast(others)  # by name, because workers may have different objects of their own
    for name, buffers in others.items():
        for key, buffer in buffers.items():
            of_first = first.get(name, {}).get(key)
            if of_first is not None and of_first.shape == buffer.shape:
                buffer.copy_(of_first)


def differences(groups: Groups) -> Iterator[str]:
    """Yield a warning, on rank 0, for each trained model without a wrapper, or other object, that differs by worker.

    Tensors are compared by their sums, and numbers that are attributes by their values. Every worker must exhaust this.
    """
    models, others = groups.members("models"), groups.shared
    sums: dict[str, Any] = {
        f"models.{name}": _sum(param for param in model.parameters() if param.requires_grad)
        for name, model in models.items()
        if isinstance(model, nn.Module) and not (isinstance(model, DistributedDataParallel) or is_sharded(model))
    }
    for name, item in others.items():
        held = getattr(item, "__dict__", {})
        numbers = [value for value in held.values() if isinstance(value, int | float)]
        sums[name] = _sum(item.parameters()) if isinstance(item, nn.Module) else (_sum(tensors(held)), numbers)
    found = gather({name: str(value) for name, value in sums.items()})  # as text, in which NaN equals NaN
    for name in sums:
        if len({values[name] for values in found or () if name in values}) > 1:
            cure = f"wrap it before the first epoch: self.{name} = prepare_model(self.{name})"
            if name in others:
                cure = "give all workers the same, or set per_worker = True in its class if each needs its own"
            yield f"self.{name} differs between workers, and only that of rank 0 is saved; {cure}"


def has_unsharded_data() -> bool:
    """Return True if this process has a `DataLoader` over all rows of a dataset, as its sampler shows, and no other."""
    kinds = {kind for kind in map(type, gc.get_objects()) if issubclass(kind, Sampler)} - {BatchSampler}
    return bool(kinds) and kinds <= {RandomSampler, SequentialSampler}


def _sum(items: Iterable[torch.Tensor]) -> float:
    summed = (item.detach() for item in items if not (is_sharded(item) or item.is_complex() or item.is_meta))
    return sum(item.sum(dtype=torch.float64).item() for item in summed)
