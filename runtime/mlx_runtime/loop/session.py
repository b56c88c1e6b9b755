"""`Session`: one worker's part of a run, and the only place that defines the order of a step, a pass and an epoch.

The loop belongs to user code. The session acts when a loader is iterated, when a batch is yielded, when the loop has
finished a step and asks for the next batch, and when user code calls a method of `BaseModule`. It defines the order of
actions; other modules implement them:

    `passes`              which pass is current, and whether it trains
    `optimization`        gradients and updates
    `metric_recording`    metrics of a pass, over all workers
    `reporting`           numbers of an epoch, and events for the driver
    `checkpointer`        the content of checkpoints
    `stopping`            the step at which all workers stop
    `own_steps`           steps of a loop that reads no training loader
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from mlx_runtime.data.batches import Batch
from mlx_runtime.data.loaders import Loader, trains
from mlx_runtime.data.sampling import WorkerPass
from mlx_runtime.distributed.collectives import agree
from mlx_runtime.distributed.randomness import set_seed
from mlx_runtime.distributed.wrapping import is_sharded, whole
from mlx_runtime.errors import MlxError
from mlx_runtime.loop.checkpointer import Checkpointer
from mlx_runtime.loop.context import RunContext, params_of
from mlx_runtime.loop.job import Sink
from mlx_runtime.loop.metric_recording import MetricRecorder
from mlx_runtime.loop.optimization import Optimization, prepare_models
from mlx_runtime.loop.passes import Pass, PassTracker
from mlx_runtime.loop.reporting import Reporter
from mlx_runtime.loop.stopping import LoopStopped, StopPoll
from mlx_runtime.tracking.callbacks import hooks_in_workers
from mlx_runtime.tracking.trackers import ReportWriter

if TYPE_CHECKING:
    from mlx_runtime.loop.own_steps import OwnSteps
    from mlx_runtime.loop.strategies import DDP


class Session:
    """One worker's part of a run. Every worker must construct it; only rank 0 has `tracking`.

    `hooks` are objects like callbacks, by name.
    """

    def __init__(
        self,
        context: RunContext,
        strategy: "DDP",
        sink: Sink,
        tracking: ReportWriter | None = None,
        hooks: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.context, self.progress, self.send = context, context.progress, sink.send
        self.progress.epoch = context.cfg.start_epoch
        self.passes = PassTracker(training=not context.evaluates)
        self.reporter = Reporter(context, sink, tracking)
        self.metrics = MetricRecorder(context, self.reporter)
        self.optimization = Optimization(context, self.reporter, strategy)
        self.checkpoints = Checkpointer(context, self.reporter, self.optimization)
        topology, least, notice = context.topology, context.cfg.elastic.min_workers, self.reporter.notice
        self.stopping = StopPoll(
            topology,
            sink.stop_asked,
            preempted=context.preempted,
            resumable_by_fewer=least is not None and least < topology.world_size,
            notice=notice,
        )
        self._call = hooks_in_workers(context.cfg.callbacks | hooks, context.groups.experiment, notice)
        self.replicated = topology.data_parallel_size == topology.world_size > 1  # the models of all workers are equal
        self.counts_updates: bool | None = None  # as steps, because no loader reads a training set; None is unknown
        self.beat: Callable[[], None] = lambda: None  # called at each sign of progress
        self.step_done: Callable[[int], None] = lambda number: None  # called with the global step after training steps
        self.waits: Callable[[], bool] = lambda: False  # called when a checkpoint or a stop is due: must it wait?
        self.before_save: Callable[[], None] = lambda: None
        self.turned_to: Callable[[int], None] = lambda number: None  # a leading training pass; -1 before the loop
        self._without_update: Pass | None = None  # the last training pass, until an optimizer updates the models
        self._own_steps: OwnSteps | None = None  # once needed
        self._begins_at: tuple[int, int] | None = None  # epoch and global step, until the loop has trained
        self._compared = False  # the models and tools of all workers

    # -- the run

    def begin(self) -> None:
        """Move everything to the device, and restore a checkpoint if there is one."""
        cfg, topology, groups = self.context.cfg, self.context.topology, self.context.groups
        self.metrics.check()
        self.checkpoints.check()
        spread = topology.model_parallel_size > 1  # then the strategy has moved the parts of the models
        for group in ("losses", "metrics") if spread else ("models", "losses", "metrics"):
            for member in groups.members(group).values():
                if isinstance(member, nn.Module) and not is_sharded(member):  # metrics are modules, too
                    member.to(topology.device)
        prepare_models(groups.members("models").values(), cfg, topology.device)
        set_seed(cfg.seed + topology.data_parallel_rank)  # models are equal, but dropout differs by replica
        if self.checkpoints.restore() is not None:
            agree([True], topology.device)  # nothing is recorded before all workers have restored
        else:
            self.reporter.begin()
        self.turned_to(-1)
        self._begins_at = cfg.start_epoch, self.progress.global_step

    def end(self) -> dict[str, float]:
        """Finish a run whose loop has returned or was stopped. Return the last value of every recorded number."""
        self.reporter.begin()
        if not self.stopping.stopped:  # otherwise, a restart may resume an interrupted pass
            self._warn_of_missing_update()
            self.metrics.flush()
            self.end_epoch()
            self._explain_end()
        self.checkpoints.wait()
        return self.reporter.latest

    def _explain_end(self) -> None:
        """Explain a resumed run that has trained nothing, although epochs are left."""
        cfg, trained = self.context.cfg, self._begins_at is None or self.progress.global_step > self._begins_at[1]
        is_left = 0 < cfg.start_epoch < cfg.num_epochs and self.context.steps_left != 0
        if is_left and not trained and not self.context.evaluates:
            self.reporter.notice(
                f"worker_loop returned at epoch {cfg.start_epoch} of {cfg.num_epochs} without training. If early "
                "stopping ended the run, also raise its patience, e.g. tools.early_stopping.patience=20"
            )

    # -- a pass over a loader, and its steps

    def watch(self, loader: Loader) -> Loader:
        """Follow a loader. Return the existing one if it reads the same dataset in the same way."""
        name = loader.shard.name
        known = self.checkpoints.loaders.get(name)
        if known is not None and known.asked == loader.asked:
            return known
        if known is not None:
            loader.epoch = known.epoch
        elif name in self.checkpoints.positions:
            loader.load_state_dict(self.checkpoints.positions[name])
        loader.observer, self.counts_updates = self, None
        self.checkpoints.loaders[name] = loader
        return loader

    def loader_iterated(self, loader: Loader) -> None:
        self.passes.iterate(loader.shard.name)

    def advances(self, loader: Loader) -> bool:
        """Return False if the pass that begins reads a training dataset, but does not train."""
        if loader.shard.training:
            self._require_gradients(loader)
        return self.passes.trains or not loader.shard.training

    def _require_gradients(self, loader: Loader) -> None:
        """Raise an MlxError if a batch of a training dataset is requested under `torch.no_grad()`, unless declared."""
        if self.passes.trains and not torch.is_grad_enabled():
            raise MlxError(
                f"a batch of datasets.{loader.shard.name}, a training set, was requested with gradients disabled. If "
                'this does not train, read it inside `with self.stage("probe"):` or `with self.evaluation():`; if it '
                "does, request the batch outside of torch.no_grad()"
            )

    def pass_begins(self, loader: Loader, part: WorkerPass) -> Pass:
        """Record the remaining metrics of the previous pass, and restore the state of an interrupted one."""
        shard, between_epochs = loader.shard, self.passes.training is None
        known = {"steps": part.plan.steps, "accumulate": loader.accumulate, "loader": loader, "part": part}
        item = self.passes.begin(shard.name, training=shard.training, step=part.skip, **known)
        leads = self.passes.leads(item)
        self._warn_of_missing_update()
        self.metrics.begin(item)
        if leads:
            self.metrics.flush()
            if item.training or self.passes.around is None:
                self.optimization.begin_pass()
        if loader.current is part:  # it advances
            self.checkpoints.resume(shard.name)
        self.reporter.begin()
        self.reporter.pass_begun(loader)
        if leads and item.training:
            self._begin_training(item, between_epochs=between_epochs)
        elif leads:
            self._call("on_evaluate_start", item.name)
        return item

    def _begin_training(self, item: Pass, *, between_epochs: bool) -> None:
        """Begin a training pass that leads, unless the run is at `cfg.max_steps`."""
        if self.context.steps_left == 0:
            self._finish(item, finished=between_epochs)
        if self.optimization.expected:
            self._without_update = item
        epoch = self.progress.epoch if self.progress.interrupted else item.loader.epoch - 1
        self.context.plan_epochs(epoch, item.updates_left, item.loader.updates)

    def batch_given(self, item: Pass, batch: Batch) -> None:
        """Begin a step."""
        self.beat()
        if not self.passes.batch(item, item.part.taken):
            return  # read alongside the pass that leads
        if item.training:
            self.optimization.forget_calls()
            if item.part.given == 1:
                self.begin_epoch(item.loader.epoch - 1)
                self.turned_to(item.loader.epoch - 1)
            self.optimization.begin_step(item.part, item.accumulate)
            self.progress.global_step += self.optimization.accumulation.first
        self.reporter.step(item, self.metrics.values(item))
        self._call("on_batch_start", item.name, batch)

    def step_finished(self, item: Pass, batch: Batch) -> None:
        """Record, save and stop; the last two only between two updates, when all workers are at the same step."""
        self.beat()
        if item.training and not item.finished:
            self._require_gradients(item.loader)
        if not self.passes.leads(item):
            return
        self._call("on_batch_end", item.name, batch)
        self.metrics.step_finished(item, self.stopping.interval)
        if item.finished:
            self._end_pass(item)
        if item.training:
            self.training_step_done()
        if not item.training or item.finished:
            return  # after the last step of training, evaluation follows, and then the checkpoint of the epoch
        self.poll_stop()
        if self.optimization.step_completed_update():
            self.save_or_stop(item)

    def training_step_done(self) -> None:
        self.step_done(self.progress.global_step)
        self._request_due_checkpoint()

    def _request_due_checkpoint(self) -> None:
        """Request the checkpoint that is due after a step, unless the loop has saved one."""
        step, every = self.progress.global_step, self.context.cfg.checkpoint_every_steps
        if every is None or step % every or step == self.checkpoints.step:
            return
        if self.optimization.accumulation.last and not self.optimization.skipped:
            self.checkpoints.requested = True

    def poll_stop(self) -> None:
        if self.stopping.step():
            self.checkpoints.requested = True

    def save_or_stop(self, item: Pass | None) -> None:
        """Between two steps, save a checkpoint if one is due, and leave the loop at `cfg.max_steps` or on a request."""
        due = (self.checkpoints.requested or self.stopping.agreed) and not self.waits()
        if due:
            self._store(self.progress.epoch, finished=False)
        if self.context.steps_left == 0:
            self._finish(item, finished=False)
        if due and self.stopping.agreed:
            self.stop()

    def pass_left(self, item: Pass) -> None:
        if item.active:
            if item.training and self.passes.leads(item):
                self._request_due_checkpoint()
            self._end_pass(item)

    def _end_pass(self, item: Pass) -> None:
        if self.passes.leads(item) and not item.training:
            self._call("on_evaluate_end", item.name)
        self.passes.end(item)

    # -- updates

    def update_begins(self, optimizer: Optimizer | None = None) -> None:
        """Note a sign of training: an optimizer is about to step, or the loop calls `self.backward`."""
        leading, own = self.passes.leading, self.own_steps
        loader = leading.loader if leading is not None and leading.training and self.replicated else None
        compares = loader is not None and not loader.compared
        if not compares and self._without_update is None and own is None:
            return
        if not (optimizer is None or (own is not None and own.know(optimizer)) or self._updates_models(optimizer)):
            return
        if loader is not None and compares:
            loader.compare_rows()  # here, because all workers train together
        if own is not None:
            self.checkpoints.resume(None)
        if optimizer is not None:
            self._without_update = None
            if own is not None:
                own.begin_update(optimizer)

    def update_finished(self, optimizer: Optimizer) -> None:
        """Note that an optimizer has stepped."""
        self.beat()
        self.optimization.after_update()
        self._call("on_update", optimizer)

    def optimizer_step(self, name: str | None) -> bool:
        """Step an optimizer of the experiment; see `BaseModule.optimizer_step`."""
        self._without_update = None  # also if fp16 skips the step
        before = self.optimization.skipped
        stepped = self.optimization.step(name)
        if self.optimization.knows_steps:  # otherwise, only steps that were taken have been counted
            self.progress.global_step += before - self.optimization.skipped
        return stepped

    def _updates_models(self, optimizer: Optimizer) -> bool:
        """Return False if an optimizer updates none of the experiment's models, but for example a probe."""
        models = self.context.groups.modules
        own = {id(item) for model in models for item in model.parameters()}
        return not models or any(id(item) in own for item in params_of(optimizer))

    def _warn_of_missing_update(self) -> None:
        """Warn about a training pass that has ended without an update of the models."""
        item = self._without_update
        if item is None or item.active:
            return
        self._without_update = None
        if item.part.given:
            self.reporter.notice(
                f"no optimizer updated a model in a pass over {item.dataset}, which counts as training; call "
                "self.optimizer_step() after self.backward(loss), or, if it does not train, read it inside "
                '`with self.stage("probe"):`'
            )

    @property
    def own_steps(self) -> "OwnSteps | None":
        """The steps of a loop that trains on its own data, or on none; None for other loops, and in passes."""
        if self.passes.leading is not None or not self.passes.trains:
            return None
        if self.counts_updates is None:
            self.counts_updates = not any(loader.shard.training for loader in self.checkpoints.loaders.values())
        if self.counts_updates and self._own_steps is None:
            from mlx_runtime.loop.own_steps import OwnSteps  # here, because most loops read a loader

            self._own_steps = OwnSteps(self)
        return self._own_steps if self.counts_updates else None

    # -- epochs

    def begin_epoch(self, epoch: int) -> None:
        if not self.progress.interrupted:
            self.end_epoch()
            self.progress.epoch = epoch
        if self.context.topology.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.context.topology.device)
        self.progress.interrupted = False

    def _turn_to(self, epoch: int) -> None:
        """Note the epoch of the loop, and in a loop that reads no loader, end the previous one."""
        if self._begins_at is not None and self.progress.global_step > self._begins_at[1]:
            (expected, _), self._begins_at = self._begins_at, None
            if epoch != expected and self.context.cfg.num_epochs > 0:  # 0: a training function counts them
                self.reporter.notice(
                    f"the loop begins with epoch {epoch}, not with cfg.start_epoch={expected}; epochs count from 0: "
                    "write range(cfg.start_epoch, cfg.num_epochs)"
                )
        if epoch != self.progress.epoch and (own := self.own_steps) is not None:
            own.end_epoch()
            self.begin_epoch(epoch)

    def end_epoch(self, values: Mapping[str, float] | None = None, epoch: int | None = None) -> None:
        for name, loss in self.context.groups.members("losses").items():
            if getattr(loss, "grows", False):
                cure = 'if it returns the sum over a batch, pass reduction="sum" to losses.Mean, and bind again'
                text = f"values of losses.{name} grow with the number of rows; {cure}"
                self.reporter.warn(text)
        self.metrics.receive()
        self.reporter.end_epoch(values or {}, epoch)

    # -- called by user code

    def save(self, groups: tuple[str, ...], batch_idx: int, epoch: int, name: str | None) -> None:
        """Record metrics of the current pass; see `BaseModule.save_metrics_and_losses`."""
        self.beat()
        item = self.passes.to_record(name, evaluation=name is not None and not trains(name))
        self.metrics.turn_to(item)
        if item.training:
            self._turn_to(epoch)
        self.progress.epoch = epoch
        if item.loader is None:  # the loop counts from 0, even after a restart
            if item.training and batch_idx + 1 != item.step:
                own = self.own_steps
                if own is None:
                    self.progress.global_step += 1
                elif not own.are_updates:
                    own.begin()
            item.step = batch_idx + 1
        self.metrics.save(item, groups)

    def before_reset(self) -> None:
        """Record metrics that are about to be reset."""
        self.metrics.before_reset(self.passes.around)
        self.passes.close()

    def log(self, values: Mapping[str, float | torch.Tensor], epoch: int | None = None) -> None:
        """Record numbers that user code logged, with the values of rank 0."""
        if epoch is not None:
            self._turn_to(epoch)
        values = {name: whole(item) for name, item in values.items()}  # on every worker
        if values and self.context.topology.writes:
            plain = {name: item.detach() if isinstance(item, torch.Tensor) else item for name, item in values.items()}
            numbers = {name: float(item) for name, item in plain.items()}
            self.reporter.log(numbers, self.progress.epoch if epoch is None else epoch)

    @contextmanager
    def stage(self, name: str | None) -> Iterator[None]:
        """Give the same name to all passes in a block; None for an evaluation, with the buffers of rank 0."""
        self.metrics.flush()
        if name is None:
            self._sync_buffers()
        with self.passes.scope(name) as scope:
            yield
            self.metrics.flush()
            for item in reversed(scope.stack):
                self._end_pass(item)

    def every(self, steps: int | None) -> bool:
        """Return True if the current training step completes a multiple of `steps`; see `BaseModule.every`."""
        if steps is None:
            return False
        if steps < 1:
            raise MlxError(f"self.every({steps}) needs a number of steps, 1 or more, or None for never")
        own = self.own_steps
        trains = self.passes.in_training_step(otherwise=own is not None and own.are_updates)
        counts = trains and self.optimization.accumulation.last and not self.optimization.skipped
        return counts and self.progress.global_step % steps == 0

    # -- checkpoints, and leaving the loop

    def save_checkpoint(self, epoch: int, metrics: Mapping[str, float]) -> None:
        """Save a checkpoint, now or once the current update is complete; see `BaseModule.save_checkpoint`."""
        self.beat()
        epoch = int(epoch)  # it may be a NumPy number
        own = self.own_steps
        if own is not None:
            self.checkpoints.check_resumed()
            own.end_epoch()
            self.progress.epoch = epoch
        self.metrics.flush()
        self.passes.close()
        self.log(metrics, epoch)
        interrupted = self.passes.training
        finished = interrupted is None
        if interrupted is not None:
            self.metrics.restore(interrupted)
            if not self.optimization.accumulation.last:
                self.checkpoints.requested = True  # gradients are not part of checkpoints
                return
        in_last_step = finished and self.passes.around is not None  # the epoch may continue
        if finished and not in_last_step:
            self.end_epoch(epoch=None if own is None else epoch)
            self.reporter.check_monitor(epoch)
            self._warn_of_differences()
        self._store(epoch, finished=finished)
        if own is not None:
            self.progress.epoch = epoch + 1
            if self.context.steps_left == 0:
                self._finish(None, finished=True)
        if not in_last_step and self.stopping.vote():
            self.stop()

    def _sync_buffers(self) -> None:
        """Give all workers the buffers of rank 0, which are those that a checkpoint contains."""
        if self.replicated:
            from mlx_runtime.loop import replicas  # one worker does without

            replicas.sync_buffers(self.context.groups)

    def _warn_of_differences(self) -> None:
        """Warn, once, about models and tools that differ between workers."""
        if self.replicated and not self._compared:
            from mlx_runtime.loop import replicas

            self._compared = True
            for text in replicas.differences(self.context.groups):
                self.reporter.warn(text)

    def _store(self, epoch: int, *, finished: bool) -> None:
        self.reporter.begin()
        self.metrics.receive()
        self.before_save()
        self._sync_buffers()
        self.checkpoints.save(epoch, finished=finished)

    def _finish(self, item: Pass | None, *, finished: bool) -> NoReturn:
        """Leave the loop at `cfg.max_steps`, at a point from which a run with a higher limit can continue."""
        step = self.progress.global_step
        self.reporter.notice(f"finished  step {step:,} of cfg.max_steps={self.context.cfg.max_steps}")
        if self.checkpoints.step != step:
            self._store(self.progress.epoch, finished=finished)
        if item is not None:
            self._end_pass(item)
        raise LoopStopped

    def stop(self) -> NoReturn:
        """Leave the loop, as all workers have agreed."""
        self.stopping.stopped = True
        self.checkpoints.wait()
        raise LoopStopped
