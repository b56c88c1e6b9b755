"""`OwnSteps`: the steps of a loop that reads no training loader, as in reinforcement learning.

An update is a step. In an experiment without optimizers, each batch that is recorded is a step, or else each epoch. The
end of such a step is not known, so a checkpoint or a stop that is due after it follows when the next step begins.
"""

from typing import TYPE_CHECKING

from torch.optim import Optimizer

from mlx_runtime.loop import replicas

if TYPE_CHECKING:
    from mlx_runtime.loop.session import Session


class OwnSteps:
    """Counts the steps of a session whose loop reads no training loader."""

    def __init__(self, session: "Session") -> None:
        self._session = session
        self._optimizers: set[int] = set()  # ids of those that have stepped in the current step
        self._epoch_began_at = session.progress.global_step

    @property
    def are_updates(self) -> bool:
        """True once an optimizer has begun a step."""
        return bool(self._optimizers)

    def know(self, optimizer: Optimizer) -> bool:
        """Return True if an optimizer has stepped in the current step, so that its steps count."""
        return id(optimizer) in self._optimizers

    def begin_update(self, optimizer: Optimizer) -> None:
        """Begin a step with an update, unless another optimizer has begun it."""
        if not self._optimizers or self.know(optimizer):
            self.begin()
            self._optimizers.clear()
        self._optimizers.add(id(optimizer))

    def begin(self) -> None:
        """Count a step, after saving or stopping at the end of the previous one."""
        session = self._session
        if session.progress.global_step:
            session.training_step_done()
        else:
            self._warn_of_settings()
        if self._optimizers:
            session.poll_stop()
        session.save_or_stop(None)
        session.passes.step_on_own_data()
        session.progress.global_step += 1

    def end_epoch(self) -> None:
        """End an epoch, which is a step itself if it has no others."""
        progress = self._session.progress
        if progress.global_step == self._epoch_began_at and not self._session.optimization.expected:
            self.begin()
        self._epoch_began_at = progress.global_step

    def _warn_of_settings(self) -> None:
        session = self._session
        for name in ("limit_batches", "overfit_batches"):
            if getattr(session.context.cfg.debug, name) is not None:
                text = f"cfg.debug.{name} has no effect: the loop reads no training loader of self.generate_loaders"
                session.reporter.notice(f"{text}; cfg.max_steps limits any loop")
        if session.replicated and replicas.has_unsharded_data():
            text = "every worker trains on all rows of its own DataLoader; give each worker a part of them with "
            text += "ray.train.torch.prepare_data_loader, or read them with self.generate_loaders"
            session.reporter.warn(text)
