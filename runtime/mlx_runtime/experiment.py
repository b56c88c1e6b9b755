"""`BaseModule`: what an experiment inherits, and everything that user code calls while it trains."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchmetrics import Metric, MetricCollection

from mlx_runtime import checkpoints, parallel
from mlx_runtime.datasets import DatasetShards, Loader
from mlx_runtime.errors import MlxError
from mlx_runtime.layout import RunFolder
from mlx_runtime.parallel import Worker, agree
from mlx_runtime.progress import Sink
from mlx_runtime.tracking import Tracker

BOUND_BY_INPUT_PCT = 20
"""Of an epoch's time spent waiting for data, above which a line tells how to read faster, if it took a second."""

SECONDS_PER_EVENT = 0.1
"""The shortest time between two progress events of a worker."""


@dataclass
class WorkerRun:
    """A run as one worker takes part in it; the trainer makes it and hands it to the experiment.

    Attributes:
        folder: of the run.
        worker: place in the group.
        local: training runs in the driver's process.
        tree: conf.yaml of the run.
        sink: takes progress events; None except on rank 0.
        tracker: writes numbers; None except on rank 0.
    """

    folder: RunFolder
    worker: Worker
    local: bool
    tree: Mapping[str, Any]
    sink: Sink | None = None
    tracker: Tracker | None = None
    global_step: int = 0
    stage: "Stage | None" = None
    stages: "dict[str, Stage]" = field(default_factory=dict)
    logged: bool = False
    scores: dict[str, float] = field(default_factory=dict)
    loaders: dict[str, Loader] = field(default_factory=dict)
    passes: dict[str, int] = field(default_factory=dict)
    epoch: int = 0
    epoch_started: float = field(default_factory=time.monotonic)
    unreported: dict[str, float] = field(default_factory=dict)
    latest: dict[str, float] = field(default_factory=dict)
    input_rates: dict[str, float] = field(default_factory=dict)
    said: set[str] = field(default_factory=set)

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
        name: of the dataset: `train`, `val`, …
        training: whether its steps count as global steps.
        step, steps: taken and in all.
        given: steps taken since the pass began here; fewer than `step` when it was interrupted before.
        loader: that is read; None when the loop reads one of its own.
    """

    name: str
    training: bool
    steps: int
    loader: Loader | None = None
    step: int = 0
    given: int = 0
    started: float = field(default_factory=time.monotonic)
    last_event: float = 0.0
    values: dict[str, float] = field(default_factory=dict)


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
        for name in ("cfg", "datasets", "models", "optimizers", "losses", "metrics", "tools"):
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

    # -- what the user calls --

    def generate_loaders(self, dataset_shards: DatasetShards) -> list[Loader]:
        """One loader per dataset, in the order of `Datasets`. Every worker must call this.

        A dataset is made when its loader is first read or asked for its length, so one that is not used costs nothing.

        Returns:
            Re-iterable loaders of `{name: tensor (batch_size, ...)}` on the worker's device; `len()` is in steps.
        """
        return [self._watched(shard.iter_torch_batches()) for shard in dataset_shards]

    def save_metrics_and_losses(self, batch_idx: int, epoch: int) -> None:
        """Record metrics and losses. Every worker must call this, after each batch; most calls cost nothing.

        Values are reduced over all workers every `cfg.log_every_steps` training steps, and at the last batch of a
        pass, where the value is the one of the whole pass since `reset_all_metrics_and_losses`. They are named after
        the dataset being read, like `val/accuracy`.

        Args:
            batch_idx: of this batch in the pass, from 0.
            epoch: as counted by the loop.
        """
        self._save(batch_idx, epoch, self.losses, self.metrics)

    def save_metrics(self, batch_idx: int, epoch: int) -> None:
        """Like `save_metrics_and_losses`, the metrics only."""
        self._save(batch_idx, epoch, self.metrics)

    def save_losses(self, batch_idx: int, epoch: int) -> None:
        """Like `save_metrics_and_losses`, the losses only."""
        self._save(batch_idx, epoch, self.losses)

    def reset_all_metrics_and_losses(self) -> None:
        """Forget what metrics and losses have seen; call it before each pass."""
        for group in (self.losses, self.metrics):
            for metric in checkpoints.members(group).values():
                if isinstance(metric, Metric | MetricCollection):
                    metric.reset()

    def save_checkpoint(self, epoch: int, metrics: Mapping[str, float] | None = None) -> None:
        """Save everything that changes: models, optimizers, tools. Every worker must call this, once per epoch.

        Args:
            epoch: that has just ended; a restart begins with the next.
            metrics: numbers to judge the checkpoint by, beside the latest of all recorded ones.

        Raises:
            StorageError: the run folder cannot be written.
        """
        run = self._running()
        numbers = run.latest | {name: float(value) for name, value in (metrics or {}).items()}
        if self.cfg.monitor is not None and self.cfg.monitor not in numbers:
            text = f"cfg.monitor is {self.cfg.monitor!r}, which was not recorded; the newest checkpoints are kept"
            run.send_once("notice", text=f"{text}.{_choices(numbers)}")
        tools, left_out = checkpoints.state_of(self.tools)
        for name in left_out:
            run.send_once("notice", text=f"tools.{name} is not part of checkpoints: only numbers, text and tensors are")
        state = {
            "epoch": epoch,
            "global_step": run.global_step,
            "passes": {name: loader.epoch for name, loader in run.loaders.items()},
            "models": checkpoints.state_of(self.models)[0],
            "optimizers": checkpoints.state_of(self.optimizers)[0],
            "tools": tools,
            "config": dict(run.tree),
        }
        folder = run.folder.checkpoint(epoch)
        checkpoints.save(state, numbers, folder, writes=run.worker.writes, local=run.local)
        if run.local:
            run.scores[folder.name] = numbers.get(self.cfg.monitor, -math.inf) * (1 if self.cfg.mode == "max" else -1)
            checkpoints.prune(folder.parent, self.cfg.keep_checkpoints, run.scores)
        self._close_epoch()
        run.send("checkpoint", epoch=epoch, path=str(folder), metrics=numbers)

    def restore_checkpoint(self) -> int | None:
        """Load the run's latest checkpoint, or the one at `cfg.restore_checkpoint_path`, and set `cfg.start_epoch`.

        The runtime has done so before `worker_loop` begins; call it again after making further tools there. Every
        worker must call it.

        Returns:
            The epoch of the checkpoint, or None when there is none to restore.

        Raises:
            ConfigError: the checkpoint is damaged or does not fit the config.
        """
        run = self._running()
        chosen = Path(self.cfg.restore_checkpoint_path) if self.cfg.restore_checkpoint_path else None
        folder = checkpoints.newest() or chosen
        if folder is None:
            return None
        state = checkpoints.read(folder)
        step = state["global_step"]
        run.send_once("notice", text=f"restored  {folder} (epoch {state['epoch'] + 1}, step {step})")
        for name in ("models", "optimizers", "tools"):
            then, now = (config.get(name) or {} for config in (state["config"], run.tree))
            for text in checkpoints.load_into(getattr(self, name), state[name], name, then=then, now=now):
                run.send_once("notice", text=text)
        run.global_step = step
        run.passes = dict(state["passes"])
        for name, loader in run.loaders.items():
            loader.epoch = run.passes.get(name, 0)
        self.cfg.start_epoch = state["epoch"] + 1
        if self.cfg.start_epoch >= self.cfg.num_epochs:
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
        self.restore_checkpoint()

    def _end(self) -> dict[str, float]:
        """Finish a run. Returns the latest value of every recorded number."""
        run = self._running()
        self._close_epoch()
        return run.latest

    # -- inside --

    def _running(self) -> WorkerRun:
        if self._run is None:
            raise MlxError("this method works inside worker_loop, while a run trains")
        return self._run

    def _watched(self, loader: Loader) -> Loader:
        run = self._running()
        name = loader.shard.name
        loader.epoch = run.passes.get(name, 0)
        loader.on_batch = self._reading
        run.loaders[name] = loader
        return loader

    def _reading(self, loader: Loader, number: int, steps: int) -> None:
        """A loader is about to give its batch `number` (from 1) of `steps`: keep the counts, and say so at times."""
        run = self._running()
        name = loader.shard.name
        if loader.given == 1:
            run.stages[name] = Stage(name, loader.shard.training, steps, loader)
            run.send_once("loader", name=name, training=loader.shard.training, **_size(loader))
        stage = run.stages[name]
        stage.step, stage.given = number, loader.given
        if run.stage is None or (stage is not run.stage and _takes_over(stage, run.stage, logged=run.logged)):
            run.stage = stage
            if loader.given == 1 and stage.training:
                self._close_epoch()
                run.epoch = loader.epoch - 1
        if stage is not run.stage:
            return  # read beside another
        run.logged = False
        run.global_step += stage.training
        present = time.monotonic()
        if number == stage.steps or present - stage.last_event >= SECONDS_PER_EVENT:
            stage.last_event = present
            rate = (stage.given - 1) / max(present - stage.started, 1e-9)
            fields = {"stage": name, "epoch": run.epoch, "step": number, "steps": stage.steps}
            run.send("step", **fields, rate=rate, values=stage.values)

    def _save(self, batch_idx: int, epoch: int, *groups: Any) -> None:
        run = self._running()
        run.epoch = epoch
        run.logged = True
        stage = run.stage or Stage("train", training=True, steps=0)  # a loader of the user's own
        step = batch_idx + 1
        if step != stage.steps and not (stage.training and step % self.cfg.log_every_steps == 0):
            return
        found = {name: item for group in groups for name, item in checkpoints.members(group).items()}
        metrics = {name: item for name, item in found.items() if isinstance(item, Metric | MetricCollection)}
        updated = agree([_is_updated(item) for item in metrics.values()], run.worker.device)
        values: dict[str, float] = {}
        for (name, metric), everywhere in zip(metrics.items(), updated, strict=True):
            if everywhere is None:
                raise MlxError(f"{name} was updated on some workers only; update it on all, or its value never comes")
            if everywhere:
                values |= _reduced(f"{stage.name}/{name}", metric)
            else:
                run.send_once("notice", text=f"{stage.name}/{name} is skipped: it was not updated")
        stage.values |= values
        run.latest |= values
        run.unreported |= values
        rates = _learning_rates(self.optimizers) if stage.training else {}
        if stage.training and step == stage.steps and stage.loader is not None:
            rates |= self._input_rates(stage.loader)
        if run.tracker is not None:
            run.tracker.write(values | rates, step=run.global_step, epoch=epoch)

    def _input_rates(self, loader: Loader) -> dict[str, float]:
        """How fast a pass that ends read its rows, and how much of its time the slowest worker waited for them."""
        run = self._running()
        waited = parallel.largest(100 * loader.waited_s / loader.seconds, run.worker.device)
        run.input_rates = {"samples_per_s": loader.rows_read / loader.seconds, "data_wait_pct": waited}
        if waited > BOUND_BY_INPUT_PCT and loader.seconds > 1 and loader.advice:
            run.send_once("notice", text=f"reading datasets.{loader.shard.name} holds up training; {loader.advice}")
        return {"samples_per_s": run.input_rates["samples_per_s"], "time/data_wait_pct": waited}

    def _close_epoch(self) -> None:
        """Print and record what an epoch came to, if it came to anything since the last time."""
        run = self._running()
        seconds = time.monotonic() - run.epoch_started
        if run.unreported:
            fields = {"epoch": run.epoch, "epochs": self.cfg.num_epochs, "values": run.unreported, "seconds": seconds}
            run.send("epoch", **fields, **run.input_rates)
            if run.tracker is not None:
                run.tracker.write({"time/epoch_s": seconds}, step=run.global_step, epoch=run.epoch)
                run.tracker.flush()
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


def _is_updated(metric: Metric | MetricCollection) -> bool:
    parts = metric.values() if isinstance(metric, MetricCollection) else [metric]
    return all(part.update_called for part in parts)


def _reduced(name: str, metric: Metric | MetricCollection) -> dict[str, float]:
    """A metric's value over all workers, as numbers by name; a collective."""
    value = metric.compute()
    found = {f"{name}_{key}": item for key, item in value.items()} if isinstance(value, dict) else {name: value}
    return {key: float(item) for key, item in found.items() if torch.as_tensor(item).numel() == 1}


def _size(loader: Loader) -> dict[str, int]:
    """How much a loader reads in one pass, over all workers."""
    return {
        "rows": loader.rows,
        "steps": len(loader),
        "global_batch": loader.batch_size * loader.shard.worker.world_size,
    }


def _learning_rates(optimizers: Any) -> dict[str, float]:
    """`lr/adam` for each optimizer, of its first parameter group."""
    made = checkpoints.members(optimizers)
    return {
        f"lr/{name}": float(made[name].param_groups[0]["lr"]) for name in made if hasattr(made[name], "param_groups")
    }


def _choices(numbers: Mapping[str, float]) -> str:
    return f" Recorded: {', '.join(sorted(numbers))}." if numbers else " Nothing was recorded yet."
