"""`BaseModule`: the base class of experiments, with all methods that user code calls during training."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, overload

import torch
from torch import nn

from mlx_runtime.data.batches import Batch
from mlx_runtime.data.loaders import DatasetShard, DatasetShards, Loader
from mlx_runtime.errors import MlxError
from mlx_runtime.loop.context import GROUPS
from mlx_runtime.loop.session import Session
from mlx_runtime.runs.checkpoints.groups import members
from mlx_runtime.runs.metric_states import is_metric


def attach(experiment: "BaseModule", session: Session) -> None:
    """Let the methods of an experiment use a session."""
    experiment._run = session


class BaseModule:
    """An experiment: groups of objects built from conf.yaml, and the loop that trains them.

    Inherit, name the groups, and write `worker_loop`, which every worker runs:

        class Experiment(BaseModule):
            cfg: TrainConfig
            datasets: Datasets
            models: Models
            optimizers: Optimizers
            losses: Losses
            metrics: Metrics
            tools: Tools

            def worker_loop(self, dataset_shards): ...

    An `__init__` that passes the groups to `super().__init__` works as well. When the loop runs, models are on the
    worker's device, and optimizers have their parameters.
    """

    library = "torch"  # of the models
    cfg: Any
    datasets: Any
    models: Any
    optimizers: Any
    losses: Any
    metrics: Any
    tools: Any

    def __init__(self, **groups: Any) -> None:
        for name in GROUPS:
            setattr(self, name, groups.pop(name, None))
        if groups:
            raise TypeError(f"BaseModule has no group {', '.join(map(repr, groups))}")
        self._run: Session | None = None

    @property
    def _session(self) -> Session:
        if self._run is None:
            raise MlxError("this method works inside worker_loop, during a run")
        return self._run

    # -- written by the user

    def worker_loop(self, dataset_shards: DatasetShards) -> None:
        """Train. Every worker runs this with its own shards.

        Args:
            dataset_shards: one shard per dataset, by the names of `Datasets`.
        """
        raise NotImplementedError(f"{type(self).__name__} needs a worker_loop(self, dataset_shards)")

    def eval_loop(self, dataset_shards: DatasetShards) -> None:
        """Evaluate a restored checkpoint without training. Every worker runs this for `mlx train eval`.

        Recorded values are stored in the folder of the checkpoint's run.

        Args:
            dataset_shards: the same as for `worker_loop`.
        """
        raise NotImplementedError(f"{type(self).__name__} needs an eval_loop(self, dataset_shards)")

    def predict(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Return the outputs for a batch. Optional; predictions, exports and servers of a run call it.

        It is called outside of a run, with models in eval mode, without gradients. Use `self.models`, `self.tools` and
        `self.cfg`, and only those columns that are known before the answer: no labels.

        Args:
            batch: what a loader yields, `{name: tensor (rows, ...)}`.

        Returns:
            Outputs by name, (rows, ...), like `{"label": logits.argmax(1)}`.
        """
        raise NotImplementedError(f"{type(self).__name__} needs a predict(self, batch)")

    def _answer(self, batch: Batch) -> Any:
        """Call `predict` with tensors, for tensors, whatever the library of the models is."""
        return self.predict(batch)

    # -- called by the user

    @overload
    def generate_loaders(self, dataset_shards: DatasetShards) -> list[Loader]: ...

    @overload
    def generate_loaders(self, dataset_shards: DatasetShard) -> Loader: ...

    def generate_loaders(self, dataset_shards: DatasetShards | DatasetShard) -> list[Loader] | Loader:
        """Return one loader per dataset, in the order of `Datasets`. Every worker must call this.

        With a single dataset, unpack the list, `(train,) = self.generate_loaders(dataset_shards)`, or pass its shard,
        `train = self.generate_loaders(dataset_shards.train)`.

        A dataset is constructed when its loader is first read or `len()` is called, so an unused one costs nothing.

        Returns:
            Re-iterable loaders of `{name: tensor (batch_size, ...)}` on the worker's device; `len()` is in steps.
            Anything else in a batch, like a list of strings, stays on the host.
        """
        if isinstance(dataset_shards, DatasetShard):
            return self._session.watch(dataset_shards.iter_torch_batches())
        return [self._session.watch(shard.iter_torch_batches()) for shard in dataset_shards]

    def backward(
        self,
        loss: torch.Tensor,
        *,
        weight: float | torch.Tensor | None = None,
        optimizer: str | None = None,
        **options: Any,
    ) -> None:
        """Call `loss.backward()`, with `cfg.precision` and `cfg.accumulate_grad_batches`. Every worker must call this.

        The gradient of an update is the mean over the rows of all workers and steps, as for one large batch, even if
        batches differ in size. Losses of the same step add up.

        Args:
            loss: loss of this step, (): a mean over the rows of the batch, or over the elements counted by `weight`.
            weight: for a loss that is not a mean over rows, the number of its target tokens or the sum of its weights;
                () or a number, 0 or more. None means the number of rows in the batch of the leading training loader.
            optimizer: name in `Optimizers` of the only optimizer whose parameters get gradients. For a loss that passes
                through models of other optimizers, like the loss of a generator through its discriminator.
            options: keyword arguments of `torch.Tensor.backward`, like `retain_graph=True`.

        Raises:
            MlxError: gradients should be accumulated, but the loop does not read a loader of `generate_loaders`;
                the weight is not a number, or less than 0; or there is no such optimizer.
        """
        self._session.update_begins()
        self._session.optimization.backward(loss, weight=weight, optimizer=optimizer, **options)

    def optimizer_step(self, name: str | None = None) -> bool:
        """Clip the gradients, step and zero them, at the last step of an update. Every worker must call this.

        With `cfg.precision=fp16`, a step with gradients that are not finite is skipped, and the loss scale is reduced.

        Args:
            name: name of the optimizer in `Optimizers`; may be left out if there is only one.

        Returns:
            True if the optimizer has stepped, at the last step of an update; the same on every worker. Step schedulers
                only then.

        Raises:
            MlxError: there is no such optimizer, or the loop has not called `backward`.
        """
        return self._session.optimizer_step(name)

    def save_metrics_and_losses(self, batch_idx: int, epoch: int, stage: str | None = None) -> None:
        """Record metrics and losses. Every worker must call this, after each batch; most calls cost nothing.

        Values cover all rows of all workers since `reset_all_metrics_and_losses`. They are computed every
        `cfg.log_every_steps` training steps and at the last batch of a pass; metrics that keep every row, like AUROC,
        only at the last batch. If the loop leaves a pass early, or reads its own data, they are recorded when another
        pass begins, when metrics are reset, with the next checkpoint, or at the end.

        Args:
            batch_idx: index of this batch in the pass, from 0.
            epoch: epoch, as counted by the loop.
            stage: first part of the names, like `val` in `val/accuracy`; None for the name of the dataset being read,
                or of `self.stage`.

        Raises:
            MlxError: some workers have not called this since the last record.
        """
        self._session.save(("losses", "metrics"), batch_idx, epoch, stage)

    def save_metrics(self, batch_idx: int, epoch: int, stage: str | None = None) -> None:
        """Record the metrics only; see `save_metrics_and_losses`."""
        self._session.save(("metrics",), batch_idx, epoch, stage)

    def save_losses(self, batch_idx: int, epoch: int, stage: str | None = None) -> None:
        """Record the losses only; see `save_metrics_and_losses`."""
        self._session.save(("losses",), batch_idx, epoch, stage)

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Set the name under which a `with` block records, whatever it reads. Every worker must enter it.

        Nothing in the block trains: steps are not counted, and a training dataset that it reads keeps its order and
        position for later training.

        Args:
            name: first part of the names, like `probe` in `probe/accuracy`.
        """
        return self._session.stage(name)

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Evaluate in a `with` block: metrics and losses reset, gradients disabled, all `self.models` in eval mode.

        Every worker must enter it, because all of them get the buffers of rank 0. At the end, each part of a model
        returns to its previous mode, so that one block is enough for an evaluation within an epoch:

            with self.evaluation():
                for batch_idx, batch in enumerate(val):
                    self.metrics.accuracy.update(self.models.net(batch["image"]), batch["label"])
                    self.save_metrics_and_losses(batch_idx, epoch)
        """
        models = members(self.models, nn.Module).values()
        modes = {part: part.training for model in models for part in model.modules()}
        self.reset_all_metrics_and_losses()
        for model in models:
            model.eval()
        try:
            outside = contextlib.nullcontext()
            with torch.no_grad(), self._run.stage(None) if self._run is not None else outside:
                yield
        finally:
            for part, mode in modes.items():
                part.training = mode

    def log(self, values: Mapping[str, float | torch.Tensor], epoch: int | None = None) -> None:
        """Record your own numbers. Only the values of rank 0 are used; workers are not synchronized.

        The last value of each number appears in the line of the epoch and in the table at the end; `cfg.monitor` may
        name one.

        Args:
            values: numbers, or tensors of one element, by name, like `{"gan/penalty": 0.3}`.
            epoch: epoch, as counted by the loop; None for the current one, which begins with a pass over a loader, or
                after a checkpoint. If it is given, every worker must call this.
        """
        self._session.log(values, epoch)

    @property
    def tensorboard(self) -> Any:
        """Torch's `SummaryWriter` of the run, for images, histograms, text and graphs.

        On workers other than rank 0, and in runs without TensorBoard, an object whose methods do nothing.
        """
        reporter = self._session.reporter
        reporter.begin()
        return (reporter.tracking.tensorboard if reporter.tracking is not None else None) or _NoWriter()

    def reset_all_metrics_and_losses(self) -> None:
        """Reset metrics and losses. Call it before each pass."""
        if self._run is not None:
            self._run.before_reset()
        for group in (self.losses, self.metrics):
            for metric in members(group).values():
                if is_metric(metric):
                    metric.reset()

    def save_checkpoint(self, epoch: int, metrics: Mapping[str, float] | None = None) -> None:
        """Save everything that changes during training. Every worker must call this, last in an epoch.

        The checkpoint is stored in the background. In the middle of a pass, it includes the position in that pass.
        Tools are saved from rank 0 for all workers.

        Args:
            epoch: the epoch that has just ended; a restart begins with the next one.
            metrics: numbers to record, as with `log`. `cfg.monitor` may name one of these or any other recorded number.

        Raises:
            StorageError: the previous checkpoint could not be written.
        """
        self._session.save_checkpoint(epoch, metrics or {})

    def restore_checkpoint(self) -> int | None:
        """Restore the run's latest checkpoint, or the one at `cfg.restore_checkpoint_path`, and set `cfg.start_epoch`.

        The runtime calls this before `worker_loop` begins. Objects that `worker_loop` creates, like a scheduler, are
        restored when the first pass begins; in a loop without a loader, at the first update, or when the loop calls
        this. Every worker must call this.

        Returns:
            The epoch of the checkpoint, or None if there is nothing to restore.

        Raises:
            ConfigError: the checkpoint is damaged, or does not fit the config.
        """
        return self._session.checkpoints.restore()

    def every(self, steps: int | None) -> bool:
        """Return True if this training step completes a multiple of `steps`, counted like `global_step`.

        For use within a training step, after the update:

            if self.every(self.cfg.evaluate_every_steps):
                self.evaluate(val, epoch)

        Returns:
            True in the step that completes a multiple (with accumulation, the last one of the update), on every worker.
                False outside training steps, within a nested evaluation, and if `steps` is None. The same in a resumed
                run.

        Raises:
            MlxError: `steps` is less than 1.
        """
        return self._session.every(steps)

    @property
    def global_step(self) -> int:
        """Training steps taken in all epochs so far, the x axis in TensorBoard."""
        return self._session.progress.global_step


class _NoWriter:
    """Replaces a writer if nothing should be written."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None
