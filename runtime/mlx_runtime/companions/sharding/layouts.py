"""The layouts of the tensors of a loaded state: each one gets the layout of its target.

So a checkpoint can be restored with any number of workers and any strategy: a worker that holds a part of a tensor
reads or cuts out this part, and one that holds the whole tensor reads all of it.
"""

import copy
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from mlx_runtime.companions.sharding.shards import Reads, StoredTensor
from mlx_runtime.distributed.collectives import broadcast, gather
from mlx_runtime.distributed.wrapping import is_sharded, unwrap
from mlx_runtime.errors import MlxError, StorageError
from mlx_runtime.runs.checkpoints.groups import DamagedError, State, plain_entries


class Layouts:
    """Copies states so that their tensors have the layout of their targets.

    Args:
        models: The models of the run by name. Their mesh shards tensors that have no target and were sharded before.
        whole: The checkpoint has no shards. Then tensors with the name and shape of a sharded weight, like those of a
            tool that keeps the best weights, get its layout.

    Attributes:
        reads: Reads of the tensors; call `reads.run()` before using the states.
    """

    def __init__(self, models: Mapping[str, Any], *, whole: bool) -> None:
        weights = [unwrap(model).state_dict() for model in models.values() if isinstance(model, nn.Module)]
        sharded = {name: item for names in weights for name, item in names.items() if is_sharded(item)}
        self._mesh = next((item.device_mesh for item in sharded.values()), None)
        self._by_name = sharded if whole else {}
        self.reads = Reads()

    def of_state(self, state: State, wanted: Mapping[str, Collection[str] | None], groups: Any) -> State:
        """Return a copy of the state of a run in which each worker has read its parts of the members `wanted`.

        Every worker must call this.

        Raises:
            DamagedError: a worker has read a damaged file. All workers raise it.
            StorageError: the storage does not answer a worker. All workers raise it.
        """
        copied = state | {"ranks": self.of_values(state["ranks"])}
        for name, names in wanted.items():
            present = groups.members(name)
            copied[name] = {
                item: self.of_member(present[item], saved)
                if item in present and (names is None or item in names)
                else saved
                for item, saved in state[name].items()
            }
        error = None
        try:
            self.reads.run()
        except MlxError as caught:
            error = isinstance(caught, DamagedError), str(caught)
        errors = [item for item in gather(error) or () if item is not None]
        if (first := broadcast(errors[0] if errors else None)) is not None:
            damaged, text = first
            raise (DamagedError if damaged else StorageError)(text)
        return copied

    def of_values_now(self, saved: Any, targets: Any) -> Any:
        """Return a copy of plain values, read at once."""
        copied = self.of_values(saved, targets)
        self.reads.run()
        return copied

    def of_member(self, member: Any, saved: Any) -> Any:
        """Return a copy of the state of a member of a group, like a model, an optimizer or a tool."""
        if isinstance(member, Optimizer):
            return self._of_optimizer(member, saved)
        if hasattr(member, "state_dict"):
            model = unwrap(member)
            return self._walk(saved, plain_entries(model.state_dict())[0], refused=isinstance(model, nn.Module))
        return self._walk(saved, getattr(member, "__dict__", None))

    def of_values(self, saved: Any, targets: Any = None) -> Any:
        """Return a copy of plain values."""
        return self._walk(saved, targets)

    def _walk(self, saved: Any, target: Any, *, refused: bool = False) -> Any:
        """Return a copy. With `refused`, do not read tensors of another shape, because the target will refuse them."""
        if isinstance(saved, torch.Tensor | StoredTensor):
            like = target if isinstance(target, torch.Tensor) else None
            if like is not None and like.shape != saved.shape:
                if refused and isinstance(saved, StoredTensor):
                    return torch.empty(saved.shape, dtype=saved.dtype, device="meta")
                like = None
            return self._lay_out(saved, like)
        if isinstance(saved, dict):
            targets = target if isinstance(target, Mapping) else {}
            return type(saved)(
                {key: self._walk(item, self._target(targets, key), refused=refused) for key, item in saved.items()}
            )
        if type(saved) in (list, tuple):
            others = target if isinstance(target, list | tuple) and len(target) == len(saved) else [None] * len(saved)
            return type(saved)(self._walk(one, other) for one, other in zip(saved, others, strict=True))
        return copy.deepcopy(saved)

    def _target(self, targets: Mapping[Any, Any], key: Any) -> Any:
        return targets[key] if key in targets else self._by_name.get(key)

    def _of_optimizer(self, optimizer: Optimizer, saved: Any) -> Any:
        """Return a copy of the state, in which tensors with the shape of their parameter have its layout."""
        parameters = [item for group in optimizer.param_groups for item in group["params"]]
        numbers = [number for group in saved["param_groups"] for number in group["params"]]
        by_number = dict(zip(numbers, parameters, strict=False))  # the optimizer refuses another number
        states = {
            number: {key: self._of_parameter(by_number.get(number), item) for key, item in state.items()}
            for number, state in saved["state"].items()
        }
        rest = {name: copy.deepcopy(item) for name, item in saved.items() if name != "state"}
        return {"state": states, **rest}

    def _of_parameter(self, parameter: torch.Tensor | None, value: Any) -> Any:
        if parameter is None or not isinstance(value, torch.Tensor | StoredTensor):
            return self._walk(value, None)
        if value.shape == parameter.shape:
            return self._lay_out(value, parameter.detach())
        if is_sharded(parameter) and isinstance(value, torch.Tensor) and value.ndim:
            return _replicate(value, parameter)
        return self._lay_out(value, None) if is_sharded(parameter) else self.reads.full(copy.deepcopy(value))

    def _lay_out(self, saved: torch.Tensor | StoredTensor, like: torch.Tensor | None) -> torch.Tensor:
        """Return a copy with the layout of another tensor, if that has the same shape."""
        if isinstance(saved, torch.Tensor):
            if like is None or not is_sharded(like):
                return saved.detach().clone()
            return _cut(saved, like)
        if like is not None:
            if not is_sharded(like):
                return self._whole(saved)
            layout = like.device_mesh, like.placements, like.device  # type: ignore[attr-defined]
            return self.reads.target(saved, layout, lambda: torch.empty_like(like.detach(), dtype=saved.dtype))
        if self._mesh is None:
            return self._whole(saved)
        placements = _placements(self._mesh, saved.dims)
        return self.reads.target(saved, placements, lambda: _empty(saved, self._mesh, placements))

    def _whole(self, saved: StoredTensor) -> torch.Tensor:
        whole: torch.Tensor = self.reads.full(saved)
        return whole


