"""Mistakes of a loop that leave models untrained, or trained on each worker separately: warnings about them."""

import gc
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import BatchSampler, RandomSampler, Sampler, SequentialSampler

from mlx_runtime.distributed import gather, is_sharded


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


def diverged_models(models: Mapping[str, Any]) -> Iterator[str]:
    """Warn, on rank 0, of trained models without a wrapper whose weights differ. Every worker must exhaust this.

    Weights are compared by their sums.
    """
    sums = {name: _sum(model) for name, model in models.items() if _is_alone(model)}
    found = gather([str(value) for value in sums.values()]) if sums else None  # as text, in which NaN equals NaN
    for name, *values in zip(sums, *found, strict=True) if found else ():
        if len({*values}) > 1:
            text = f"the weights of self.models.{name} differ between workers, and only those of rank 0 are saved"
            yield f"{text}; wrap it before the first epoch: self.models.{name} = prepare_model(self.models.{name})"


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


def _sum(model: nn.Module) -> float:
    return sum(param.detach().double().sum().item() for param in model.parameters() if param.requires_grad)
