"""Updates of models: gradients in which all rows have the same weight, across workers and steps; loss scaling, clipping
and inspection; half precision and compilation."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from mlx_runtime.data.sampling import WorkerPass
from mlx_runtime.distributed.wrapping import is_sharded, local_part, total_norm, unwrap
from mlx_runtime.errors import MlxError, suggest
from mlx_runtime.loop.context import RunContext, params_of
from mlx_runtime.loop.losses import Mean
from mlx_runtime.loop.reporting import Reporter
from mlx_runtime.runs.checkpoints.groups import members

if TYPE_CHECKING:
    from mlx_runtime.loop.strategies import DDP
    from mlx_runtime.loop.weighting import Weight, WeightedLosses


@dataclass
class Accumulation:
    """The position of the current step within its update."""

    first: bool = True
    last: bool = True
    step: int = 1  # number in the pass
    steps: int = 1  # in this update

    def begin_step(self, number: int, total: int, per_update: int) -> None:
        """Move to a step, counted from 1 in a pass of `total` steps; its last update may have fewer steps."""
        self.step, self.first = number, number % per_update == 1 or per_update == 1
        self.last = number % per_update == 0 or number == total
        self.steps = min(per_update, total - (number - 1) // per_update * per_update)


class Optimization:
    """Gradients and updates of one worker."""

    def __init__(self, context: RunContext, reporter: Reporter, strategy: "DDP") -> None:
        cfg = context.cfg
        self._context, self._reporter, self.strategy = context, reporter, strategy
        self.accumulation = Accumulation()
        self._divisor = 1.0  # divisor of the loss of this step; see `WorkerPass.loss_divisor`
        self._weighted: WeightedLosses | None = None  # None unless losses have weights, or an update has several steps
        self._stop_on_nan = cfg.debug.stop_on_nan
        self._scaler = strategy.scaler(enabled=cfg.precision == "fp16")
        self._scale_is_due = False  # optimizers have stepped since the scale was last updated
        self._stepped: bool | None = None  # an optimizer has stepped in this update; False if the scaler skipped it
        self._managed = False  # the loop calls self.backward, so gradients may be scaled or incomplete
        self._stepping = False  # an optimizer steps on behalf of `step`
        self.knows_steps = False  # a loader of the runtime was read, so the last step of a pass is known
        self._updated: bool | None = None  # an optimizer has stepped since the last step; None before the first time

    # -- called by user code

    def backward(
        self, loss: torch.Tensor, *, weight: "Weight | None" = None, optimizer: str | None = None, **options: Any
    ) -> None:
        """Add the gradients of a loss to those of the current update; see `BaseModule.backward`."""
        self._begin_backward()
        others = {} if optimizer is None else self._set_aside(optimizer)
        factor = self._factor(weight)
        if isinstance(factor, torch.Tensor) or factor != 1:
            loss = loss * (factor.to(loss.dtype) if isinstance(factor, torch.Tensor) else factor)
        self._scaler.scale(loss).backward(**options)  # type: ignore[no-untyped-call]  # torch has not annotated it
        for param, gradient in others.items():
            param.grad = gradient

    def _set_aside(self, name: str) -> dict[nn.Parameter, torch.Tensor | None]:
        """Remove the gradients of all optimizers but one. Return them by parameter, to be restored later."""
        if self.strategy.shards and self.accumulation.steps > 1:
            raise MlxError(
                "self.backward(loss, optimizer=...) cannot accumulate the gradients of sharded models; set "
                "cfg.accumulate_grad_batches=1 and cfg.elastic.keep_global_batch=false, or use cfg.strategy=ddp"
            )
        own = set(params_of(self._optimizer(name, f"backward(loss, optimizer={name!r})")))
        optimizers = self._context.groups.optimizers.values()
        kept = {param: param.grad for item in optimizers for param in params_of(item) if param not in own}
        for param in kept:
            param.grad = None
        return kept

    def _begin_backward(self) -> None:
        optimizers = self._context.groups.optimizers
        setting = self._accumulates()
        if not self.knows_steps and setting:
            raise MlxError(
                f"cfg.{setting} needs the loaders of self.generate_loaders, which know the last step of a pass; read "
                "one of them, or leave it out"
            )
        self._managed = True
        if self._scale_is_due and all(param.grad is None for item in optimizers.values() for param in params_of(item)):
            self._update_scale()

    def _factor(self, weight: "Weight | None") -> float | torch.Tensor:
        """Return the factor of a loss in its update, given its weight. Every worker must call this."""
        weight = self._loss_count() if weight is None else weight
        self.forget_calls()
        alone = self.accumulation.steps == 1
        if weight is None and alone:
            return 1 / self._divisor
        from mlx_runtime.loop.weighting import WeightedLosses, checked_weight

        self._weighted = self._weighted or WeightedLosses()
        checked = None if weight is None else checked_weight(weight, self._context.topology.device)
        if not alone:
            self._weighted.add(checked, self.accumulation.step)
        return 1 / self._divisor if checked is None else self._weighted.factor(checked, alone=alone)

    def _loss_count(self) -> "Weight | None":
        """Return the count of the loss that was called for this backward pass; None for rows or after several calls."""
        called = {name: loss for name, loss in self._losses().items() if loss.calls}
        counted = [name for name, loss in called.items() if loss.counted is not None]
        if counted and sum(loss.calls for loss in called.values()) == 1:
            return called[counted[0]].counted
        if counted:
            self._reporter.notice(
                f"self.backward weighs rows equally, not what losses.{counted[0]} counts, because several losses were "
                f"called before it: {', '.join(called)}; pass weight=, or call self.backward after each"
            )
        return None

    def _losses(self) -> dict[str, Mean]:
        return members(self._context.groups["losses"], Mean)

    def forget_calls(self) -> None:
        """Forget the calls of losses, at the beginning of a step."""
        for loss in self._losses().values():
            loss.calls, loss.counted = 0, None

    def step(self, name: str | None = None) -> bool:
        """Clip an optimizer's gradients, step and zero them, if the update is complete. Return True if it stepped."""
        optimizer = self._optimizer(name)
        if not self._managed:
            raise MlxError("self.optimizer_step() goes with self.backward(loss); call that instead of loss.backward()")
        if not self.accumulation.last:
            return False
        divisor = None if self._weighted is None else self._weighted.divisor
        for param in params_of(optimizer):
            if divisor is not None and param.grad is not None:
                local_part(param.grad).div_(divisor)
        cfg = self._context.cfg
        if cfg.gradient_clip is not None:
            self._scaler.unscale_(optimizer)
            self.strategy.clip_grad_norm_(list(params_of(optimizer)), cfg.gradient_clip)
        self._stepping = True
        self._scaler.step(optimizer)
        self._stepping = False
        self._scale_is_due = self._scaler.is_enabled()
        optimizer.zero_grad()
        self.after_update()  # also if the scaler has skipped the step
        if not self._scale_is_due:
            return True
        from mlx_runtime.distributed.torch_private import overflowed  # here, because only fp16 needs it

        stepped = not overflowed(self._scaler, optimizer)
        self._stepped = stepped or bool(self._stepped)
        return stepped

    @property
    def skipped(self) -> bool:
        """True if the scaler has skipped all steps of the current update."""
        return self._stepped is False

    def _optimizer(self, name: str | None, call: str = "") -> Optimizer:
        """Return an optimizer by its name; None means the only one."""
        optimizers = self._context.groups.optimizers
        if name is None and len(optimizers) == 1:
            name = next(iter(optimizers))
        if name is None or name not in optimizers:
            call = call or f"optimizer_step({'' if name is None else repr(name)})"
            raise MlxError(f"self.{call} needs the name of an optimizer.{suggest(name or '', optimizers)}")
        return optimizers[name]

    def _update_scale(self) -> None:
        """Update the loss scale after all optimizers have stepped."""
        if self._scale_is_due:
            self._scaler.update()
            self._scale_is_due = False

    # -- called by the session

    def begin_pass(self) -> None:
        """Drop the gradients of an update that the previous pass left unfinished."""
        if self._managed and not self.accumulation.last:
            for optimizer in self._context.groups.optimizers.values():
                optimizer.zero_grad()
            self.strategy.drop_gradients(self._models())
        self.accumulation, self._divisor, self._weighted = Accumulation(), 1.0, None

    def begin_step(self, part: WorkerPass, per_update: int) -> None:
        """Begin a training step; see `Accumulation.begin_step`. The steps before an interruption do not count."""
        self.knows_steps = True
        self._stepped = None
        self._update_scale()
        self._divisor = part.loss_divisor(per_update)
        if per_update > 1:
            self.accumulation.begin_step(part.given, part.plan.steps - part.skip, per_update)
            self.strategy.sync_gradients(self._models(), self.accumulation.last)
            if self.accumulation.first:
                self._weighted = None

    def _models(self) -> list[Any]:
        groups = self._context.groups
        return [*groups.members("models").values(), *groups.members("own").values()]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loss scale; empty unless `cfg.precision=fp16`."""
        self._update_scale()
        return self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the loss scale, unless it was saved with a different precision."""
        if state:
            self._scaler.load_state_dict(state)

    def step_completed_update(self) -> bool:
        """Return True if the step that has just finished completed an update, so that a checkpoint may be saved."""
        updated, self._updated = self._updated, False if self._updated else self._updated
        return self.accumulation.last and updated is not False

    @property
    def expected(self) -> bool:
        """True if there are optimizers, so that training is expected to update models."""
        return bool(self._context.groups.optimizers) or self._updated is not None

    def before_update(self, optimizer: Optimizer) -> None:
        """Check that an optimizer may step now, with unscaled, complete and finite gradients."""
        if not self._stepping:
            self._check_plain_step()
        if self._stop_on_nan:
            models = {name: unwrap(item) for name, item in self._context.groups.members("models").items()}
            check_finite(models, params_of(optimizer), self._context.progress.global_step)

    def after_update(self) -> None:
        """Note an update."""
        self._updated = True

    def _accumulates(self) -> str:
        """Return the setting by which an update may have several steps, or an empty text."""
        cfg = self._context.cfg
        keeps = "elastic.keep_global_batch" if cfg.elastic.keep_global_batch else ""
        return "accumulate_grad_batches" if cfg.accumulate_grad_batches > 1 else keeps

    def _check_plain_step(self) -> None:
        cfg, setting = self._context.cfg, self._accumulates()
        if not self._managed and setting:
            raise MlxError(
                f"cfg.{setting} needs self.backward(loss) and self.optimizer_step(); call these instead of "
                "loss.backward() and optimizer.step()"
            )
        if not self.accumulation.last or (self._scaler.is_enabled() and self._managed):
            raise MlxError(
                "optimizer.step() was called in the middle of an update, where each worker has different gradients, or "
                "after self.backward(loss), which scales them for cfg.precision=fp16; "
                "call self.optimizer_step() instead"
            )
        if cfg.gradient_clip is not None:
            self._reporter.notice("cfg.gradient_clip needs self.optimizer_step(); optimizer.step() does not clip")