def _cut(saved: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a sharded tensor with this worker's part of a whole one, without communication."""
    from torch.distributed.tensor import distribute_tensor

    placements, mesh = like.placements, like.device_mesh  # type: ignore[attr-defined]
    part = distribute_tensor(saved.detach(), mesh, placements, src_data_rank=None).to_local()
    made = torch.empty_like(like.detach(), dtype=saved.dtype)
    made.to_local().copy_(part)  # type: ignore[attr-defined]
    return made


def _replicate(saved: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh  # type: ignore[attr-defined]
    return DTensor.from_local(saved.detach().to(like.device, copy=True), mesh, [Replicate()] * mesh.ndim)


def _placements(mesh: Any, dims: tuple[int, ...]) -> tuple[Any, ...]:
    """Return placements on a mesh that shard these dimensions of a tensor over the innermost mesh dimension."""
    from torch.distributed.tensor import Replicate, Shard

    return (*[Replicate()] * (mesh.ndim - 1), Shard(dims[0]) if dims else Replicate())


def _empty(saved: StoredTensor, mesh: Any, placements: tuple[Any, ...]) -> torch.Tensor:
    """Return an empty sharded tensor whose parts are on the CPU."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    whole = torch.empty(saved.shape, dtype=saved.dtype, device="meta")
    part = distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()
    local = torch.empty(part.shape, dtype=saved.dtype)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())
