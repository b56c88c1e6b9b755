"""Wrappers of the `forward` of a module: half precision and compilation.

Modules are changed in place, so that the names of their states stay the same.
"""

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from mlx_runtime.errors import ConfigError, short_message

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Values of `cfg.precision` other than 32."""


def in_half_precision(model: nn.Module, device: torch.device, precision: str) -> None:
    """Run a model's `forward` in autocast, and return its half-precision outputs as float32."""

    def in_half(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device.type, HALF[precision]):
            output = forward(*args, **kwargs)
        return tree_map(_in_float32, output)

    wrap_forward(model, in_half)


def compile_forward(module: nn.Module, how: bool | str | Mapping[str, Any]) -> None:
    """Compile a module: with the defaults of `torch.compile`, with one of its backends, or with some of its arguments.

    Raises:
        ConfigError: `torch.compile` has no such backend, mode or argument.
    """
    arguments = {"backend": how} if isinstance(how, str) else dict(how) if isinstance(how, Mapping) else {}
    try:
        module.compile(**arguments)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"cfg.compile is {how!r}, but torch.compile says: {short_message(error)}") from error


def wrap_forward(module: nn.Module, around: Callable[..., Any]) -> None:
    """Call `around(forward, ...)` instead of a module's `forward(...)`."""
    before = module.forward
    function = getattr(before, "__func__", None)  # None if `forward` was replaced by a plain function

    @functools.wraps(before)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return around(types.MethodType(function, self) if function else before, *args, **kwargs)

    module.forward = types.MethodType(forward, module)  # a method, so that a deep copy runs its own weights


def _in_float32(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in HALF.values() else value
