"""Models whose values come from rank 0: it builds them on its CPU, and the other workers receive their parts."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_leaves

from mlx_runtime.config.building import build
from mlx_runtime.distributed.collectives import broadcast
from mlx_runtime.distributed.randomness import random_state, set_random_state
from mlx_runtime.distributed.topology import Topology
from mlx_runtime.distributed.wrapping import is_sharded
from mlx_runtime.errors import ConfigError, MlxError

Contents = dict[str, dict[str, torch.Tensor]]
"""Parameters and buffers, by model and by name."""


def build_models(node: Mapping[str, Any], *, on_meta: bool) -> Any:
    """Build the group `models`; `on_meta` builds models without values. All workers then draw the same random numbers.

    A constructor that does not work without values, or computes with tensors that are neither parameters nor buffers,
    builds the whole group on the CPU instead.
    """
    group = _on_meta(lambda: build(node, "models")) if on_meta else build(node, "models")
    set_random_state(broadcast(random_state()))
    return group


def _on_meta(make: Callable[[], Any]) -> Any:
    before = random_state()
    with contextlib.suppress(ConfigError):
        with torch.device("meta"):
            made = make()
        if not any(tensor.is_meta for tensor in _plain_tensors(made)):
            return made
    set_random_state(before)
    return make()


def _plain_tensors(value: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    """Yield the tensors in the attributes of an object that are not parameters or buffers of modules."""
    held = {name: item for name, item in vars(value).items() if name not in ("_parameters", "_buffers")}
    for item in tree_leaves(held):
        if isinstance(item, torch.Tensor):
            yield item
        elif hasattr(item, "__dict__") and not isinstance(item, type) and (depth or isinstance(item, nn.Module)):
            yield from _plain_tensors(item, depth if isinstance(item, nn.Module) else depth - 1)


def contents(models: Mapping[str, nn.Module]) -> Contents:
    """Return the parameters and buffers of models, tied ones once. They keep what they hold when models are sharded."""
    return {
        title: {name: tensor.detach() for name, tensor in (*model.named_parameters(), *model.named_buffers())}
        for title, model in models.items()
    }


def share(models: Mapping[str, nn.Module], whole: Contents, topology: Topology, *, offloads: bool) -> None:
    """Give models the values that rank 0 had before they were sharded, one tensor at a time, and empty `whole`.

    Raises:
        MlxError: this worker has built other models than rank 0.
    """
    if topology.world_size == 1:
        return
    shapes = {
        f"{title}.{name}": (tensor.shape, tensor.dtype)
        for title, tensors in whole.items()
        for name, tensor in tensors.items()
    }
    different = dict(broadcast(shapes).items() ^ shapes.items())
    if different:
        raise MlxError(f"rank {topology.rank} has built other models than rank 0: {', '.join(sorted(different)):.300}")
    for title, model in models.items():
        if not topology.writes:
            materialize(model, topology.device, offloads=offloads)
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            _receive(tensor.detach(), whole[title].pop(name), topology)


def materialize(model: nn.Module, device: torch.device, *, offloads: bool) -> None:
    """Allocate the memory of a model without values; shards that are offloaded are on the CPU."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)  # tied weights stay tied
    try:
        model.to_empty(device=torch.device("cpu") if offloads and is_sharded(model) else device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    if offloads:
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device))


def _receive(tensor: torch.Tensor, source: torch.Tensor, topology: Topology) -> None:
    """Fill a tensor, or its part on this worker, from that of rank 0."""
    if topology.writes:
        full = source.to(topology.device).contiguous()
    else:
        full = torch.empty(tensor.shape, dtype=tensor.dtype, device=topology.device)
    if full.numel():
        torch.distributed.broadcast(full.view(-1).view(torch.uint8), src=0)
    if isinstance(tensor, DTensor):
        part = distribute_tensor(full, tensor.device_mesh, tensor.placements, src_data_rank=None)
        tensor, full = tensor.to_local(), part.to_local()
    tensor.copy_(full)
