"""Sharding: each worker holds a part of every parameter, its gradient and its optimizer state (FSDP2)."""

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import torch
import torch.distributed
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from mlx_runtime.distributed.ray_private import keep_sharded_models
from mlx_runtime.distributed.topology import Topology
from mlx_runtime.distributed.wrapping import total_norm
from mlx_runtime.errors import ConfigError
from mlx_runtime.runs.checkpoints import members
from mlx_runtime.training.forward import HALF
from mlx_runtime.training.strategies.blocks import repeated_blocks, selected_blocks, without_shared
from mlx_runtime.training.strategies.building import build_models, contents, share
from mlx_runtime.training.strategies.ddp import DDP


class Sharded:
    """`fsdp` shards models over all workers; `hsdp` over `cfg.shard_size` of them, and replicates the shards.

    Models that are to be replicated are prepared as under `DDP`. `chosen` is the name of each model's strategy.
    """

    def __init__(self, cfg: Any, topology: Topology, chosen: Mapping[str, str]) -> None:
        self._cfg, self._topology, self._chosen = cfg, topology, chosen
        self._ddp = DDP(cfg, topology)
        self._lines: list[str] = []
        self._mesh = cache(self._new_mesh)
        self.notice: str | None = None
        if cfg.offload == "cpu" and topology.device.type == "cpu":
            self.notice = "cfg.offload=cpu has no effect on CPUs"
        keep_sharded_models()

    def build(self, node: Mapping[str, Any]) -> Any:
        group = build_models(node, on_meta=not self._topology.writes)
        plans = getattr(type(group), "shard_plan", {})
        models = {name: item for name, item in members(group).items() if isinstance(item, nn.Module)}
        whole = contents(models)
        for name, model in models.items():
            self._prepare(name, model, plans)
        share(models, whole, self._topology, offloads=self._offloads)
        return group

    def _prepare(self, name: str, model: nn.Module, plans: Mapping[str, Any]) -> None:
        strategy = self._chosen.get(name, self._cfg.strategy)
        if strategy == "ddp":
            self._ddp.prepare(model)
        elif not isinstance(model, FSDPModule):
            blocks = repeated_blocks(model)
            if name in plans:
                blocks = selected_blocks(model, plans[name], f"Models.shard_plan[{name!r}]")
            self._shard(name, model, without_shared(model, blocks), strategy)

    def _shard(self, name: str, model: nn.Module, blocks: list[str], strategy: str) -> None:
        mesh = self._mesh(strategy)
        half = HALF.get(self._cfg.precision)
        reduced = torch.float32 if half else None
        offload = CPUOffloadPolicy() if self._offloads else OffloadPolicy()
        inner = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=reduced)
        outer = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=reduced, output_dtype=reduced)
        for path in sorted(blocks, key=lambda path: -path.count(".")):  # blocks within blocks come first
            fully_shard(model.get_submodule(path), mesh=mesh, mp_policy=inner, offload_policy=offload)
        fully_shard(model, mesh=mesh, mp_policy=outer, offload_policy=offload)
        model.register_forward_hook(_reshard_after_evaluation)
        self._lines.append(_line(name, model, blocks, strategy, mesh))

    @property
    def _offloads(self) -> bool:
        return self._cfg.offload == "cpu" and self._topology.device.type != "cpu"

    def _new_mesh(self, strategy: str) -> DeviceMesh:
        device, size = self._topology.device.type, self._topology.world_size
        if strategy == "fsdp":
            return init_device_mesh(device, (size,), mesh_dim_names=("shard",))
        inner = self._cfg.shard_size
        if inner is None or size % inner:
            raise ConfigError(f"cfg.shard_size is {inner}, which does not divide {size} workers")
        return init_device_mesh(device, (size // inner, inner), mesh_dim_names=("replicate", "shard"))

    def sync_gradients(self, models: Iterable[object], enabled: bool) -> None:
        models = list(models)
        self._ddp.sync_gradients(models, enabled)
        for model in models:
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(enabled)
                model.set_is_last_backward(enabled)

    def drop_gradients(self, models: Iterable[object]) -> None:
        for model in models:
            if isinstance(model, FSDPModule):
                model.reset_iter_state()

    def clip_grad_norm_(self, parameters: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
        parameters = list(parameters)
        norm = total_norm([param.grad for param in parameters if param.grad is not None])
        for param in parameters:
            nn.utils.clip_grads_with_norm_(param, max_norm, norm)
        return norm

    def described(self) -> tuple[str, ...]:
        return tuple(self._lines)


def _reshard_after_evaluation(module: nn.Module, args: Any, output: Any) -> None:
    """Shard a model again after a forward pass without gradients, which no backward pass follows."""
    if isinstance(module, FSDPModule) and not torch.is_grad_enabled():
        module.reshard()


def _line(name: str, model: nn.Module, blocks: list[str], strategy: str, mesh: DeviceMesh) -> str:
    """Describe what was sharded, like `net: fsdp over 2 workers, 12 blocks and the rest; 124.0 of 248.0 MB each`."""
    params = list(model.parameters())
    whole = sum(param.numel() * param.element_size() for param in params)
    local = sum(param.to_local().nbytes for param in params if isinstance(param, DTensor))
    parts = f"{len(blocks)} blocks and the rest" if blocks else "in one piece"
    workers = f"{strategy} over {mesh['shard'].size()} workers"
    return f"{name}: {workers}, {parts}; {local / 1e6:.1f} of {whole / 1e6:.1f} MB each"
