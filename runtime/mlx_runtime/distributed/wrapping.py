"""Models in and out of the wrapper that synchronizes their gradients, and models and tensors that are sharded."""

import sys
import traceback
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mlx_runtime.distributed.topology import current
from mlx_runtime.errors import full_message

Tensor = TypeVar("Tensor", bound=torch.Tensor)

_MIXED = "got mixed torch.Tensor and DTensor"
"""In the message of the plain RuntimeError that torch raises in C++ when an operation has both as arguments."""


def prepare_model(model: nn.Module, parallel_strategy_kwargs: Mapping[str, Any] | None = None) -> nn.Module:
    """Prepare a model for training on all workers. Every worker must call this, with the same models in the same order.

    The model is moved to the device of this worker. With several workers, it is wrapped in DistributedDataParallel,
    which averages its gradients, unless the strategy of the run has sharded or split it. Its forward pass takes and
    returns the same tensors as before, those of this worker.

    Args:
        model: one with parameters to train. For others, use `model.to(get_device())`.
        parallel_strategy_kwargs: arguments for DistributedDataParallel, such as `{"find_unused_parameters": True}`.

    Returns:
        The model, or the wrapper, whose `module` is the model.

    Raises:
        MlxError: called outside of a worker.
        RuntimeError: with several workers, no parameter of the model requires a gradient, or the models differ.
    """
    topology = current("prepare_model")
    if topology.model_parallel_size > 1:
        return model
    device = topology.device
    model = model.to(device)
    if topology.world_size == 1 or is_sharded(model):
        return model
    own: dict[str, Any] = {"device_ids": [device], "output_device": device} if device.type == "cuda" else {}
    return DistributedDataParallel(model, **(own | dict(parallel_strategy_kwargs or {})))


def unwrap(model: Any) -> Any:
    """Return the model inside `prepare_model`'s DDP wrapper, so that state names carry no `module.` prefix."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def is_sharded(value: object) -> bool:
    """Return True for a model that FSDP has sharded, and for a tensor of which each worker holds a part."""
    fsdp, tensor = sys.modules.get("torch.distributed.fsdp"), sys.modules.get("torch.distributed.tensor")
    if fsdp is None or tensor is None:  # importing them takes seconds, and without them nothing is sharded
        return False
    return isinstance(value, fsdp.FSDPModule | tensor.DTensor)


def raised_by_shards(error: BaseException) -> bool:
    """Return True if an operation on sharded tensors has raised an error."""
    modules = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__))
    return _MIXED in full_message(error) or any(name.startswith("torch.distributed.tensor.") for name in modules)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that this worker holds, which is all of it unless it is sharded."""
    part: torch.Tensor = tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return part


def whole(value: Any) -> Any:
    """Return a sharded tensor with the parts of all workers, who must all call this; anything else as it is."""
    return value.full_tensor() if is_sharded(value) else value


def by_mesh(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group tensors that operations take together: those that are whole, and those that are sharded alike."""
    groups: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(getattr(tensor, "device_mesh", None), []).append(tensor)
    return list(groups.values())


def total_norm(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the 2-norm of tensors, over all shards of those that are sharded. All workers must call this for those."""
    norms: list[torch.Tensor] = [whole(nn.utils.get_total_norm(group)) for group in by_mesh(tensors) or [[]]]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
