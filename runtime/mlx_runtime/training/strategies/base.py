"""What a run asks of its strategy."""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch


class Strategy(Protocol):
    """Spreads models over the workers. Every worker must make each of these calls."""

    notice: str | None
    """A line to show to the user."""

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

    def described(self) -> tuple[str, ...]:
        """Return a line for each model that is sharded: how, and the bytes per worker."""
        ...
