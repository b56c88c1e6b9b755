"""Sharding: each worker holds a part of every parameter, its gradient and its optimizer state (FSDP2).

Torch's FSDP is imported inside functions, because the driver needs only `refusal` and the like of these classes, and
the import takes seconds.
"""

import types
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from mlx_runtime import companions
from mlx_runtime.companions.sharding.aliasing import alias
from mlx_runtime.companions.sharding.blocks import blocks_of, recompute_blocks, without_shared
from mlx_runtime.companions.sharding.building import (
    build_models,
    check_same,
    check_unshared,
    check_values,
    contents,
    deferred_models,
    initialize,
    initialize_whole,
    own_strategies,
    place,
)
from mlx_runtime.companions.sharding.private_torch import ShardedGradScaler, drop_unreduced_gradients
from mlx_runtime.companions.sharding.sharing import (
    AsIfWhole,
    keep_buffers_equal,
    share,
    take_whole_states,
)
from mlx_runtime.distributed.collectives import broadcast
from mlx_runtime.distributed.randomness import load_random_state_dict, random_state_dict
from mlx_runtime.distributed.topology import Topology
from mlx_runtime.distributed.wrapping import by_mesh, is_sharded, local_part, total_norm
from mlx_runtime.errors import ConfigError
from mlx_runtime.importing import after_import
from mlx_runtime.loop.forward import HALF, compile_forward
from mlx_runtime.loop.options import strategy_class
from mlx_runtime.loop.strategies import DDP
from mlx_runtime.runs.checkpoints.groups import members
from mlx_runtime.storage.files import size_text

_CURE = 'Models.strategies = {"name": "ddp"} replicates a model on all workers'

_CPU = torch.device("cpu")


