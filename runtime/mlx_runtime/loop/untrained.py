"""Mistakes of a loop that leave models untrained, or trained on each worker separately: warnings about them."""

import gc
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import BatchSampler, RandomSampler, Sampler, SequentialSampler

from mlx_runtime.distributed.collectives import gather
from mlx_runtime.distributed.wrapping import is_sharded
from mlx_runtime.runs.checkpoints.groups import tensors


def idle_optimizers(optimizers: Mapping[str, Optimizer], stepped: set[int]) -> Iterator[str]:
    """Warn of optimizers that have never stepped, while others have, although their parameters have gradients.

    Args:
        optimizers: the optimizers by name.
        stepped: the `id` of each one that has stepped.
    """
    for name, item in optimizers.items() if stepped else ():
        params = [param for group in item.param_groups for param in group["params"]]
        if id(item) not in stepped and any(param.grad is not None for param in params):
            text = f"optimizers.{name} has never stepped, although its parameters have gradients"
            yield f"{text}; call self.optimizer_step({name!r})"


def diverged(models: Mapping[str, Any], others: Mapping[str, Any]) -> Iterator[str]:
    """Warn, on rank 0, of trained models without a wrapper, and of other objects, that differ between workers.

    Tensors are compared by their sums, and numbers that are attributes by their values. Every worker must exhaust this.

    Args:
        models: the members of `Models`, by name.
        others: objects on the experiment and tools that are saved once for all workers, by name, like `tools.ema`.
    """
    trained = {name: filter(_is_trained, model.parameters()) for name, model in models.items() if _is_alone(model)}
    sums: dict[str, Any] = {f"models.{name}": _sum(params) for name, params in trained.items()}
    for name, item in others.items():
        if type(item).__module__.startswith("mlx_runtime."):  # what a training function saves is that of rank 0
            continue
        if isinstance(item, nn.Module):
            sums[name] = _sum(item.parameters())
        else:
            held = getattr(item, "__dict__", {})
            numbers = [value for value in held.values() if isinstance(value, int | float)]
            sums[name] = _sum(tensors(held)), numbers
    found = gather({name: str(value) for name, value in sums.items()})  # as text, in which NaN equals NaN
    for name in sums:
        if len({values[name] for values in found or () if name in values}) > 1:
            text = f"self.{name} differs between workers, and only that of rank 0 is saved"
            cure = f"wrap it before the first epoch: self.{name} = prepare_model(self.{name})"
            if name in others:
                cure = "give all workers the same, or set per_worker = True in its class if each needs its own"
            yield f"{text}; {cure}"


def unsharded_data() -> Iterator[str]:
    """Warn if this process has a `DataLoader` over all rows of a dataset, as its sampler shows, and no other."""
    kinds = {kind for kind in map(type, gc.get_objects()) if issubclass(kind, Sampler)} - {BatchSampler}
    if kinds and kinds <= {RandomSampler, SequentialSampler}:
        yield (
            "every worker trains on all rows of its own DataLoader; give each worker a part of them with "
            "ray.train.torch.prepare_data_loader, or read them with self.generate_loaders"
        )


def _is_alone(model: Any) -> bool:
    return isinstance(model, nn.Module) and not isinstance(model, DistributedDataParallel) and not is_sharded(model)


def _is_trained(param: nn.Parameter) -> bool:
    return param.requires_grad


def _sum(items: Iterable[torch.Tensor]) -> float:
    summed = (item.detach() for item in items if not (is_sharded(item) or item.is_complex() or item.is_meta))
    return sum(item.sum(dtype=torch.float64).item() for item in summed)
