"""Building of models: on the CPU, or without values, which are filled in later."""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from mlx_runtime.companions.sharding.blocks import blocks_of, recompute_blocks
from mlx_runtime.config.building import build, without_weights
from mlx_runtime.config.constructors.targets import object_at
from mlx_runtime.distributed.collectives import broadcast
from mlx_runtime.distributed.randomness import random_state, set_random_state
from mlx_runtime.distributed.topology import Topology
from mlx_runtime.distributed.wrapping import is_sharded, local_part
from mlx_runtime.errors import ConfigError, suggest
from mlx_runtime.loop.options import STRATEGIES
from mlx_runtime.runs.checkpoints.groups import members

Contents = dict[str, dict[str, torch.Tensor]]
"""Parameters and buffers, by model and by name."""


def contents(models: Mapping[str, nn.Module]) -> Contents:
    """Return the parameters and buffers of models, each tied one once. They stay whole when the models are sharded."""
    return {
        title: {name: tensor.detach() for name, tensor in (*model.named_parameters(), *model.named_buffers())}
        for title, model in models.items()
    }


def check_same(built: Contents, topology: Topology) -> None:
    """Check that all workers have built the same models.

    Raises:
        ConfigError: this worker has built different models than rank 0.
    """
    own = {
        f"{title}.{name}": (tuple(tensor.shape), str(tensor.dtype))
        for title, tensors in built.items()
        for name, tensor in tensors.items()
    }
    different = {name for name, _ in broadcast(own).items() ^ own.items()}
    if different:
        names = ", ".join(sorted(different))
        raise ConfigError(f"rank {topology.rank} and rank 0 have built different models: {names:.300}")


def check_unshared(models: Mapping[str, nn.Module], parted: Collection[str], cure: str) -> None:
    """Raise ConfigError, with the cure, if one of the models `parted` shares a parameter with another model."""
    owners: dict[int, str] = {}
    for name, model in models.items():
        for param in model.parameters():
            other = owners.setdefault(id(param), name)
            if other != name and (name in parted or other in parted):
                raise ConfigError(f"models.{name} shares parameters with models.{other}, so neither can be {cure}")


