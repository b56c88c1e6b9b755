"""Wrap and unwrap models that synchronize gradients, and handle sharded models and tensors."""

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
"""Part of the message of the RuntimeError that torch raises in C++ for an operation on both types."""


def prepare_model(model: nn.Module, parallel_strategy_kwargs: Mapping[str, Any] | None = None) -> nn.Module:
    """Prepare a model for training on all workers. Every worker must call this, with the same models in the same order.

    The model is moved to the device of this worker. With several workers, it is wrapped in DistributedDataParallel,
    which averages its gradients, unless the strategy of the run has sharded or split it. Its forward pass still takes
    and returns the tensors of this worker.

    Args:
        model: any model. One without trainable parameters, such as a teacher, is only moved.
        parallel_strategy_kwargs: arguments for DistributedDataParallel, such as `{"find_unused_parameters": True}`.

    Returns:
        The model, or the wrapper, whose `module` is the model.

    Raises:
        MlxError: called outside of a worker.
        RuntimeError: the models of the workers differ.
    """
    topology = current("prepare_model")
    if topology.model_parallel_size > 1:
        return model
    device = topology.device
    model = model.to(device)
    if topology.world_size == 1 or is_sharded(model) or not any(item.requires_grad for item in model.parameters()):
        return model
    own: dict[str, Any] = {"device_ids": [device], "output_device": device} if device.type == "cuda" else {}
    return topology.replicate(model, **(own | dict(parallel_strategy_kwargs or {})))


def unwrap(model: Any) -> Any:
    """Return a model without the wrapper of DistributedDataParallel.

    The wrapper adds the prefix `module.` to the names in its state, and has no methods of the model but `forward`.
    """
    return model.module if isinstance(model, DistributedDataParallel) else model


def is_sharded(value: object) -> bool:
    """Return True for a model sharded by FSDP, and for a tensor of which each worker holds a part."""
    kinds = {"torch.distributed.fsdp": "FSDPModule", "torch.distributed.tensor": "DTensor"}
    loaded = {sys.modules[home]: name for home, name in kinds.items() if home in sys.modules}  # importing takes seconds
    return any(isinstance(value, getattr(module, name)) for module, name in loaded.items())


def raised_by_sharded_tensors(error: BaseException) -> bool:
    """Return True if an operation on sharded tensors has raised an error."""
    modules = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__))
    return _MIXED in full_message(error) or any(name.startswith("torch.distributed.tensor.") for name in modules)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this worker's part of a sharded tensor, or any other tensor unchanged."""
    part: torch.Tensor = tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return part


def whole(value: Any) -> Any:
    """Return a sharded tensor in full, for which every worker must call this, or any other value unchanged."""
    return value.full_tensor() if is_sharded(value) else value


def by_mesh(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group tensors by mesh, because an operation takes only tensors that are unsharded or sharded alike."""
    groups: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(getattr(tensor, "device_mesh", None), []).append(tensor)
    return list(groups.values())


def total_norm(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the 2-norm of tensors, including all shards of sharded ones, for which every worker must call this."""
    norms: list[torch.Tensor] = [whole(nn.utils.get_total_norm(group)) for group in by_mesh(tensors) or [[]]]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
