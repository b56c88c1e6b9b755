"""Memory that models and optimizers need on a worker."""

import contextlib
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from mlx_runtime.config.building import build, build_optimizers, without_weights
from mlx_runtime.distributed.wrapping import is_sharded, local_part
from mlx_runtime.runs.checkpoints.groups import members


@dataclass(frozen=True)
class MemoryNeeds:
    """Bytes that training needs on one worker, without activations and batches."""

    parameters: int
    gradients: int
    optimizer_states: int


def memory_needs(models: Any, optimizers: Any) -> MemoryNeeds:
    """Return the needs of models and optimizers on this worker, which holds some or all shards of each tensor."""
    modules = members(models, nn.Module).values()
    for part in (part for module in modules for part in module.modules() if is_sharded(part)):
        part.reshard()  # the error may have left it gathered
    params = list(dict.fromkeys(param for module in modules for param in module.parameters()))
    of_optimizers = (sum(states_after_step(item).values()) for item in members(optimizers, Optimizer).values())
    return MemoryNeeds(_bytes(params), _bytes(param for param in params if param.requires_grad), sum(of_optimizers))


def needs_of_config(tree: dict[str, Any]) -> MemoryNeeds:
    """Return the needs of the models and optimizers of a resolved conf.yaml on a worker that holds all of them.

    Calls their constructors on the meta device.
    """
    with without_weights(), torch.device("meta"):
        models = build(tree["models"], "models")
    return memory_needs(models, build_optimizers(tree["optimizers"], models) if "optimizers" in tree else None)


def states_after_step(optimizer: Optimizer) -> dict[nn.Parameter, int]:
    """Return the bytes of each parameter's state after the first step, taken by a copy on the meta device."""
    copies = {param: _without_data(param) for group in optimizer.param_groups for param in group["params"]}
    groups = [group | {"params": [copies[item] for item in group["params"]]} for group in optimizer.param_groups]
    kind: Any = type(optimizer)
    state: Mapping[Any, Any] = {copies[param]: values for param, values in optimizer.state.items() if param in copies}
    with contextlib.suppress(Exception), torch.no_grad():  # `step` may need a closure, or other arguments
        copy = kind(groups)
        inspect.unwrap(kind.step)(copy)  # without the hooks of all optimizers
        state = copy.state
    tensors = {
        item: [value for value in values.values() if isinstance(value, torch.Tensor)] for item, values in state.items()
    }
    return {param: _bytes(tensors.get(item, [])) for param, item in copies.items()}


def _without_data(param: torch.Tensor) -> nn.Parameter:
    local = local_part(param)
    made = nn.Parameter(torch.empty_like(local, device="meta"), requires_grad=param.requires_grad)
    made.grad = torch.empty_like(made) if param.requires_grad else None
    return made


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(local.numel() * local.element_size() for local in map(local_part, tensors))