def prepare_models(models: Iterable[Any], cfg: Any, device: torch.device) -> None:
    """Apply `cfg.precision` and `cfg.compile` to models, in place; the names in their states stay the same.

    Raises:
        ConfigError: `cfg.compile` has an argument that `torch.compile` does not accept.
    """
    if cfg.precision == 32 and not cfg.compile:
        return
    from mlx_runtime.loop.forward import compile_forward, in_half_precision

    for model in models:
        if isinstance(model, nn.Module) and not is_sharded(model):
            if cfg.precision != 32:
                in_half_precision(model, device, cfg.precision)
            if cfg.compile:
                compile_forward(model, cfg.compile)


def check_finite(models: Mapping[str, Any], params: Iterable[nn.Parameter], step: int) -> None:
    """Check the gradients of an optimizer that is about to step. Every worker must call this.

    Raises:
        MlxError: one is not finite; names its parameter, like `net.layers.0.weight`.
    """
    gradients = {id(param): param.grad for param in params if param.grad is not None}
    if total_norm(gradients.values()).isfinite():
        return
    broken = [
        f"{title}.{path}"
        for title, model in models.items()
        for path, param in (model.named_parameters() if isinstance(model, nn.Module) else ())
        if id(param) in gradients and not total_norm([gradients[id(param)]]).isfinite()
    ]
    if broken:
        more = f" (and {len(broken) - 1} more)" if len(broken) > 1 else ""
        raise MlxError(f"the gradient of {broken[0]}{more} is not finite at step {step} (cfg.debug.stop_on_nan)")