def deferred_models(node: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the models in `Models.deferred_init`, which are built without values and initialized by `init_weights()`.

    Raises:
        ConfigError: it names a model that does not exist.
    """
    names = getattr(object_at(node["_target_"]), "deferred_init", ())
    for name in names:
        if name not in node:
            known = [item for item in node if not item.startswith("_")]
            raise ConfigError(f"Models.deferred_init names {name!r}, which is not a model.{suggest(name, known)}")
    return tuple(names)


def build_models(node: Mapping[str, Any], *, elsewhere: bool = False) -> Any:
    """Build the group `models`, with deferred models on the meta device.

    With `elsewhere`, another worker builds the models with values, and this one builds all of them on the meta device.
    A constructor that fails there, or leaves tensors that are neither parameters nor buffers, runs on the CPU.

    Raises:
        ConfigError: a model cannot be built, or `Models.deferred_init` or `Models.strategies` names one that does not
            exist.
    """
    group = _build(node, elsewhere)
    models = members(group, nn.Module)
    for name in getattr(group, "strategies", {}):
        if name not in models:
            raise ConfigError(f"Models.strategies names {name!r}, which is not a model.{suggest(name, models)}")
    return group


def own_strategies(node: Mapping[str, Any] | None, cfg: Any) -> dict[str, str]:
    """Return the strategies of models in `Models.strategies`; raise ConfigError if there is no such strategy."""
    own = dict(getattr(object_at(node["_target_"]), "strategies", {})) if node is not None else {}
    if own and cfg.strategy not in STRATEGIES:
        raise ConfigError(f"Models.strategies is for {', '.join(STRATEGIES)}, and cfg.strategy is {cfg.strategy}")
    for name, strategy in own.items():
        if strategy not in STRATEGIES:
            known = suggest(str(strategy), STRATEGIES)
            raise ConfigError(f"Models.strategies[{name!r}] is {strategy!r}.{known}")
    return own


def build_replicated(node: Mapping[str, Any], recomputed: bool | str) -> Any:
    """Build the group `models` of which every worker holds all, on the CPU, with activation checkpointing."""
    deferred, group = deferred_models(node), build_models(node)
    models = members(group, nn.Module)
    if recomputed:
        recompute_blocks(models, blocks_of(group, models), recomputed)
    for name, model in models.items():
        if name in deferred:
            initialize_whole(name, model)
        check_values(name, model)
    return group


def initialize_whole(name: str, model: nn.Module) -> None:
    """Initialize a deferred model on the CPU, equally for any number of workers."""
    place(model, torch.device("cpu"))
    initialize(name, model, torch.device("cpu"))


def _build(node: Mapping[str, Any], elsewhere: bool) -> Any:
    deferred = deferred_models(node)
    if not elsewhere and not deferred:
        return build(node, "models")
    made = {}
    for name, item in node.items():
        if isinstance(item, dict) and "_target_" in item:
            make = partial(build, item, f"models.{name}")
            with without_weights() if elsewhere else contextlib.nullcontext():
                made[name] = _on_meta(make) if elsewhere or name in deferred else make()
    make = partial(build, {name: item for name, item in node.items() if name not in made}, "models", **made)
    return _on_meta(make) if elsewhere else make()


def _on_meta(make: Callable[[], Any]) -> Any:
    before = random_state()
    with contextlib.suppress(ConfigError):
        with torch.device("meta"):
            made = make()
        if not any(tensor.is_meta for tensor in _plain_tensors(made, set())):
            return made
    set_random_state(before)
    return make()


def _plain_tensors(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """Yield the tensors in the attributes of an object, recursively, except parameters and buffers."""
    if id(value) in seen or not hasattr(value, "__dict__") or isinstance(value, type):
        return
    seen.add(id(value))
    held = {name: item for name, item in vars(value).items() if name not in ("_parameters", "_buffers")}
    for item in tree_leaves(held):
        if isinstance(item, torch.Tensor):
            yield item
        else:
            yield from _plain_tensors(item, seen)


def check_values(name: str, model: nn.Module, *, elsewhere: bool = False) -> None:
    """Check that a model was built with values, on this worker or `elsewhere`.

    Raises:
        ConfigError: the model is a copy of a deferred model.
    """
    if not elsewhere and any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise ConfigError(
            f"models.{name} has no values, because it was copied from a model in Models.deferred_init. Name it there "
            f"too, and copy weights in worker_loop: self.models.{name}.load_state_dict(self.models.net.state_dict())"
        )


def place(model: nn.Module, device: torch.device, *, offloads: bool = False) -> None:
    """Move a model to a device, or allocate its memory there. Shards that are offloaded are on the CPU."""
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        allocate(model, torch.device("cpu") if offloads else device)
        _move_buffers(model, device)
    elif not is_sharded(model):  # FSDP has moved sharded ones
        model.to(device)


def allocate(module: nn.Module, device: torch.device) -> None:
    """Allocate the tensors of a module on a device, without values. Tied ones stay tied."""
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        module.to_empty(device=device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)


def initialize(name: str, model: nn.Module, device: torch.device) -> None:
    """Call `init_weights()` of a model that was built without values. All workers must call this.

    Raises:
        ConfigError: the model has no such method, or the method does not set all values.
    """
    init_weights: Any = getattr(model, "init_weights", None)
    if not callable(init_weights):
        raise ConfigError(f"Models.deferred_init names {name!r}, but its class has no init_weights()")
    _move_buffers(model, torch.device("cpu"))
    for _, tensor in _floats(model):
        local_part(tensor).fill_(torch.nan)
    buffers = {title: (buffer, buffer._version) for title, buffer in model.named_buffers()}  # counts in-place changes
    init_weights()
    left = [title for title, tensor in _floats(model) if local_part(tensor).isnan().any()]
    for title, buffer in model.named_buffers():
        before, version = buffers.get(title, (None, 0))
        if buffer is before and buffer._version == version and not buffer.is_floating_point():
            left.append(title)
    if left:
        raise ConfigError(f"init_weights() of models.{name} does not initialize {', '.join(left):.300}")
    _move_buffers(model, device)


def _floats(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point():
            yield name, tensor.detach()


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
