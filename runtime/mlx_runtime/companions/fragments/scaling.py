"""The scaler of gradients in a pipeline. It extends a private method of torch 2.13."""

from typing import Any

import torch
import torch.distributed as dist

from mlx_runtime.companions.fragments.links import Links


class StageScaler(torch.amp.GradScaler):
    """A gradient scaler with which all stages skip a step if the gradients of one overflow."""

    def __init__(self, links: Links, *, enabled: bool) -> None:
        super().__init__(links.device.type, enabled=enabled)
        self._links = links

    def _unscale_grads_(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._unscale_grads_(*args, **kwargs)
        device = self._links.device
        overflow = found.get(device, torch.zeros((), device=device))
        return {device: self._links.sum_over_stages(overflow, op=dist.ReduceOp.MAX)}
