"""The layouts of the tensors of a loaded state: each one gets the layout of its target.

So a checkpoint can be restored with any number of workers and any strategy: a worker that holds a part of a tensor
reads or cuts out this part, and one that holds the whole tensor reads all of it.
"""

import copy
from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.distributed.tensor
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer

from mlx_runtime.companions.sharding.shards import Reads, StoredTensor
from mlx_runtime.companions.sharding.sharing import fill
from mlx_runtime.distributed.collectives import broadcast, gather
from mlx_runtime.distributed.wrapping import is_sharded, unwrap
from mlx_runtime.errors import MlxError, StorageError
from mlx_runtime.runs.checkpoints.groups import DamagedError, State, plain_entries, stateful


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
                item: self.of_member(stateful(present[item], groups[name], item), saved)
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

    def of_member(self, member: Any, saved: Any) -> Any:
        """Return a copy of the state of a member of a group, like a model, an optimizer or a tool."""
        if isinstance(member, Optimizer):
            return self._of_optimizer(member, saved)
        if hasattr(member, "state_dict"):
            return self.of_values(saved, plain_entries(unwrap(member).state_dict())[0])
        return self.of_values(saved, getattr(member, "__dict__", None))

    def of_values(self, saved: Any, target: Any = None) -> Any:
        """Return a copy of plain values, given the values that they will replace."""
        if isinstance(saved, torch.Tensor | StoredTensor):
            like = target if isinstance(target, torch.Tensor) and target.shape == saved.shape else None
            return self._lay_out(saved, like)
        if isinstance(saved, dict):
            targets = self._by_name | target if isinstance(target, dict) else self._by_name
            return type(saved)({key: self.of_values(item, targets.get(key)) for key, item in saved.items()})
        if type(saved) in (list, tuple):
            others = target if isinstance(target, list | tuple) and len(target) == len(saved) else [None] * len(saved)
            return type(saved)(map(self.of_values, saved, others))
        return copy.deepcopy(saved)

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
            return self.of_values(value)
        if value.shape == parameter.shape:
            return self._lay_out(value, parameter)
        if not is_sharded(parameter):
            return self.reads.whole(copy.deepcopy(value))
        if isinstance(value, StoredTensor) or not value.ndim:
            return self._lay_out(value, None)
        mesh = parameter.device_mesh  # type: ignore[attr-defined]
        return DTensor.from_local(value.to(parameter.device, copy=True), mesh, [Replicate()] * mesh.ndim)

    def _lay_out(self, saved: torch.Tensor | StoredTensor, like: torch.Tensor | None) -> torch.Tensor:
        """Return a copy with the layout of another tensor, if there is one, or else that of before."""
        if like is not None and is_sharded(like):
            made = torch.empty_like(like.detach(), dtype=saved.dtype)
        elif like is None and self._mesh is not None and isinstance(saved, StoredTensor):
            inner = Shard(saved.dims[0]) if saved.dims else Replicate()
            placements = [*[Replicate()] * (self._mesh.ndim - 1), inner]
            options: Any = {"dtype": saved.dtype, "device_mesh": self._mesh, "placements": placements}
            made = torch.distributed.tensor.empty(*saved.shape, **options).cpu()
        else:
            return self.reads.whole(saved) if isinstance(saved, StoredTensor) else saved.detach().clone()
        if isinstance(saved, StoredTensor):
            return self.reads.into(saved, made)
        fill(made, saved)
        return made
