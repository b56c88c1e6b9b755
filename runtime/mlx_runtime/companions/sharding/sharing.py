"""Initial values of sharded models, sent by rank 0 or computed equally by all workers."""

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from mlx_runtime.companions.sharding.aliasing import raw
from mlx_runtime.distributed.topology import Topology
from mlx_runtime.distributed.torch_private import broadcast_tensors


def keep_buffers_equal(model: nn.Module) -> None:
    """Copy the buffers of rank 0 to all workers before each forward pass of a sharded model, as DDP does.

    Workers compute running statistics from different rows, and a checkpoint contains those of rank 0. Buffers that are
    not saved are not copied.
    """
    kept = [
        (module, name)
        for module in model.modules()
        for name, _ in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    ]

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # it would warn about the collective
    def copy(*_: Any) -> None:
        found = (getattr(module, name) for module, name in kept)
        broadcast_tensors([item.data for item in found if item is not None])

    if kept:
        model.register_forward_pre_hook(copy)


def share(model: nn.Module, whole: dict[str, torch.Tensor], topology: Topology) -> None:
    """Send a sharded model the whole values of rank 0, one tensor at a time, and empty `whole`."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        source = whole.pop(name)
        if topology.writes:
            full = source.to(topology.device).contiguous()
        else:
            full = torch.empty(tensor.shape, dtype=tensor.dtype, device=topology.device)
        if full.numel():
            torch.distributed.broadcast(raw(full), src=0)
        fill(tensor.detach(), full)


def take_whole_states(model: nn.Module) -> None:
    """Let `load_state_dict` of a sharded model take whole tensors, of which each worker keeps its part."""

    def cut(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, own in module.state_dict(prefix=prefix).items():
            given = state.get(name)
            if not isinstance(own, DTensor) or not isinstance(given, torch.Tensor) or isinstance(given, DTensor):
                continue
            if given.shape == own.shape:  # otherwise, torch reports both shapes
                given = given.detach().to(own.device)
                state[name] = distribute_tensor(given, own.device_mesh, own.placements, src_data_rank=None)

    model.register_load_state_dict_pre_hook(cut)  # type: ignore[no-untyped-call]  # torch has not annotated it


def fill(tensor: torch.Tensor, full: torch.Tensor) -> None:
    """Copy a whole tensor into another one, or into the part that this worker holds."""
    if isinstance(tensor, DTensor):
        part = distribute_tensor(full, tensor.device_mesh, tensor.placements, src_data_rank=None)
        tensor, full = tensor.to_local(), part.to_local()
    tensor.copy_(full)


@dataclass
class _Copy:
    tensor: DTensor
    whole: torch.Tensor
    views: list["weakref.ref[torch.Tensor]"] = field(default_factory=list)

    @property
    def used(self) -> bool:
        return any(view() is not None for view in self.views)


class AsIfWhole(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has not annotated it
    """Runs code that initializes sharded tensors as if they were whole, with the same result on any number of workers.

    Each operation works on a copy of the whole tensor on the CPU, with the same random numbers on all workers. A worker
    stores its part of the copy when the next tensor is initialized and no view of the copy is left. All workers must
    run the same operations. Before the first one, a tensor contains NaN.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._copies: dict[int, _Copy] = {}
        self._begun: dict[int, DTensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wanted = {id(item) for item in tree_leaves((args, kwargs)) if isinstance(item, DTensor)}
        if wanted - self._copies.keys():
            self._keep(except_for=wanted)
        args, kwargs = tree_map(self._whole, (args, kwargs or {}))
        return tree_map(self._find_tensor, func(*args, **kwargs))

    def _whole(self, item: Any) -> Any:
        if not isinstance(item, DTensor):
            return item
        if id(item) not in self._copies:
            if id(item) in self._begun:
                whole = item.full_tensor().cpu()
            else:
                whole = torch.full(item.shape, torch.nan, dtype=item.dtype)
            self._begun[id(item)] = item
            self._copies[id(item)] = _Copy(item, whole)
        return self._copies[id(item)].whole

    def _find_tensor(self, item: Any) -> Any:
        """Return the sharded tensor of a copy, and note views of copies."""
        if isinstance(item, torch.Tensor) and item.device.type == "cpu":
            for copy in self._copies.values():
                if item is copy.whole:
                    return copy.tensor
                if item.untyped_storage().data_ptr() == copy.whole.untyped_storage().data_ptr():
                    copy.views.append(weakref.ref(item))
        return item

    def _keep(self, except_for: set[int]) -> None:
        """Store the parts of copies that are no longer used."""
        for key in [key for key, copy in self._copies.items() if key not in except_for and not copy.used]:
            copy = self._copies.pop(key)
            fill(copy.tensor.detach(), copy.whole.detach())

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        for copy in self._copies.values():
            fill(copy.tensor.detach(), copy.whole.detach())
        self._copies.clear()
