"""`BaseModule`: what an experiment inherits, and everything that user code calls while it trains."""

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any, overload

import torch
from torch import nn
from torch.optim import Optimizer
from torchmetrics import Metric, MetricCollection

from mlx_runtime import checkpoints, parallel, resuming
from mlx_runtime.accumulation import Accumulation
from mlx_runtime.checkpoints import Checkpoints, Saver, State
from mlx_runtime.datasets import DatasetShard, DatasetShards, Loader, trains
from mlx_runtime.errors import MlxError, near
from mlx_runtime.gradients import Gradients
from mlx_runtime.layout import RunFolder
from mlx_runtime.loading import build
from mlx_runtime.parallel import Vote, Worker, agree
from mlx_runtime.progress import Sink
from mlx_runtime.redaction import filled, hidden_texts
from mlx_runtime.reduction import Exchange, Known, Message, States, numbers, packed
from mlx_runtime.sampling import mixed
from mlx_runtime.saved import Checkpoint
from mlx_runtime.stepping import Stepping, compile_model, in_half_precision, share_gradients
from mlx_runtime.tracking import Tracking

BOUND_BY_INPUT_PCT = 20
"""Of an epoch's time spent waiting for data, above which a line tells how to read faster, if it took a second."""

SECONDS_PER_EVENT = 0.1
"""The shortest time between two progress events of a worker."""

GROUPS = ("cfg", "datasets", "models", "optimizers", "losses", "metrics", "tools")

VOTES_PER_NOTICE = 10
"""Votes on stopping between two questions whether a node goes away, which cost all workers a few milliseconds."""

SAVED = ("models", "optimizers", "tools", "own")
"""What checkpoints hold once, of rank 0; `own` is what `worker_loop` has put on the experiment itself."""

PER_RANK = ("metrics", "losses")
"""What they hold of every rank."""


class LoopStopped(BaseException):
    """Leaves `worker_loop` once a checkpoint was saved because someone asked the run to stop."""


@dataclass
class WorkerRun:
    """A run as one worker takes part in it; the trainer makes it and hands it to the experiment.

    Attributes:
        folder: of the run.
        worker: place in the group.
        tree: conf.yaml of the run, resolved.
        sink: takes progress events; None except on rank 0.
        tracking: takes numbers; None except on rank 0.
        forwarded: whether the driver wants the numbers as well.
        allowed: raises when this run was taken over by another driver.
        stop_asked: whether this worker was asked to end the run.
        preemptible: whether the cluster may give notice that a node goes away.
        evaluates: a checkpoint is evaluated; nothing is trained.
        shown: `tree` without secrets.
        beat: called at each step.
        step_done: called with the global step after each training step.
    """

    folder: RunFolder
    worker: Worker
    tree: Mapping[str, Any]
    sink: Sink | None = None
    tracking: Tracking | None = None
    forwarded: bool = False
    allowed: Callable[[], None] = lambda: None
    stop_asked: Callable[[], bool] = lambda: False
    preemptible: bool = False
    evaluates: bool = False
    shown: Mapping[str, Any] = field(default_factory=dict)
    beat: Callable[[], None] = lambda: None
    step_done: Callable[[int], None] = lambda number: None
    vote: Vote | None = None
    votes: int = 0
    preempted: bool = False
    saver: Saver | None = None
    restored: State | None = None
    present: dict[str, set[str]] = field(default_factory=dict)
    rewound: tuple[Mapping[str, Any] | None, int] = (None, 0)
    begun: bool = False
    global_step: int = 0
    updates: int = 0
    updates_before: int = 0
    due: bool = False
    interrupted: bool = False
    stopping: bool = False
    accumulation: Accumulation = field(default_factory=Accumulation)
    stepping: Stepping = field(default_factory=Stepping)
    gradients: Gradients = field(default_factory=Gradients)
    counted: Loader | None = None
    exchange: Exchange = field(default_factory=Exchange)
    known: dict[str, Known] = field(default_factory=dict)
    sent: "Sent | None" = None
    stage: "Stage | None" = None
    own: "Stage | None" = None
    stage_name: str | None = None
    stages: "dict[str, Stage]" = field(default_factory=dict)
    logged: bool = False
    logged_names: set[str] = field(default_factory=set)
    loaders: dict[str, Loader] = field(default_factory=dict)
    places: dict[str, Any] = field(default_factory=dict)
    epoch: int = 0
    epoch_started: float = field(default_factory=time.monotonic)
    unreported: dict[str, float] = field(default_factory=dict)
    latest: dict[str, float] = field(default_factory=dict)
    input_rates: dict[str, float] = field(default_factory=dict)
    said: set[str] = field(default_factory=set)

    @cached_property
    def checkpoints(self) -> Checkpoints:
        """Where they are stored."""
        return Checkpoints(self.folder.checkpoints)

    def send(self, kind: str, **fields: Any) -> None:
        if self.sink is not None:
            self.sink.send({"kind": kind, **fields})

    def send_once(self, kind: str, **fields: Any) -> None:
        """Send an event unless the very same was sent before."""
        said = repr((kind, fields))
        if said not in self.said:
            self.said.add(said)
            self.send(kind, **fields)


