"""The protocol of all strategies."""

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import nn


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
