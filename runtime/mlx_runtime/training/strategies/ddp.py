"""Data parallelism, for models that fit on one device: every worker holds the whole model."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mlx_runtime.config.building import build
from mlx_runtime.distributed.topology import Topology
from mlx_runtime.runs.checkpoints import members


class DDP:
    """Averages the gradients of replicas; user code applies the wrapper, with `ray.train.torch.prepare_model`."""

    def __init__(self, cfg: Any, topology: Topology, notice: str | None = None) -> None:
        self._cfg, self._device, self.notice = cfg, topology.device, notice

    def build(self, node: Mapping[str, Any]) -> Any:
        group = build(node, "models")
        for model in members(group).values():
            if isinstance(model, nn.Module):
                self.prepare(model)
        return group

    def prepare(self, model: nn.Module) -> None:
        """Move a model to the device."""
        model.to(self._device)

    def sync_gradients(self, models: Iterable[object], enabled: bool) -> None:
        for model in models:
            if isinstance(model, DistributedDataParallel):
                model.require_backward_grad_sync = enabled  # as its `no_sync` does for the duration of a block

    def drop_gradients(self, models: Iterable[object]) -> None:
        pass  # they are those of the parameters

    def clip_grad_norm_(self, parameters: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
        return nn.utils.clip_grad_norm_(parameters, max_norm)

    def described(self) -> tuple[str, ...]:
        return ()
