"""Updates as the config requires: gradients of several steps, scaled and clipped, and inspected before each update."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from mlx_runtime.distributed.wrapping import unwrap
from mlx_runtime.errors import MlxError, suggest
from mlx_runtime.training.context import Groups, Progress, RunContext
from mlx_runtime.training.gradients import GradientMonitor
from mlx_runtime.training.precision import LossScale
from mlx_runtime.training.reporting import Reporter
from mlx_runtime.training.strategies import Strategy


@dataclass
class Accumulation:
    """The position of the current step among those that make one update.

    Attributes:
        first, last: True at the first and at the last step of an update.
        steps: number of steps in this update.
    """

    first: bool = True
    last: bool = True
    steps: int = 1

    def begin_step(self, number: int, total: int, per_update: int) -> None:
        """Move to a step.

        Args:
            number: number of the step in its pass, from 1.
            total: steps in the pass.
            per_update: steps per update; the last update of a pass may have fewer.
        """
        self.first = number % per_update == 1 or per_update == 1
        self.last = number % per_update == 0 or number == total
        self.steps = min(per_update, total - (number - 1) // per_update * per_update)


class Optimization:
    """Gradients and updates of one worker.

    Args:
        context, groups, progress, reporter: those of the session.
        strategy: synchronizes and clips gradients.

    Attributes:
        accumulation: position of the current step in its update.
        monitor: inspects gradients before each update.
        scale: the loss scale.
    """

    def __init__(
        self, context: RunContext, groups: Groups, progress: Progress, reporter: Reporter, strategy: Strategy
    ) -> None:
        cfg = self._cfg = context.cfg
        self._groups, self._progress, self._reporter, self._strategy = groups, progress, reporter, strategy
        self.accumulation = Accumulation()
        self.monitor = GradientMonitor(
            cfg.watch_gradients,
            cfg.stop_on_nan,
            self._report_norms if context.topology.writes else None,
            reporter.events.notice,
        )
        self.scale = LossScale(cfg.precision, context.topology.device)
        self._managed = False  # the loop calls self.backward, so gradients may be scaled or incomplete
        self._stepping = False  # an optimizer steps on behalf of `step`
        self._knows_steps = False  # a loader of the runtime was read, which knows the last step of a pass
        self._updates_before = 0

    # -- called by user code

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """Add the gradients of a loss to those of the current update.

        Args:
            loss: loss of this step, a mean over its rows.
            options: keyword arguments of `torch.Tensor.backward`.

        Raises:
            MlxError: gradients are to be accumulated, and the loop does not read loaders of the runtime.
        """
        if not self._knows_steps and self._cfg.accumulate_grad_batches > 1:
            raise MlxError(
                "cfg.accumulate_grad_batches needs the loaders of self.generate_loaders, which know the last step of a "
                "pass; read one of them, or set it to 1"
            )
        self._managed = True
        if self.scale.update_is_due and all(
            param.grad is None for item in self._groups.optimizers.values() for param in _params(item)
        ):
            self.scale.update()
        if self.accumulation.steps > 1:
            loss = loss / self.accumulation.steps
        self.scale.scaled(loss).backward(**options)  # type: ignore[no-untyped-call]  # torch has not annotated it

    def step(self, name: str | None = None) -> bool:
        """Clip the gradients of an optimizer, step and zero them, if the update is complete. Return True if it is.

        Raises:
            MlxError: there is no such optimizer, or the loop called `loss.backward()` instead of `backward`.
        """
        optimizer = self._optimizer(name)
        if not self._managed:
            raise MlxError("self.optimizer_step() goes with self.backward(loss); call that instead of loss.backward()")
        if not self.accumulation.last:
            return False
        if self._cfg.gradient_clip is not None:
            self.scale.unscale(optimizer)
            self._strategy.clip_grad_norm_(list(_params(optimizer)), self._cfg.gradient_clip)
        self._stepping = True
        try:
            self.scale.step(optimizer)
        finally:
            self._stepping = False
        optimizer.zero_grad()
        self.after_update()  # the scaler may have left out the step
        return True

    def _optimizer(self, name: str | None) -> Optimizer:
        optimizers = self._groups.optimizers
        if name is None and len(optimizers) == 1:
            name = next(iter(optimizers))
        if name is None:
            raise MlxError(f"self.optimizer_step() needs the name of an optimizer.{suggest('', optimizers)}")
        if name not in optimizers:
            raise MlxError(f"self.optimizer_step({name!r}): there is no such optimizer.{suggest(name, optimizers)}")
        return optimizers[name]

    # -- called by the session

    def begin_pass(self) -> None:
        """Drop the gradients of an update that the previous pass left unfinished."""
        if self._managed and not self.accumulation.last:
            for optimizer in self._groups.optimizers.values():
                optimizer.zero_grad()
        self.accumulation.first = self.accumulation.last = True

    def begin_step(self, number: int, total: int, per_update: int) -> None:
        """Begin a training step.

        Args:
            number: number of the step in its pass, from 1; the steps before an interruption do not count.
            total: steps in the pass.
            per_update: steps per update. Workers share gradients at the last one only.
        """
        self._knows_steps = True
        self.scale.update()
        if per_update > 1:
            self.accumulation.begin_step(number, total, per_update)
            models = [*self._groups.members("models").values(), *self._groups.members("own").values()]
            self._strategy.sync_gradients(models, self.accumulation.last)

    def step_completed_update(self) -> bool:
        """Return True if the step that has just finished completed an update, so that a checkpoint holds all of it."""
        updated, self._updates_before = self._progress.updates != self._updates_before, self._progress.updates
        return self.accumulation.last and (updated or not self._progress.updates)

    def before_update(self, optimizer: Optimizer) -> None:
        """Check that an optimizer may step now, and inspect its gradients.

        Raises:
            MlxError: the loop calls `optimizer.step()` while gradients are scaled or incomplete.
        """
        if not self._stepping:
            self._check_plain_step()
        if self.monitor.wants(self._progress.global_step):
            models = {name: unwrap(item) for name, item in self._groups.members("models").items()}
            self.monitor.inspect(models, _params(optimizer), self._progress.global_step)

    def after_update(self) -> None:
        """Count an update."""
        self._progress.updates += 1

    def _check_plain_step(self) -> None:
        cfg = self._cfg
        setting = "accumulate_grad_batches" if cfg.accumulate_grad_batches > 1 else "keep_global_batch"
        if not self._managed and (cfg.accumulate_grad_batches > 1 or cfg.keep_global_batch):
            raise MlxError(
                f"cfg.{setting} needs self.backward(loss) and self.optimizer_step(); call these instead of "
                "loss.backward() and optimizer.step()"
            )
        if not self.accumulation.last:
            raise MlxError(
                f"optimizer.step() was called in the middle of an update of {self.accumulation.steps} steps, where "
                "each worker has different gradients; call self.optimizer_step() instead"
            )
        if self.scale and self._managed:
            raise MlxError(
                "optimizer.step() was called after self.backward(loss), which scales gradients for cfg.precision=fp16; "
                "call self.optimizer_step() instead"
            )
        if cfg.gradient_clip is not None:
            self._reporter.events.notice(
                "cfg.gradient_clip needs self.optimizer_step(); optimizer.step() does not clip"
            )

    def _report_norms(self, values: dict[str, float]) -> None:
        self._reporter.record(values, self._progress.global_step, self._progress.epoch)


def _params(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]