class FSDP(DDP):
    """Shards models over all workers. It also builds models to which `Models.strategies` gives another strategy."""

    shards = True
    preloads = ("mlx_runtime.companions.sharding.sharing", "torch.distributed.fsdp")

    @staticmethod
    def refusal(cfg: Any) -> str | None:
        return None

    @staticmethod
    def multiple_of(cfg: Any) -> int:
        return cfg.sharding.shard_size or 1

    def __init__(self, cfg: Any, topology: Topology) -> None:
        super().__init__(cfg, topology)
        self._offloads = cfg.sharding.offload == "cpu" and topology.device.type != "cpu"
        if cfg.sharding.offload == "cpu" and not self._offloads:
            self.notice = "cfg.sharding.offload=cpu has no effect: models are on the CPU already"
        after_import("ray.train", lambda: companions.part("ray.private").keep_sharded_models())

    def build(self, node: Mapping[str, Any]) -> Any:
        topology, deferred = self.topology, deferred_models(node)
        group = build_models(node, elsewhere=not topology.writes)
        drawn = broadcast(random_state_dict(_CPU))  # from rank 0, which has drawn the values of models
        load_random_state_dict(drawn, _CPU)
        models = members(group, nn.Module)
        whole = contents(models)
        check_same(whole, topology)
        blocks = blocks_of(group, models)
        recompute_blocks(models, blocks, self.cfg.activation_checkpointing)
        blocks = {name: without_shared(model, blocks[name]) for name, model in models.items()}
        own = own_strategies(node, self.cfg)
        strategies: dict[str, Any] = {name: strategy_class(own.get(name, self.cfg.strategy)) for name in models}
        done = {id(models[name].get_submodule(path)) for name, paths in blocks.items() for path in paths}
        apart: dict[str, nn.Module] = {}  # each model once, without those that are blocks of others
        for name, model in models.items():
            if id(model) not in done:
                apart[name] = model
            done.add(id(model))
        check_unshared(apart, {name for name in apart if strategies[name].shards}, f"sharded; {_CURE}")
        for name, model in models.items():
            if strategies[name].shards and not is_sharded(model):
                self._shard(name, model, blocks[name])
        for name, model in models.items():
            if name in deferred:
                self._initialize(name, model)
                continue
            check_values(name, model, elsewhere=not topology.writes)
            place(model, topology.device, offloads=self._offloads and is_sharded(model))
            if topology.world_size > 1:
                share(model, whole.pop(name), topology)
        return group

    def _initialize(self, name: str, model: nn.Module) -> None:
        if not is_sharded(model):
            initialize_whole(name, model)
            place(model, self.topology.device)
            return
        place(model, self.topology.device, offloads=self._offloads)
        with AsIfWhole():
            initialize(name, model, self.topology.device)

    def _shard(self, name: str, model: nn.Module, blocks: list[str]) -> None:
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        mesh = self._mesh
        half = HALF.get(self.cfg.precision)
        offload = CPUOffloadPolicy() if self._offloads else OffloadPolicy()
        inside, outside = (
            MixedPrecisionPolicy(half, torch.float32 if half else None, output) for output in (None, torch.float32)
        )
        parts = [model.get_submodule(path) for path in sorted(blocks, key=lambda path: -path.count("."))]
        for module in parts or [model] if self.cfg.compile else []:
            compile_forward(module, self.cfg.compile)
        empty = [path for path, param in model.named_parameters() if not param.numel()]
        try:
            if empty:
                raise ValueError(f"{empty[0]} has no elements")  # the first backward pass would fail
            for module in (model, *parts):
                module.register_forward_hook(_without_views)
            for module in model.modules() if half else ():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):  # its running statistics are float32
                    full = MixedPrecisionPolicy(torch.float32, output_dtype=half)
                    fully_shard(module, mesh=mesh, mp_policy=full, offload_policy=offload)
            for module in parts:  # inner blocks come first
                if not is_sharded(module):
                    fully_shard(module, mesh=mesh, mp_policy=inside, offload_policy=offload)
            fully_shard(model, mesh=mesh, mp_policy=outside if half else inside, offload_policy=offload)
        except (NotImplementedError, ValueError) as error:  # raised for scalar and strided parameters
            raise ConfigError(f"models.{name} cannot be sharded: {error}\n{_CURE}") from error
        keep_buffers_equal(model)
        take_whole_states(model)
        if self._offloads:  # the shards stay in the memory of the host, also if user code moves the model
            model.to = types.MethodType(lambda self, *args, **options: self, model)  # type: ignore[method-assign]
        model.register_forward_hook(_reshard_after_evaluation)
        if next(model.parameters(), None) is not None:
            self.described.append(_line(name, model, blocks, mesh))

    @cached_property
    def _mesh(self) -> DeviceMesh:
        """All workers, or replicas that groups of `cfg.sharding.shard_size` workers share."""
        workers, size = self.topology.world_size, self.cfg.sharding.shard_size
        shape = (workers,) if size is None else (workers // size, size)
        return init_device_mesh(self.topology.device.type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])

    def sync_gradients(self, models: Iterable[object], enabled: bool) -> None:
        models = list(models)
        super().sync_gradients(models, enabled)
        for model in models:
            if is_sharded(model):
                sharded: Any = model
                sharded.set_requires_gradient_sync(enabled)
                sharded.set_is_last_backward(enabled)

    def drop_gradients(self, models: Iterable[object]) -> None:
        for model in models:
            if is_sharded(model):
                drop_unreduced_gradients(model)

    def clip_grad_norm_(self, parameters: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
        parameters = [param for param in parameters if param.grad is not None]
        norm = total_norm([param.grad for param in parameters if param.grad is not None])
        for group in by_mesh(parameters):
            nn.utils.clip_grads_with_norm_(group, max_norm, norm)
        return norm

    def scaler(self, *, enabled: bool) -> torch.amp.GradScaler:
        return ShardedGradScaler(self.topology.device.type, enabled=enabled)

    def prepare_optimizers(self, optimizers: Mapping[str, Optimizer]) -> None:
        for optimizer in optimizers.values():
            for group in optimizer.param_groups:
                if len(by_mesh(group["params"])) > 1:
                    group["foreach"] = group["fused"] = False  # these take either shards or whole tensors


def _reshard_after_evaluation(module: nn.Module, args: Any, output: Any) -> None:
    """Shard a model again after a forward pass without gradients, because no backward pass will do so."""
    if is_sharded(module) and not torch.is_grad_enabled():
        module.reshard()  # type: ignore[operator]


def _without_views(module: nn.Module, args: Any, output: Any) -> Any:
    """Return outputs that are not views, because an in-place operation on a view would detach it from FSDP's hooks.

    torch warns about each view, even without such an operation.
    """
    if not torch.is_grad_enabled():
        return output
    return tree_map_only(torch.Tensor, lambda item: alias(item) if item._is_view() else item, output)


def _line(name: str, model: nn.Module, blocks: list[str], mesh: DeviceMesh) -> str:
    """Return a line like `net: fsdp over 2 x 2, 12 blocks; 124.0 MB of 248.0 MB each`."""
    params = list(model.parameters())
    whole = sum(param.numel() * param.element_size() for param in params)
    local = sum(local_part(param).nbytes for param in params)
    sizes = f"{size_text(local)} of {size_text(whole)} each"
    return f"{name}: fsdp over {' x '.join(map(str, mesh.shape))}, {len(blocks)} blocks; {sizes}"
