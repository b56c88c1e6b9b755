"""The protocol of strategies."""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch.optim import Optimizer


class Strategy(Protocol):
    """Spreads models over the workers. Every worker must make each of these calls."""

    notice: str | None
    """A line to show to the user."""

    shards: bool
    """True if norms of models and gradients are collectives, which all workers must take part in."""

    def build(self, node: Mapping[str, Any]) -> Any:
        """Build the group `models` from its node in conf.yaml, with models that are spread over the workers."""
        ...

    def sync_gradients(self, models: Iterable[object], enabled: bool) -> None:
        """Enable or disable the synchronization of gradients by the backward passes that follow."""
        ...

    def drop_gradients(self, models: Iterable[object]) -> None:
        """Drop the gradients that were not synchronized yet, of an update that is abandoned."""
        ...

    def clip_grad_norm_(self, parameters: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
        """Clip the norm of gradients over all shards of a model, and return the norm before clipping."""
        ...

    def scaler(self, *, enabled: bool) -> torch.amp.GradScaler:
        """Return the scaler of losses and gradients for `cfg.precision=fp16`."""
        ...

    def prepare_optimizers(self, optimizers: Mapping[str, Optimizer]) -> None:
        """Prepare optimizers for the parameters of these models."""
        ...

    def described(self) -> tuple[str, ...]:
        """Return a line for each model that is sharded: how, and the bytes per worker."""
        ...
