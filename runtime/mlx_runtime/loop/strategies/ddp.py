"""Data parallelism, for models that fit on one device: every worker holds the whole model."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from mlx_runtime.config.building import build
from mlx_runtime.config.constructors.targets import object_at
from mlx_runtime.distributed.topology import Topology
from mlx_runtime.runs.checkpoints.groups import members
from mlx_runtime.sections import Fragments


class DDP:
    """Averages the gradients of replicas. User code applies the wrapper, with `prepare_model`."""

    shards = False
    preloads: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()  # settings without which models cannot have this strategy

    @staticmethod
    def refusal(cfg: Any) -> str | None:
        if cfg.sharding.offload != "none":
            return f"cfg.sharding.offload={cfg.sharding.offload} is for sharded models; use cfg.strategy=fsdp or hsdp"
        size = cfg.sharding.shard_size
        return None if size is None else f"cfg.sharding.shard_size={size} is for cfg.strategy=hsdp"

    @staticmethod
    def multiple_of(cfg: Any) -> int:
        return 1

    @staticmethod
    def model_parallel_size(cfg: Any, workers: int) -> int:
        return 1

    def __init__(self, cfg: Any, topology: Topology, notice: str | None = None) -> None:
        unused = "cfg.fragments has no effect without cfg.strategy=pipeline" if cfg.fragments != Fragments() else None
        self.cfg, self.topology, self.notice = cfg, topology, notice or unused

    def build(self, node: Mapping[str, Any]) -> Any:
        deferred: Collection[str] = ()
        if any(hasattr(object_at(node["_target_"]), name) for name in ("deferred_init", "strategies")):
            from mlx_runtime.loop.strategies.building import build_models, deferred_models

            group, deferred = build_models(node), deferred_models(node)
        else:
            group = build(node, "models")
        models = members(group, nn.Module)
        if self.cfg.activation_checkpointing:
            from mlx_runtime.loop.strategies.blocks import blocks_of
            from mlx_runtime.loop.strategies.recomputation import recompute_blocks

            recompute_blocks(models, blocks_of(group, models), self.cfg.activation_checkpointing)
        self.place(models, deferred)
        return group

    def place(self, models: Mapping[str, nn.Module], deferred: Collection[str]) -> None:
        """Move models to the device. Deferred ones are initialized on the CPU, equally for any number of workers."""
        for name, model in models.items():
            if name not in deferred and not any(item.is_meta for item in (*model.parameters(), *model.buffers())):
                model.to(self.topology.device)
                continue
            from mlx_runtime.loop.strategies.building import check_values, initialize, place

            if name in deferred:
                place(model, torch.device("cpu"))
                initialize(name, model, torch.device("cpu"))
            check_values(name, model)
            place(model, self.topology.device)

    def sync_gradients(self, models: Iterable[object], enabled: bool) -> None:
        for model in models:
            if isinstance(model, DistributedDataParallel):
                model.require_backward_grad_sync = enabled  # like `no_sync`, which is a context manager

    def drop_gradients(self, models: Iterable[object]) -> None:
        pass  # DDP keeps none besides those of the parameters

    def clip_grad_norm_(self, parameters: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
        return nn.utils.clip_grad_norm_(parameters, max_norm)

    def scaler(self, *, enabled: bool) -> torch.amp.GradScaler:
        return torch.amp.GradScaler(self.topology.device.type, enabled=enabled)

    def prepare_optimizers(self, optimizers: Mapping[str, Optimizer]) -> None:
        pass

    def consolidate(self, states: dict[str, Any]) -> dict[str, Any]:
        return states

    def described(self) -> tuple[str, ...]:
        return ()
