"""Half precision and compiled models, as `cfg.precision` and `cfg.compile` ask for them."""

import functools
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from mlx_runtime.errors import ConfigError, suggest

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Values of `cfg.precision` besides 32."""


class LossScale:
    """Scales losses for `cfg.precision=fp16`, and does nothing for other precisions.

    Args:
        precision: `cfg.precision`.
        device: device that the models are on.
    """

    def __init__(self, precision: int | str, device: torch.device) -> None:
        self._scaler = torch.amp.GradScaler(device.type) if precision == "fp16" else None
        self._update_is_due = False

    def __bool__(self) -> bool:
        return self._scaler is not None

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        return self._scaler.scale(loss) if self._scaler is not None else loss

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide the gradients of an optimizer by the scale, before they are clipped."""
        if self._scaler is not None:
            self._scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer) -> None:
        """Let an optimizer step, unless its gradients are scaled and not finite."""
        if self._scaler is None:
            optimizer.step()
        else:
            self._scaler.step(optimizer)
            self._update_is_due = True

    def update(self) -> None:
        """Update the scale, once all optimizers that share it have stepped."""
        if self._scaler is not None and self._update_is_due:
            self._scaler.update()
            self._update_is_due = False

    @property
    def update_is_due(self) -> bool:
        """True if optimizers have stepped since the last update."""
        return self._update_is_due

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values; empty without a scale."""
        self.update()
        return self._scaler.state_dict() if self._scaler is not None else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state, unless it was saved with a different precision."""
        if self._scaler is not None and state:
            self._scaler.load_state_dict(state)


def prepare_models(models: Iterable[Any], cfg: Any, device: torch.device) -> None:
    """Apply `cfg.precision` and `cfg.compile` to models, in place.

    Raises:
        ConfigError: `cfg.compile` names no backend.
    """
    for model in models:
        if isinstance(model, nn.Module) and cfg.precision != 32:
            in_half_precision(model, device, cfg.precision)
        if isinstance(model, nn.Module) and cfg.compile:
            compile_model(model, cfg.compile)


def in_half_precision(model: nn.Module, device: torch.device, precision: str) -> None:
    """Run a model's `forward` in autocast, and return its half-precision outputs as float32.

    Args:
        model: changed in place; the names in its state stay the same.
        device: device that it runs on.
        precision: `bf16` or `fp16`.
    """
    before = model.forward
    function = getattr(before, "__func__", None)  # None if `forward` was replaced by a plain function

    @functools.wraps(before)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device.type, HALF[precision]):
            output = function(self, *args, **kwargs) if function else before(*args, **kwargs)
        return tree_map(_in_float32, output)

    model.forward = types.MethodType(forward, model)  # a method, so that a deep copy of the model runs its own weights


def compile_model(model: nn.Module, backend: bool | str) -> None:
    """Compile a model in place; the names in its state stay the same.

    Args:
        model: model to compile.
        backend: one of `torch.compiler.list_backends()`, or True for torch's default.

    Raises:
        ConfigError: there is no such backend.
    """
    options = {}
    if isinstance(backend, str):
        known = torch.compiler.list_backends(exclude_tags=())
        if backend not in known:
            raise ConfigError(f"cfg.compile is {backend!r}, not a torch.compile backend.{suggest(backend, known)}")
        options["backend"] = backend
    model.compile(**options)


def _in_float32(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in HALF.values() else value
