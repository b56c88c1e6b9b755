"""How a model is spread over the workers of a run. With `DDP`, every worker holds the whole model."""

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Strategy(Protocol):
    """Spreads models over the workers. Every worker must make each of these calls."""

    def prepare(self, model: nn.Module) -> None:
        """Place or shard a model in place. Called before optimizers are built over its parameters."""
        ...

    def sync_gradients(self, models: Iterable[object], enabled: bool) -> None:
        """Enable or disable the synchronization of gradients by the backward passes that follow."""
        ...

    def clip_grad_norm_(self, parameters: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
        """Clip the norm of gradients over all shards of a model, and return the norm before clipping."""
        ...


class DDP:
    """Data parallelism, for models that fit on one device: gradients are averaged.

    The wrapper that averages them is applied by user code, with `ray.train.torch.prepare_model`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def prepare(self, model: nn.Module) -> None:
        model.to(self._device)

    def sync_gradients(self, models: Iterable[object], enabled: bool) -> None:
        for model in models:
            if isinstance(model, DistributedDataParallel):
                model.require_backward_grad_sync = enabled  # as its `no_sync` does for the duration of a block

    def clip_grad_norm_(self, parameters: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
        return nn.utils.clip_grad_norm_(parameters, max_norm)