@dataclass
class Stage:
    """A pass over a loader that is under way.

    Attributes:
        name: of the dataset, `train`, `val`, …, or the one that user code gave it.
        training: whether its steps count as global steps.
        step, steps: taken and in all.
        given: steps taken since the pass began here; fewer than `step` when it was interrupted before.
        loader: that is read; None when the loop reads one of its own.
        over: whether all of it was read.
        values: recorded in this pass.
        saved: groups that user code has saved in this pass.
        said: of these, since numbers were recorded last.
        states: of their metrics, taken when user code said so.
        sent_at, sent_step: when numbers were recorded last.
    """

    name: str
    training: bool
    steps: int
    loader: Loader | None = None
    step: int = 0
    given: int = 0
    started: float = field(default_factory=time.monotonic)
    last_event: float = 0.0
    over: bool = False
    values: dict[str, float] = field(default_factory=dict)
    saved: set[str] = field(default_factory=set)
    said: set[str] = field(default_factory=set)
    states: States = field(default_factory=dict)
    sent_at: float = field(default_factory=time.monotonic)
    sent_step: int = 0


@dataclass(frozen=True)
class Sent:
    """Numbers on their way: which stage of the loop they are of, and what is known of them already."""

    stage: Stage
    title: str
    last: bool
    step: int
    epoch: int
    rates: Mapping[str, float]


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

    An `__init__` that takes the groups and passes them to `super().__init__` works just as well. When it runs, on
    each worker, all objects are real: models are on the worker's device, optimizers hold their parameters.
    """

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
        self._run: WorkerRun | None = None

    # -- what the user writes --

    def worker_loop(self, dataset_shards: DatasetShards) -> None:
        """Train. Every worker runs this with its own shards.

        Args:
            dataset_shards: one shard per dataset, by the names of `Datasets`.
        """
        raise NotImplementedError(f"{type(self).__name__} needs a worker_loop(self, dataset_shards)")

    def eval_loop(self, dataset_shards: DatasetShards) -> None:
        """Evaluate what was restored, without training. Every worker runs this for `mlx train eval`.

        What is recorded here goes into the folder of the run that the checkpoint is of.

        Args:
            dataset_shards: as for `worker_loop`.
        """
        raise NotImplementedError(f"{type(self).__name__} needs an eval_loop(self, dataset_shards)")

    # -- what the user calls --

    @overload
    def generate_loaders(self, dataset_shards: DatasetShards) -> list[Loader]: ...

    @overload
    def generate_loaders(self, dataset_shards: DatasetShard) -> Loader: ...

    def generate_loaders(self, dataset_shards: DatasetShards | DatasetShard) -> list[Loader] | Loader:
        """One loader per dataset, in the order of `Datasets`. Every worker must call this.

        With a single dataset unpack the list, `(train,) = self.generate_loaders(dataset_shards)`, or ask for that one
        loader, `train = self.generate_loaders(dataset_shards.train)`.

        A dataset is made when its loader is first read or asked for its length, so one that is not used costs nothing.

        Returns:
            Re-iterable loaders of `{name: tensor (batch_size, ...)}` on the worker's device; `len()` is in steps. What
            is not a tensor, like a list of strings, stays on the host.
        """
        if isinstance(dataset_shards, DatasetShard):
            return self._watched(dataset_shards.iter_torch_batches())
        return [self._watched(shard.iter_torch_batches()) for shard in dataset_shards]

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """`loss.backward()` as `cfg.precision` and `cfg.accumulate_grad_batches` want it. Every worker must call this.

        Args:
            loss: of this step, a mean over its rows.
            options: of `torch.Tensor.backward`, like `retain_graph=True`.

        Raises:
            MlxError: gradients shall be accumulated, and the loop reads data of its own.
        """
        run = self._running()
        if run.counted is None and self.cfg.accumulate_grad_batches > 1:
            raise MlxError(
                "cfg.accumulate_grad_batches needs the loaders of self.generate_loaders, which know the last step of a "
                "pass; read one of them, or set it to 1"
            )
        run.stepping.backward(loss, self._optimizers().values(), **options)

    def optimizer_step(self, name: str | None = None) -> bool:
        """At the last step of an update clip the gradients, step, and zero them. Every worker must call this.

        With `cfg.precision=fp16` a step whose gradients are not finite is left out, and losses are scaled less then.

        Args:
            name: of the optimizer in `Optimizers`; may be left out when there is only one.

        Returns:
            Whether this was the last step of an update, the same on every worker: the moment for a scheduler's step.

        Raises:
            MlxError: there is no such optimizer, or the loop has not called `backward`.
        """
        run = self._running()
        optimizers = self._optimizers()
        if name is None and len(optimizers) == 1:
            name = next(iter(optimizers))
        if name is None:
            raise MlxError(f"self.optimizer_step() needs the name of an optimizer.{near('', optimizers)}")
        if name not in optimizers:
            raise MlxError(f"self.optimizer_step({name!r}): there is no such optimizer.{near(name, optimizers)}")
        done = run.stepping.step(optimizers[name])
        if done:
            self._updated()  # also when the scaler has left the step out
        return done

    def save_metrics_and_losses(self, batch_idx: int, epoch: int, stage: str | None = None) -> None:
        """Record metrics and losses. Every worker must call this, after each batch; most calls cost nothing.

        Values are over all workers, since `reset_all_metrics_and_losses`. They are taken every `cfg.log_every_steps`
        training steps and at the last batch of a pass; those of metrics that keep every row, like AUROC, only there.
        A pass over a loader that is not the runtime's ends when something else begins, or metrics are reset.

        Args:
            batch_idx: of this batch in the pass, from 0.
            epoch: as counted by the loop.
            stage: first part of their names, like `val` in `val/accuracy`; None means that of the dataset being read,
                or of `self.stage`.

        Raises:
            MlxError: not all workers have called it since the last time.
        """
        self._save(batch_idx, epoch, stage, "losses", "metrics")

    def save_metrics(self, batch_idx: int, epoch: int, stage: str | None = None) -> None:
        """Like `save_metrics_and_losses`, the metrics only."""
        self._save(batch_idx, epoch, stage, "metrics")

    def save_losses(self, batch_idx: int, epoch: int, stage: str | None = None) -> None:
        """Like `save_metrics_and_losses`, the losses only."""
        self._save(batch_idx, epoch, stage, "losses")

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Name what the block records, whatever it reads. Every worker must take part.

        Args:
            name: first part of the names. Steps of stages whose first word is `val`, `test`, `eval`, `dev` or `predict`
                do not count as training steps.
        """
        run = self._running()
        self._finish_own()
        before = run.stage, run.stage_name
        run.stage, run.stage_name = Stage(name, trains(name), steps=0), name
        try:
            yield
            self._finish_own()
            if not run.stage.over:
                self._finish(run.stage)
        finally:
            run.stage, run.stage_name = before

    def log(self, values: Mapping[str, float | torch.Tensor]) -> None:
        """Record numbers of your own, as rank 0 has them; no worker waits for another.

        The latest of each are part of the epoch's line, of the table at the end and of `cfg.monitor`'s choice.

        Args:
            values: like `{"gan/penalty": 0.3}`; each a number or a tensor of one element.
        """
        run = self._running()
        self._log(values, run.epoch)

    @property
    def tensorboard(self) -> Any:
        """Torch's `SummaryWriter` of the run, for images, histograms, text and graphs.

        On workers that do not write, and in runs without TensorBoard, an object whose methods do nothing.
        """
        run = self._running()
        self._begin_record()
        return (run.tracking.tensorboard if run.tracking is not None else None) or _Silent()

    def reset_all_metrics_and_losses(self) -> None:
        """Forget what metrics and losses have seen; call it before each pass."""
        self._finish_passes()
        for group in (self.losses, self.metrics):
            for metric in checkpoints.members(group).values():
                if isinstance(metric, Metric | MetricCollection):
                    metric.reset()

    def save_checkpoint(self, epoch: int, metrics: Mapping[str, float] | None = None) -> None:
        """Save everything that changes while it trains. Every worker must call this, as the last thing in an epoch.

        It is stored in the background. Called in the middle of a pass, it saves that place in it. Of tools, rank 0's
        are saved for all.

        Args:
            epoch: that has just ended; a restart begins with the next.
            metrics: numbers to record with it, as `log` does, and to judge it by, beside all others recorded.

        Raises:
            StorageError: the checkpoint before this one could not be written.
        """
        run = self._running()
        run.beat()
        self._finish_passes()
        self._log(metrics or {}, epoch)
        numbers = run.latest
        if self.cfg.monitor is not None and self.cfg.monitor not in numbers:
            text = f"cfg.monitor is {self.cfg.monitor!r}, which was not recorded; the newest checkpoints are kept"
            run.send_once("notice", text=f"{text}.{_choices(numbers)}")
        finished = not self._in_a_pass()
        if not finished and not run.accumulation.last:
            run.due = True  # once the update is complete: its gradients are not part of checkpoints
            return
        if finished:
            self._close_epoch()
        self._store(epoch, numbers, finished=finished)
        if run.vote is not None and run.vote.ask(run.stop_asked()):
            self._stop()

    def restore_checkpoint(self) -> int | None:
        """Load the run's latest checkpoint, or the one at `cfg.restore_checkpoint_path`, and set `cfg.start_epoch`.

        The runtime has done so before `worker_loop` begins, and does so for what `worker_loop` makes (a scheduler, a
        tool) when the first pass begins. Every worker must call it.

        Returns:
            The epoch of the checkpoint, or None when there is none to restore.

        Raises:
            ConfigError: the checkpoint is damaged or does not fit the config.
        """
        run = self._running()
        state = self._found_state()
        if state is None:
            return None
        run.restored = state
        for name in SAVED:
            self._load(name, state)
        self._set_group_values(state)
        run.present = {name: set(checkpoints.members(self._group(name))) for name in SAVED}
        self._load_rank(state)
        run.stepping.restore(state["scaler"])
        run.global_step = state["global_step"]
        run.latest, run.unreported = dict(state["numbers"]["latest"]), dict(state["numbers"]["unreported"])
        run.places = dict(state["loaders"])
        for name, loader in run.loaders.items():
            if name in run.places:
                loader.load_state_dict(run.places[name])
        self.cfg.start_epoch = run.epoch = state["epoch"] + state["finished"]
        if run.evaluates:  # only what is measured from here on counts
            run.restored, run.latest, run.unreported, run.places = None, {}, {}, {}
        elif self.cfg.start_epoch >= self.cfg.num_epochs:
            text = f"already at epoch {self.cfg.start_epoch} of {self.cfg.num_epochs}; raise cfg.num_epochs to train on"
            run.send_once("notice", text=text)
        return int(state["epoch"])

    @property
    def global_step(self) -> int:
        """Training steps taken in all epochs so far, the x axis in TensorBoard."""
        return self._running().global_step

    # -- what the trainer calls --

    def _begin(self, run: WorkerRun) -> None:
        """Take part in a run: put everything on the device and continue from a checkpoint."""
        self._run = run
        run.epoch = self.cfg.start_epoch
        for group in (self.models, self.losses, self.metrics):
            for member in checkpoints.members(group).values():
                if isinstance(member, nn.Module):  # metrics are modules too
                    member.to(run.worker.device)
        self._prepare_stepping()
        self._watch_gradients()
        run.vote = Vote(run.worker)
        if run.worker.writes:
            run.checkpoints.clean()
            run.saver = Saver(run.checkpoints, self._stored, run.allowed)
        parallel.seed_everything(self.cfg.seed + run.worker.rank)  # models began alike; dropout must differ by rank
        if self.restore_checkpoint() is None:
            self._begin_record()
        else:
            parallel.agree([True], run.worker.device)  # nothing is recorded before all workers have restored

    def _begin_record(self) -> None:
        """Let the record be that of this attempt; once, when all is restored and something is about to be recorded.

        Until then everything on disk is as the run before has left it, and stays so if `worker_loop` fails.
        """
        run = self._running()
        if run.begun or not run.worker.writes:
            return
        run.begun = True
        run.checkpoints.set_damaged_aside()
        if run.tracking is not None:
            run.tracking.rewind(*run.rewound)
            run.tracking.start()
        run.send("began")

    def _prepare_stepping(self) -> None:
        """Make of models and gradients what the config says."""
        run, device = self._running(), self._running().worker.device
        scaler = torch.amp.GradScaler(device.type) if self.cfg.precision == "fp16" else None
        run.stepping = Stepping(run.accumulation, self.cfg.gradient_clip, scaler)
        for model in checkpoints.members(self.models).values():
            if isinstance(model, nn.Module) and self.cfg.precision != 32:
                in_half_precision(model, device, self.cfg.precision)
            if isinstance(model, nn.Module) and self.cfg.compile:
                compile_model(model, self.cfg.compile)

    def _watch_gradients(self) -> None:
        run, cfg = self._running(), self.cfg

        def report(values: Mapping[str, float]) -> None:
            self._report(values, run.global_step, run.epoch)

        tell = partial(run.send, "notice")
        run.gradients = Gradients(
            cfg.watch_gradients, cfg.stop_on_nan, report if run.worker.writes else None, lambda text: tell(text=text)
        )

    def _end(self) -> dict[str, float]:
        """Finish a run. Returns the latest value of every recorded number."""
        run = self._running()
        self._begin_record()
        self._finish_own()
        if not self._in_a_pass():  # else the run was stopped in the middle of one, which resumes
            self._finish_passes()
            self._close_epoch()
        self._wait_for_checkpoint()
        return run.latest

    def _settle(self) -> None:
        """Let a checkpoint under way be stored when the loop has failed; its own failure is not the news."""
        if self._run is not None and self._run.saver is not None:
            with contextlib.suppress(MlxError):
                self._run.saver.wait()

    def _in_a_pass(self) -> bool:
        """Whether a training pass is under way."""
        run = self._running()
        return run.counted is not None and run.counted.steps_left > 0

    def _wait_for_checkpoint(self) -> None:
        """Until the last checkpoint is stored, on rank 0."""
        run = self._running()
        if run.saver is not None:
            run.saver.wait()

    # -- inside --

    def _running(self) -> WorkerRun:
        if self._run is None:
            raise MlxError("this method works inside worker_loop, while a run trains")
        return self._run

    def _watched(self, loader: Loader) -> Loader:
        """The loader of a dataset that the run knows: this one, unless it knows one that reads the same."""
        run = self._running()
        name = loader.shard.name
        known = run.loaders.get(name)
        if known is not None and known.asked == loader.asked:
            return known
        if known is not None:
            loader.epoch = known.epoch
        elif name in run.places:
            loader.load_state_dict(run.places[name])
        loader.on_start, loader.on_batch, loader.on_step = self._starting, self._reading, self._between
        run.loaders[name] = loader
        return loader

    def _starting(self, loader: Loader) -> None:
        """A pass begins. After a restart, the one that was interrupted goes on as if nothing had happened since.

        What `worker_loop` did until now, like making a scheduler, took random numbers and perhaps changed learning
        rates; resetting the metrics is right before a whole pass, and undone before the rest of one.
        """
        run = self._running()
        self._finish_passes()
        if loader is run.counted or not self._in_a_pass():  # not beside or in the middle of a training pass
            run.stepping.forget(self._optimizers().values())
            run.accumulation.begin()
        state = run.restored
        if state is None or not (state["finished"] or state["loaders"].get(loader.shard.name, {}).get("steps")):
            self._begin_record()
            return  # an evaluation before the pass that was interrupted
        run.restored = None
        late = {name: set(checkpoints.members(self._group(name))) - run.present[name] for name in ("tools", "own")}
        for name, names in late.items():
            self._load(name, state, only=names & set(state[name]))
        if any(late.values()):
            self._load("optimizers", state)
            self._set_group_values(state)
        for name in ("tools", "own"):
            for missing in sorted(set(state[name]) - set(checkpoints.members(self._group(name)))):
                run.send_once("notice", text=f"{name}.{missing} is in the checkpoint only".removeprefix("own."))
        self._load_rank(state, metrics=not state["finished"])
        run.interrupted = not state["finished"]
        self._begin_record()

    def _reading(self, loader: Loader, number: int, steps: int) -> None:
        """A loader is about to give its batch `number` (from 1) of `steps`: keep the counts, and say so at times."""
        run = self._running()
        run.beat()
        name = loader.shard.name
        if loader.given == 1:
            title, training = run.stage_name or name, run.stage is None or run.stage_name is None or run.stage.training
            run.stages[name] = Stage(title, loader.shard.training and training, steps, loader, sent_step=number - 1)
            run.send_once("loader", name=name, training=loader.shard.training, **_size(loader))
        stage = run.stages[name]
        stage.step, stage.given = number, loader.given
        if run.stage is None or (stage is not run.stage and _takes_over(stage, run.stage, logged=run.logged)):
            run.stage = stage
            if loader.given == 1 and stage.training and not run.interrupted:
                self._close_epoch()
                run.epoch = loader.epoch - 1
            run.interrupted = run.interrupted and not stage.training
        if stage is not run.stage:
            return  # read beside another
        run.logged = False
        if stage.training:
            run.stepping.settle()
            if loader.accumulate > 1:
                run.accumulation.over(loader.given, loader.given + steps - number, loader.accumulate)
                own = checkpoints.members(self._group("own"))
                share_gradients([*checkpoints.members(self.models).values(), *own.values()], now=run.accumulation.last)
            run.global_step += run.accumulation.first
            run.counted = loader
            every = self.cfg.checkpoint_every_steps
            run.due = run.due or (every is not None and run.accumulation.last and run.global_step % every == 0)
        present = time.monotonic()
        if number == stage.steps or present - stage.last_event >= SECONDS_PER_EVENT:
            stage.last_event = present
            rate = (stage.given - 1) / max(present - stage.started, 1e-9)
            fields = {"stage": stage.name, "epoch": run.epoch, "step": number, "steps": stage.steps}
            run.send("step", **fields, rate=rate, values=stage.values)

    def _updating(self, optimizer: Optimizer) -> None:
        """An optimizer is about to make a step."""
        if self._run is None:
            return
        accumulates = "cfg.keep_global_batch" if self.cfg.keep_global_batch else None
        if self.cfg.accumulate_grad_batches > 1:
            accumulates = "cfg.accumulate_grad_batches"
        self._run.stepping.refuse_plain_step(accumulates)
        if self.cfg.gradient_clip is not None and not self._run.stepping.inside:
            text = "cfg.gradient_clip is for self.optimizer_step(); optimizer.step() takes gradients as they are"
            self._run.send_once("notice", text=text)
        if not self._run.gradients.wanted(self._run.global_step):
            return
        models = {name: parallel.unwrapped(item) for name, item in checkpoints.members(self.models).items()}
        params = [param for group in optimizer.param_groups for param in group["params"]]
        self._run.gradients.look(models, params, self._run.global_step)

    def _updated(self) -> None:
        """An optimizer has made a step."""
        if self._run is not None:
            self._run.updates += 1
            self._run.beat()

    def _between(self, loader: Loader) -> None:
        """The loop is done with a step: the place to record numbers, for a checkpoint, and for stopping."""
        run = self._running()
        run.beat()
        self._receive()
        stage = run.stages[loader.shard.name]
        if self._is_due(stage):
            self._send(stage, last=stage.step == stage.steps)
            if stage.step == stage.steps:
                self._receive()  # what follows may ask for the values of the whole pass
                stage.over = True
        if loader is run.counted:
            run.step_done(run.global_step)
        if loader is not run.counted or not loader.steps_left:
            return  # after the last step evaluation follows, and then the checkpoint of the epoch
        updated, run.updates_before = run.updates != run.updates_before, run.updates
        run.stopping = run.stopping or self._stop_voted()
        if not run.accumulation.last or (not updated and run.updates):
            return  # between two parts of an accumulated gradient, which a restart would not have
        if run.due or run.stopping:
            self._store(run.epoch, run.latest, finished=False)
        if run.stopping:
            self._stop()

    def _stop_voted(self) -> bool:
        """Whether the run shall end here: somebody asked for it, or a node goes away that nobody replaces."""
        run = self._running()
        if run.vote is None or not run.vote.due():
            return False
        stop = bool(run.vote.ask(run.stop_asked()))
        run.votes += 1
        if run.preemptible and not run.preempted and run.votes % VOTES_PER_NOTICE == 0:
            run.preempted = parallel.preempted()
            if run.preempted:
                goes_on = self.cfg.min_workers is not None and self.cfg.min_workers < run.worker.world_size
                then = "the others go on from a checkpoint" if goes_on else "stopping with a checkpoint"
                run.send("notice", text=f"a node of this run is being drained; {then}")
                run.due = run.due or goes_on
                stop = stop or not goes_on
        return stop

    def _stop(self) -> None:
        self._wait_for_checkpoint()
        raise LoopStopped

    def _store(self, epoch: int, numbers: Mapping[str, float], *, finished: bool) -> None:
        """Gather what every rank has and hand it to the saver. Every worker must call this."""
        run = self._running()
        self._begin_record()
        self._receive()
        run.due = False
        device = run.worker.device
        parts: dict[str, Any] = {"random": parallel.rank_random_state(device)}
        for name in PER_RANK:
            parts[name] = checkpoints.state_of(getattr(self, name))[0]
        ranks = parallel.gathered(checkpoints.copied(parts))  # copies on the CPU: rank 0 may not have their GPU
        if run.saver is None or ranks is None:
            return
        state: State = {"epoch": epoch, "finished": finished, "global_step": run.global_step, "ranks": ranks}
        state |= {"seed": self.cfg.seed, "world_size": run.worker.world_size, "config": dict(run.shown)}
        secrets = hidden_texts(run.tree, run.shown)
        for name in SAVED:
            state[name], left_out = checkpoints.state_of(self._group(name), secrets)
            if left_out and name in ("models", "optimizers"):
                raise MlxError(
                    f"{name}.{left_out[0]} cannot be part of a checkpoint: only numbers, text and tensors can"
                )
            for item in left_out:
                where = f"{name}.{item}".removeprefix("own.")
                run.send_once("notice", text=f"{where} is not part of checkpoints: only numbers, text and tensors are")
        state["scaler"] = run.stepping.state()
        state["on_device"] = checkpoints.on_device(self.tools)
        state["loaders"] = run.places | {name: loader.state_dict() for name, loader in run.loaders.items()}
        state["numbers"] = {"latest": dict(run.latest), "unreported": dict(run.unreported)}
        state["tracking"] = run.tracking.state() if run.tracking is not None else None
        run.saver.save(state, Checkpoint(epoch, finished, run.global_step, dict(numbers)))

    def _stored(self, checkpoint: Checkpoint) -> None:
        """A checkpoint is complete; called in the background."""
        run = self._running()
        saved = run.checkpoints
        saved.prune(self.cfg.keep_checkpoints, self.cfg.monitor, self.cfg.mode)
        fields = {"epoch": checkpoint.epoch, "finished": checkpoint.finished, "step": checkpoint.global_step}
        facts = {**fields, "path": saved.path(checkpoint), "metrics": checkpoint.metrics}
        run.send("checkpoint", **facts)
        if run.tracking is not None:
            run.tracking.stored(facts)

    def _found_state(self) -> State | None:
        """The state to go on from: of this run's latest checkpoint, else of `cfg.restore_checkpoint_path`."""
        run = self._running()
        saved = run.checkpoints
        tell = partial(run.send_once, "notice")
        found = parallel.shared(saved.newest(lambda text: tell(text=text)) if run.worker.writes else None)
        chosen = self.cfg.restore_checkpoint_path
        if found is None and not chosen:
            return None
        state = saved.load(found) if found else checkpoints.read(chosen)
        where = saved.path(found) if found else chosen
        if not found and not self.cfg.restore_strict:
            for line in checkpoints.load_what_fits(self.models, state["models"]):
                tell(text=f"          {line}")
            tell(text=f"weights   of {where} (epoch {state['epoch'] + 1}); all else begins anew")
            return None
        if found:
            run.rewound = state["tracking"], state["global_step"]
            if run.begun and run.tracking is not None:  # the loop has asked for it
                run.tracking.rewind(*run.rewound)
        at = f"epoch {state['epoch'] + 1}, step {state['global_step']}"
        tell(text=f"restored  {where} ({at})")
        return state

    def _group(self, name: str) -> Any:
        """A group of the experiment; `own` stands for what was put on the experiment itself and has a state."""
        if name != "own":
            return getattr(self, name)
        grouped = [id(item) for group in GROUPS for item in checkpoints.members(getattr(self, group)).values()]
        grouped += [id(parallel.unwrapped(item)) for item in checkpoints.members(self.models).values()]
        return SimpleNamespace(
            **{
                name: item
                for name, item in vars(self).items()
                if name not in GROUPS
                and not isinstance(item, Loader | type)
                and hasattr(item, "state_dict")
                and hasattr(item, "load_state_dict")
                and id(item) not in grouped
            }
        )

    def _optimizers(self) -> dict[str, Optimizer]:
        """The optimizers by name."""
        return {
            name: item for name, item in checkpoints.members(self.optimizers).items() if isinstance(item, Optimizer)
        }

    def _load(self, name: str, state: State, only: set[str] | None = None) -> None:
        """Restore the members of a group."""
        run = self._running()
        then, now = (config.get(name) or {} for config in (filled(state["config"], run.shown, run.tree), run.tree))
        moved, saved = {}, state[name]
        if name == "tools":
            moved = dict.fromkeys(state["on_device"], run.worker.device)
            saved = {
                item: resuming.with_settings(part, then[item], now[item], f"tools.{item}", build)
                if item in then and item in now
                else part
                for item, part in saved.items()
            }
        for text in checkpoints.load_into(self._group(name), saved, name, only=only, moved=moved):
            run.send_once("notice", text=text)

    def _set_group_values(self, state: State) -> None:
        """Set what the config has changed of optimizers since a checkpoint, in them and in schedulers."""
        kept = [item for name in ("tools", "own") for item in checkpoints.members(self._group(name)).values()]
        run = self._running()
        then, now = (config.get("optimizers") for config in (filled(state["config"], run.shown, run.tree), run.tree))
        resuming.set_group_values(self._optimizers(), kept, then, now)

    def _load_rank(self, state: State, *, metrics: bool = True) -> None:
        """Restore what every rank has of its own; of a group of another size what can be merged."""
        run = self._running()
        worker, ranks = run.worker, state["ranks"]
        if worker.world_size == state["world_size"]:
            parallel.set_rank_random_state(ranks[worker.rank]["random"], worker.device)
        else:
            parallel.seed_everything(mixed(state["seed"], worker.rank, state["global_step"]))
        for name in PER_RANK if metrics else ():
            group, parts = getattr(self, name), [part[name] for part in ranks]
            mine = parts[worker.rank :: worker.world_size]
            if not mine:
                continue  # a worker more than there were
            saved = mine[0]
            if worker.world_size < state["world_size"]:
                saved = checkpoints.merged(mine, group)[0]
                for item in checkpoints.merged(parts, group)[1]:  # on all workers, or its value would be of some only
                    saved.pop(item, None)
                    text = f"{name}.{item} begins anew: its states of several workers cannot merge"
                    run.send_once("notice", text=text)
            checkpoints.load_into(group, saved, name, only=set(saved))

    def _save(self, batch_idx: int, epoch: int, stage_name: str | None, *groups: str) -> None:
        run = self._running()
        run.beat()
        run.epoch = epoch
        run.logged = True
        if run.stage is None or run.stage.over:
            stage = self._own_stage(stage_name)
        else:
            stage = run.stage
            stage.name = stage_name or stage.name
        stage.said.update(groups)
        stage.saved.update(groups)
        if stage.loader is None:  # the loop reads one of its own, and counts from 0 after a restart, too
            run.global_step += stage.training and batch_idx + 1 != stage.step
            stage.step = batch_idx + 1
            if self._is_due(stage):
                self._send(stage, last=False)
                self._receive()
        elif self._is_due(stage):
            found = self._metrics(groups)
            stage.states |= packed(found, whole_pass=stage.step == stage.steps)

    def _own_stage(self, name: str | None) -> Stage:
        """The pass over a loader that the runtime does not know, or what is saved after one over a loader it knows."""
        run = self._running()
        title = name or (run.stage.name if run.stage is not None else "train")
        if run.own is None or run.own.name != title:
            self._finish_own()
            after = run.stage is not None and run.stage.name == title
            run.own = Stage(title, training=not after and trains(title), steps=0)
        return run.own

    def _finish_passes(self) -> None:
        """Record the metrics of a pass that was left early. Every worker must call this."""
        self._finish_own()
        stage = self._run.stage if self._run is not None else None
        if stage is not None and stage.loader is not None and stage.said:
            self._finish(stage)

    def _finish_own(self) -> None:
        """Record the metrics of a pass over a loader that the runtime does not know. Every worker must call this."""
        run = self._run
        if run is not None and run.own is not None:
            stage, run.own = run.own, None
            self._finish(stage)

    def _finish(self, stage: Stage) -> None:
        """Record the metrics of a pass that has ended."""
        self._receive()
        self._send(stage, last=True)
        self._receive()

    def _is_due(self, stage: Stage) -> bool:
        """Whether numbers of this step are recorded."""
        every = self.cfg.log_every_steps * (stage.loader.accumulate if stage.loader is not None else 1)
        return stage.step == stage.steps or (stage.training and stage.step % every == 0)

    def _metrics(self, groups: Iterable[str]) -> dict[str, Known]:
        """The metrics of some groups by name."""
        known = self._running().known
        found = {name: item for group in groups for name, item in checkpoints.members(getattr(self, group)).items()}
        for name, item in found.items():
            if isinstance(item, Metric | MetricCollection) and (name not in known or known[name].metric is not item):
                known[name] = Known(item)
        return {name: known[name] for name in found if name in known}

    def _send(self, stage: Stage, *, last: bool) -> None:
        """Tell all workers what this one has seen, in the background. Every worker must call this at the same places.

        Args:
            stage: that it was seen in.
            last: the stage ends here.
        """
        run = self._running()
        said = frozenset(stage.said)
        late = {name: item for name, item in self._metrics(sorted(said)).items() if name not in stage.states}
        if last and not said:  # the latest numbers are recorded, but for those that come once per pass
            late = {name: item for name, item in self._metrics(sorted(stage.saved)).items() if item.keeps_rows}
            said = frozenset(stage.saved) if late else said
        states = packed(late, whole_pass=last) | stage.states
        rates = self._rates(stage) if said and stage.training and run.worker.writes else {}
        loader = stage.loader
        waited = 100 * loader.waited_s / loader.seconds if loader is not None and stage.training else 0.0
        run.sent = Sent(stage, stage.name, last, run.global_step, run.epoch, rates)
        run.exchange.send(Message((stage.name, stage.step), said, waited, states))
        stage.said, stage.states, stage.sent_at, stage.sent_step = set(), {}, time.monotonic(), stage.step

    def _receive(self) -> None:
        """Record what all workers have said, if they were asked. Every worker must call this at the same places."""
        run = self._running()
        sent, run.sent = run.sent, None
        if sent is None:
            return
        messages = run.exchange.receive()
        if not messages[0].said:
            return
        values: dict[str, float] = {}
        for name, metric in self._metrics(sorted(messages[0].said)).items():
            title = f"{sent.title}/{name}"
            found: dict[str, float] | None = {}
            if metric.syncs_itself:
                found = self._synced(title, metric)
            elif run.worker.writes and name in messages[0].states:
                found = metric.reduced(title, [message.states[name] for message in messages])
            if found is None:
                run.send_once("notice", text=f"{title} is skipped: it was not updated")
            values |= found or {}
        sent.stage.values |= values
        run.latest |= values
        run.unreported |= values
        if not run.worker.writes:
            return
        rates = dict(sent.rates)
        if sent.stage.training and sent.stage.loader is not None:
            rates["time/data_wait_pct"] = waited = max(message.number for message in messages)
            if sent.last:
                self._input_rates(sent.stage.loader, rates["samples_per_s"], waited)
        self._report(values | rates, sent.step, sent.epoch)

    def _synced(self, title: str, known: Known) -> dict[str, float] | None:
        """The value of a metric that comes to terms with other workers by itself; a collective."""
        (updated,) = agree([known.updated()], self._running().worker.device)
        if updated is None:
            raise MlxError(f"{title} was updated on some workers only; update it on all, or its value never comes")
        return numbers(title, known.metric.compute()) if updated else None

    def _rates(self, stage: Stage) -> dict[str, float]:
        """What there is to say of training beside metrics: learning rates, speed, memory."""
        rates = _learning_rates(self.optimizers)
        device = self._running().worker.device
        if stage.loader is not None:
            rates["samples_per_s"] = stage.loader.rows_read / stage.loader.seconds
        if stage.step > stage.sent_step:
            rates["time/step_s"] = (time.monotonic() - stage.sent_at) / (stage.step - stage.sent_step)
        if device.type == "cuda":
            rates["gpu/memory"] = torch.cuda.max_memory_allocated(device) / 1e9
        return rates

    def _report(self, values: Mapping[str, float], step: int, epoch: int) -> None:
        """Give numbers to the trackers, and to the driver if it wants them."""
        run = self._running()
        self._begin_record()
        bad = [name for name, value in values.items() if not math.isfinite(value)]
        if bad and "not finite" not in run.said:
            run.said.add("not finite")  # from here on most numbers are not
            what = f"{', '.join(bad)} {'is' if len(bad) == 1 else 'are'} not finite at step {step} of epoch {epoch + 1}"
            best = f"; no checkpoint is the best while {self.cfg.monitor} is nan" if self.cfg.monitor in bad else ""
            run.send("warning", text=f"{what}{best}. cfg.stop_on_nan=true ends a run at the first such gradient")
        if run.tracking is not None:
            report = run.tracking.report(values, step=step, epoch=epoch)
            if run.forwarded:
                run.send("report", **vars(report))

    def _input_rates(self, loader: Loader, samples_per_s: float, waited: float) -> None:
        """How fast a pass that has ended read its rows, and how much of its time the slowest worker waited for them."""
        run = self._running()
        run.input_rates = {"samples_per_s": samples_per_s, "data_wait_pct": waited}
        if waited > BOUND_BY_INPUT_PCT and loader.seconds > 1 and loader.advice:
            run.send_once("notice", text=f"reading datasets.{loader.shard.name} holds up training; {loader.advice}")

    def _log(self, values: Mapping[str, float | torch.Tensor], epoch: int) -> None:
        run = self._running()
        if values and run.worker.writes:
            found = {name: _number(value) for name, value in values.items()}
            run.latest |= found
            run.unreported |= found
            run.logged_names |= set(found)
            self._report(found, run.global_step, epoch)

    def _close_epoch(self) -> None:
        """Print and record what an epoch came to, if it came to anything since the last time."""
        run = self._running()
        self._receive()
        seconds = time.monotonic() - run.epoch_started
        if run.unreported:
            fields = {"epoch": run.epoch, "epochs": self.cfg.num_epochs, "values": run.unreported, "seconds": seconds}
            run.send("epoch", **fields, **run.input_rates)
            self._report({"time/epoch_s": seconds}, run.global_step, run.epoch)
            if (figure := run.gradients.picture()) is not None:
                self.tensorboard.add_figure("gradient_flow", figure, run.global_step)
            if run.tracking is not None:
                run.tracking.end_epoch(run.epoch, dict(run.unreported))
        run.unreported = {}
        run.input_rates = {}
        run.epoch_started = time.monotonic()


