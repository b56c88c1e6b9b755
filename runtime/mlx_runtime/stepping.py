"""Half precision, updates of several steps, clipping and compiled models, for loops that ask for them; all by torch."""

import functools
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from mlx_runtime.accumulation import Accumulation
from mlx_runtime.errors import ConfigError, MlxError, near

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The values of `cfg.precision` beside 32."""


@dataclass
class Stepping:
    """What `BaseModule.backward` and `BaseModule.optimizer_step` do on one worker.

    Attributes:
        accumulation: says which step is the last of an update.
        clip: greatest norm of an optimizer's gradients, or None.
        scaler: scales losses while the precision is fp16, or None.
        inside: whether an optimizer steps on behalf of `step`.
    """

    accumulation: Accumulation = field(default_factory=Accumulation)
    clip: float | None = None
    scaler: torch.amp.GradScaler | None = None
    inside: bool = False
    _unsettled: bool = False

    def forget(self, optimizers: Iterable[Optimizer]) -> None:
        """A pass begins: gradients of an update that the pass before it left in the middle are dropped."""
        if self.accumulation.in_place and not self.accumulation.last:
            for optimizer in optimizers:
                optimizer.zero_grad()

    def backward(self, loss: torch.Tensor, optimizers: Iterable[Optimizer], **options: Any) -> None:
        """Add a loss's part to the gradients of the present update.

        Args:
            loss: of this step, a mean over its rows.
            optimizers: of the experiment.
            options: of `torch.Tensor.backward`.
        """
        self.accumulation.in_place = True
        if self._unsettled and all(param.grad is None for optimizer in optimizers for param in _params(optimizer)):
            self.settle()
        if self.accumulation.steps > 1:
            loss = loss / self.accumulation.steps
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        loss.backward(**options)  # type: ignore[no-untyped-call]  # torch has not annotated it

    def step(self, optimizer: Optimizer) -> bool:
        """Let an optimizer step if the update is complete. Returns whether it was.

        Raises:
            MlxError: the loop has called `loss.backward()` instead of `backward`.
        """
        if not self.accumulation.in_place:
            raise MlxError("self.optimizer_step() goes with self.backward(loss); call that instead of loss.backward()")
        if not self.accumulation.last:
            return False
        if self.clip is not None:
            if self.scaler is not None:
                self.scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(list(_params(optimizer)), self.clip)
        self.inside = True
        try:
            if self.scaler is None:
                optimizer.step()
            else:
                self.scaler.step(optimizer)
                self._unsettled = True
        finally:
            self.inside = False
        optimizer.zero_grad()
        return True

    def settle(self) -> None:
        """Let the scaler take account of the steps; not before all optimizers had theirs, which share its scale."""
        if self.scaler is not None and self._unsettled:
            self.scaler.update()
            self._unsettled = False

    def refuse_plain_step(self, accumulates: str | None) -> None:
        """An optimizer is about to step.

        Args:
            accumulates: the setting that lets several steps make an update, also if this run has not needed it yet.

        Raises:
            MlxError: the loop calls it by itself, with gradients that are not what it takes them for.
        """
        if self.inside:
            return
        if accumulates and not self.accumulation.in_place:
            raise MlxError(
                f"{accumulates} needs self.backward(loss) and self.optimizer_step(); call these instead of "
                "loss.backward() and optimizer.step()"
            )
        if not self.accumulation.last:
            raise MlxError(
                f"optimizer.step() came in the middle of an update of {self.accumulation.steps} steps, where each "
                "worker has other gradients; call self.optimizer_step() instead"
            )
        if self.scaler is not None and self.accumulation.in_place:
            raise MlxError(
                "optimizer.step() came after self.backward(loss), which scales gradients for cfg.precision=fp16; "
                "call self.optimizer_step() instead"
            )

    def state(self) -> dict[str, Any]:
        """What must survive a restart, as plain values."""
        self.settle()
        return self.scaler.state_dict() if self.scaler is not None else {}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a `state`; one that was saved with another precision is left out."""
        if self.scaler is not None and state:
            self.scaler.load_state_dict(state)


def share_gradients(models: Iterable[Any], *, now: bool) -> None:
    """Whether workers shall share the gradients of the step that begins; what DDP's `no_sync` does, for all models."""
    for model in models:
        if isinstance(model, DistributedDataParallel):
            model.require_backward_grad_sync = now


def in_half_precision(model: nn.Module, device: torch.device, precision: str) -> None:
    """Run a model's `forward` in autocast. What it returns in half precision comes as float32.

    Args:
        model: changed in place, with the same names in its state.
        device: that it runs on.
        precision: `bf16` or `fp16`.
    """
    before = model.forward
    function = getattr(before, "__func__", None)  # None for what was put there as a plain function

    @functools.wraps(before)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device.type, HALF[precision]):
            output = function(self, *args, **kwargs) if function else before(*args, **kwargs)
        return tree_map(_in_float32, output)

    model.forward = types.MethodType(forward, model)  # a method, so that a deep copy of the model runs its own weights


def compile_model(model: nn.Module, backend: bool | str) -> None:
    """Compile a model in place, with the same names in its state.

    Args:
        model: to compile.
        backend: name of one of `torch.compiler.list_backends()`; True takes torch's default.

    Raises:
        ConfigError: there is no such backend.
    """
    options = {}
    if isinstance(backend, str):
        known = torch.compiler.list_backends(exclude_tags=())
        if backend not in known:
            raise ConfigError(f"cfg.compile is {backend!r}, no backend of torch.compile.{near(backend, known)}")
        options["backend"] = backend
    model.compile(**options)


def _params(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _in_float32(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in HALF.values() else value
