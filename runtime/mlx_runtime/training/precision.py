"""Half precision inside models, float32 outside."""

import functools
import types
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Values of `cfg.precision` besides 32."""


def in_half_precision(model: nn.Module, device: torch.device, precision: str) -> None:
    """Run a model's `forward` in autocast, and return its half-precision outputs as float32."""
    before = model.forward
    function = getattr(before, "__func__", None)  # None if `forward` was replaced by a plain function

    @functools.wraps(before)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device.type, HALF[precision]):
            output = function(self, *args, **kwargs) if function else before(*args, **kwargs)
        return tree_map(_in_float32, output)

    model.forward = types.MethodType(forward, model)  # a method, so that a deep copy of the model runs its own weights


def _in_float32(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in HALF.values() else value
