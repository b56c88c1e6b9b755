"""The tensors that replicas average, their means, and the step from a mean to the next common weights."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from mlx_runtime.distributed.wrapping import unwrap


class Tensors:
    """The tensors of one optimizer's models that replicas average.

    Attributes:
        params: trained parameters that this worker holds, by name.
        buffers: buffers like running means that this worker holds, by name.
        count: number of trained parameters, including those that other workers hold.
    """

    def __init__(self, models: Mapping[str, Any], optimizer: Optimizer) -> None:
        trained = {id(item) for group in optimizer.param_groups for item in group["params"]}
        self.count = 0
        self.params: dict[str, torch.Tensor] = {}
        self.buffers: dict[str, torch.Tensor] = {}
        for name, model in modules_of(models).items():
            found = {f"{name}.{path}": item for path, item in model.named_parameters() if id(item) in trained}
            self.count += len(found)
            if found:  # also if other workers hold all of them, because each averages the buffers that it holds
                self.params |= {path: item.detach() for path, item in found.items() if not item.is_meta}
                buffers = saved_tensors({name: model}, buffers=True)
                self.buffers |= {path: item for path, item in buffers.items() if item.is_floating_point()}


def wide(item: torch.Tensor) -> torch.Tensor:
    """Return a copy with at least the precision of float32."""
    return item.to(torch.promote_types(item.dtype, torch.float32), copy=True)


def means(tensors: Mapping[str, torch.Tensor], group: Any, *, half: bool) -> tuple[dict[str, torch.Tensor], int]:
    """Return the means of tensors over a process group, and the number of bytes that this worker has sent for them.

    With `half`, they are rounded to float16.
    """
    if not tensors:
        return {}, 0
    total = torch.cat([item.reshape(-1) for item in tensors.values()])
    sent = (total / group.size()).half() if half else total
    dist.all_reduce(sent, group=group)
    mean = sent.to(total.dtype) if half else sent / group.size()
    parts = mean.split([item.numel() for item in tensors.values()])
    return {name: part.view_as(tensors[name]) for name, part in zip(tensors, parts, strict=True)}, sent.nbytes


def outer_step(
    common: torch.Tensor, momentum: torch.Tensor | None, gradient: torch.Tensor, lr: float, factor: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the next common weights, and the next momentum: those of torch.optim.SGD with Nesterov momentum.

    Each operation is rounded on its own, so all machines get the same bits.
    """
    step = gradient
    if factor:
        momentum = gradient.clone() if momentum is None else momentum.mul(factor).add_(gradient)
        step = momentum.mul(factor).add_(gradient)
    return common - step.mul(lr), momentum


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