def _takes_over(stage: Stage, current: Stage, *, logged: bool) -> bool:
    """Whether the loop has moved on to a pass, or only reads it beside the current one, as in `zip(train, unlabelled)`.

    Args:
        stage: gives a batch now.
        current: gave the one before.
        logged: whether the loop has logged since, so that its body ran.
    """
    if stage.name == current.name or (stage.training and not current.training):
        return True
    if current.step == current.steps:
        return logged or stage.given == 1
    return stage.given == 1 and (current.given > 1 or logged)  # side by side, both would be at their first batch


class _Silent:
    """Stands for a writer where nothing is written."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def _number(value: float | torch.Tensor) -> float:
    """A number, or a tensor of one element, which may be part of a graph."""
    return float(value.detach() if isinstance(value, torch.Tensor) else value)


def _size(loader: Loader) -> dict[str, int]:
    """How much a loader reads in one pass, over all workers."""
    return {
        "rows": loader.rows,
        "steps": len(loader),
        "global_batch": loader.batch_size * loader.accumulate * loader.shard.worker.world_size,
    }


def _learning_rates(optimizers: Any) -> dict[str, float]:
    """`lr/adam` for each optimizer, of its first parameter group."""
    made = checkpoints.members(optimizers)
    return {
        f"lr/{name}": float(made[name].param_groups[0]["lr"]) for name in made if hasattr(made[name], "param_groups")
    }


def _choices(numbers: Mapping[str, float]) -> str:
    return f" Recorded: {', '.join(sorted(numbers))}." if numbers else " Nothing was recorded yet."
