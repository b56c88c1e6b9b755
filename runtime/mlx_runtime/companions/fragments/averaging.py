"""Vectors of the tensors that replicas average, and the step from their mean to the next common weights."""

import copy
import functools
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from mlx_runtime.distributed.wrapping import unwrap


class Tensors:
    """The averaged tensors of one optimizer's models, by name: parameters, then buffers like running means.

    All of them together are a vector of float32, or of float64 if one of them is.
    """

    def __init__(self, models: Mapping[str, Any], optimizer: Optimizer) -> None:
        trained = {id(item) for group in optimizer.param_groups for item in group["params"]}
        self._count = 0
        self.params: dict[str, torch.Tensor] = {}
        self.buffers: dict[str, torch.Tensor] = {}
        for name, model in modules_of(models).items():
            found = {f"{name}.{path}": item for path, item in model.named_parameters() if id(item) in trained}
            self._count += len(found)
            if found:  # also if other workers hold all of them, because each averages the buffers that it holds
                self.params |= {path: item for path, item in found.items() if not item.is_meta}
                self.buffers |= {
                    path: item
                    for path, item in saved_tensors({name: model}, buffers=True).items()
                    if item.is_floating_point()
                }

    def only(self, names: Collection[str]) -> "Tensors":
        """Return some of the tensors."""
        found = copy.copy(self)
        vars(found).pop("dtype", None)
        found.params = {name: item for name, item in self.params.items() if name in names}
        found.buffers = {name: item for name, item in self.buffers.items() if name in names}
        return found

    def __len__(self) -> int:
        """Number of parameters, with those that other workers hold."""
        return self._count

    @property
    def trained(self) -> "Tensors":
        """The parameters alone."""
        return self.only(self.params)

    @property
    def all(self) -> dict[str, torch.Tensor]:
        return self.params | self.buffers

    def vector(self) -> torch.Tensor:
        return self.join(self.all)

    def join(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return a vector, given its parts by name of their tensor."""
        found = [parts[name].detach().reshape(-1).to(item.device, self.dtype) for name, item in self.all.items()]
        return torch.cat(found) if found else torch.empty(0)

    @property
    def exact(self) -> int:
        """Number of values of buffers, at the end of vectors."""
        return sum(item.numel() for item in self.buffers.values())

    def difference(self, common: torch.Tensor) -> torch.Tensor:
        """Return the difference of the parameters from the common ones, and of the buffers from zero."""
        now = self.vector()
        size = len(now) - self.exact
        return torch.cat([common.to(now.device)[:size] - now[:size], -now[size:]])

    def split(self, vector: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the parts of a vector by name of their tensor."""
        return dict(zip(self.all, torch.split(vector, [item.numel() for item in self.all.values()]), strict=True))

    def fill(self, vector: torch.Tensor) -> None:
        parts = self.split(vector)
        with torch.no_grad():
            for name, item in self.all.items():
                item.copy_(parts[name].view_as(item))

    @functools.cached_property
    def dtype(self) -> torch.dtype:
        return functools.reduce(torch.promote_types, map(_wide, self.all.values()), torch.float32)


def outer_step(
    common: torch.Tensor, momentum: torch.Tensor | None, mean: torch.Tensor, exact: int, lr: float, factor: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the next common weights, and the next momentum: those of torch.optim.SGD with Nesterov momentum.

    `mean` is the mean of the replicas' `Tensors.difference`. The last `exact` values are buffers, which adopt the mean
    of the replicas. Each operation is rounded on its own, so all machines get the same bits.
    """
    size = len(common) - exact
    gradient, step = mean[:size], mean[:size]
    if factor:
        momentum = gradient.clone() if momentum is None else momentum.mul(factor).add_(gradient)
        step = momentum.mul(factor).add_(gradient)
    return torch.cat([common[:size] - step.mul(lr), -mean[size:]]), momentum


def modules_of(models: Mapping[str, Any]) -> dict[str, nn.Module]:
    """Return modules by name, each of them once, without wrappers."""
    found: dict[str, nn.Module] = {}
    for name, item in models.items():
        model = unwrap(item)
        if isinstance(model, nn.Module) and not any(model is other for other in found.values()):
            found[name] = model
    return found


def saved_tensors(models: Mapping[str, Any], *, buffers: bool = False) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of this worker in the states of models, or only the buffers."""
    found = {}
    for name, model in modules_of(models).items():
        params = {path for path, _ in model.named_parameters(remove_duplicate=False)} if buffers else set()
        for path, item in model.state_dict(keep_vars=True).items():
            if isinstance(item, torch.Tensor) and path not in params and not item.is_meta:
                found[f"{name}.{path}"] = item
    return found


def _wide(item: torch.Tensor) -> torch.dtype:
    return torch.promote_types(item.dtype, torch.float32)
