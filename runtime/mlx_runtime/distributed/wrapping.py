"""Models in and out of the wrapper that synchronizes their gradients, and models and tensors that are sharded."""

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def unwrap(model: Any) -> Any:
    """Return the model inside `prepare_model`'s DDP wrapper, so that state names carry no `module.` prefix."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def is_sharded(value: object) -> bool:
    """Return True for a model that FSDP has sharded, and for a tensor of which each worker holds a part."""
    fsdp, tensor = sys.modules.get("torch.distributed.fsdp"), sys.modules.get("torch.distributed.tensor")
    if fsdp is None or tensor is None:  # importing them takes seconds, and without them nothing is sharded
        return False
    return isinstance(value, fsdp.FSDPModule | tensor.DTensor)


def total_norm(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the 2-norm of tensors, over all shards of those that are sharded. All workers must call this for those."""
    groups: dict[Any, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(getattr(tensor, "device_mesh", None), []).append(tensor)
    norms: list[Any] = [nn.utils.get_total_norm(group) for group in groups.values()]
    whole: list[torch.Tensor] = [norm.full_tensor() if is_sharded(norm) else norm for norm in norms]
    return whole[0] if len(whole) == 1 else torch.linalg.vector_norm(torch.stack(whole))
