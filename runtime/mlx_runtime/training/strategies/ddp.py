"""Data parallelism: every worker holds the whole model."""

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class DDP:
    """The strategy of models that fit on one device.

    The wrapper that averages gradients is applied by user code, with `ray.train.torch.prepare_model`.

    Args:
        device: Device of this worker.
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
