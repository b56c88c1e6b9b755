"""The reports of a worker: events for the driver, numbers for the trackers, and the numbers of an epoch."""

import math
import time
from collections.abc import Mapping
from typing import Any

from mlx_runtime.data.loaders import Loader
from mlx_runtime.data.readers import MapReader
from mlx_runtime.errors import suggest
from mlx_runtime.events import EpochEnded, Event, LoaderOpened, LoopStarted, Notice, StepProgress, WarningNotice
from mlx_runtime.loop.context import RunContext
from mlx_runtime.loop.job import Sink
from mlx_runtime.loop.passes import Pass
from mlx_runtime.tracking.trackers import ReportWriter

SECONDS_PER_EVENT = 0.1
"""Minimum time between two progress events of a worker."""

SLOW_INPUT_PCT = 20
"""Share of a pass spent waiting for data above which a line suggests a remedy."""


class Reporter:
    """Events, and the latest values of all recorded numbers.

    Every worker keeps the numbers; rank 0 sends the events, and records the numbers with `tracking`.
    """

    def __init__(self, context: RunContext, sink: Sink, tracking: ReportWriter | None = None) -> None:
        self._context, self._sink, self.tracking = context, sink, tracking
        self._sent: set[Event] = set()
        self._last_step: tuple[Pass | None, float] = (None, 0.0)
        self.latest: dict[str, float] = {}  # last value of every recorded number
        self.states: dict[str, Any] = {}  # states of metrics at their last record; see `MetricRecorder`
        self.logged: set[str] = set()  # names of the numbers that user code logged itself
        self.unsaved: dict[str, float] = {}  # numbers recorded since the last checkpoint
        self._of_epoch: dict[str, float] = {}
        self._epoch = 0  # epoch of these numbers
        self._input_speed: dict[str, Any] = {}
        self._epoch_started = time.monotonic()
        self._not_finite = False
        # State of the trackers and global step at which this attempt begins to record; None once it has.
        self._begins_at: tuple[Mapping[str, Any] | None, int] | None = (None, 0)

    # -- events for the driver

    def send(self, event: Event) -> None:
        """Send an event to the driver, from rank 0 only."""
        if self._context.topology.writes:
            self._sink.send(event)

    def notice(self, text: str) -> None:
        """Show a line to the user, once."""
        self._send_once(Notice(text))

    def warn(self, text: str) -> None:
        """Show a warning to the user, once."""
        self._send_once(WarningNotice(text))

    def _send_once(self, event: Event) -> None:
        if event not in self._sent:
            self._sent.add(event)
            self.send(event)

    def pass_begun(self, loader: Loader) -> None:
        """Report the size of a dataset."""
        global_batch = loader.batch_size * loader.accumulate * loader.shard.topology.data_parallel_size
        name, training = loader.shard.name, loader.shard.training
        self._send_once(LoaderOpened(name, training, loader.rows, len(loader), global_batch, loader.updates))

    def step(self, item: Pass, values: Mapping[str, float]) -> None:
        """Report the progress of a pass, unless it was just reported."""
        now, steps, left = time.monotonic(), item.steps, self._context.steps_left
        if item.training and left is not None:
            steps = min(steps, (math.ceil(item.step / item.accumulate) + left) * item.accumulate)
        shown, at = self._last_step
        if item.step != steps and item is shown and now - at < SECONDS_PER_EVENT:
            return
        self._last_step = item, now
        rate = (item.part.given - 1) / max(now - item.started, 1e-9)
        epoch = self._context.progress.epoch
        self.send(StepProgress(item.name, epoch, item.step, steps, rate, dict(values)))

    # -- numbers

    def begin(self) -> None:
        """Start recording this attempt, once. Until then, the files of the previous attempt are unchanged."""
        if self._begins_at is None or not self._context.topology.writes:
            return
        begins_at, self._begins_at = self._begins_at, None
        if self.tracking is not None:
            self.tracking.rewind(*begins_at)
            self.tracking.start()
        self.send(LoopStarted())

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the numbers of a checkpoint."""
        self.latest, self.unsaved = dict(state["numbers"]["latest"]), {}
        self._of_epoch, self._epoch = dict(state["numbers"]["unreported"]), state["epoch"]
        self.states.update(state["numbers"]["states"])

    def rewind(self, state: Mapping[str, Any]) -> None:
        """When recording begins, remove everything that was recorded after a checkpoint of this run."""
        position = state["tracking"], state["global_step"]
        if self._begins_at is not None:
            self._begins_at = position
        elif self.tracking is not None:
            self.tracking.rewind(*position)

    def forget(self) -> None:
        """Drop all numbers, so that an evaluation reports only its own."""
        self.latest, self._of_epoch = {}, {}
        self.states.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the numbers to store in a checkpoint."""
        return {
            "numbers": {
                "latest": dict(self.latest),
                "unreported": dict(self._of_epoch),
                "states": dict(self.states),
            },
            "tracking": self.tracking.state() if self.tracking is not None else None,
        }

    def log(self, values: Mapping[str, float], epoch: int) -> None:
        """Record numbers that user code logged. Called on rank 0."""
        self.logged |= set(values)
        self.collect(values)
        self.record(values, self._context.progress.global_step, epoch)

    def collect(self, values: Mapping[str, float]) -> None:
        """Keep numbers for the line of the epoch and for the choice of the best checkpoint."""
        self.latest |= values
        self.unsaved |= values
        self._of_epoch |= values
        self._epoch = self._context.progress.epoch if values else self._epoch

    def record(self, values: Mapping[str, float], step: int, epoch: int) -> None:
        """Pass numbers to the trackers."""
        self.begin()
        self._warn_if_not_finite(values, step, epoch)
        if self.tracking is not None:
            self.tracking.report(values, step=step, epoch=epoch)

    def _warn_if_not_finite(self, values: Mapping[str, float], step: int, epoch: int) -> None:
        names = [name for name, value in values.items() if not math.isfinite(value)]
        if not names or self._not_finite:
            return
        self._not_finite = True  # later ones would be reported again and again
        text = f"not finite at step {step} of epoch {epoch + 1}: {', '.join(names)}. Checkpoints without a finite "
        text += "cfg.monitor are never the best; cfg.debug.stop_on_nan=true ends a run at the first such gradient"
        self.send(WarningNotice(text))

    def check_monitor(self, epoch: int) -> None:
        """Warn if no recorded number can determine the best checkpoint, or if the worst would be chosen.

        A metric of a stage that the first epoch lacks may still come.
        """
        monitor, mode = self._context.cfg.monitor, self._context.cfg.mode
        if monitor is None:
            return
        metric = self._context.groups.members("metrics").get(monitor.rpartition("/")[2])
        if getattr(metric, "higher_is_better", None) is (mode == "min"):
            cure = "max" if mode == "min" else "min"
            text = f"cfg.mode={mode} takes the worst {monitor} for the best; set cfg.mode={cure}"
            self.warn(text)
        stages = {name.rpartition("/")[0] for name in self.latest}
        may_come = epoch <= self._context.cfg.start_epoch and monitor.rpartition("/")[0] not in stages
        if monitor not in self.latest and not may_come:
            kept = f"not recorded yet; the newest checkpoints are kept.{suggest(monitor, self.latest)}"
            self.warn(f"cfg.monitor is {monitor!r}, which is {kept}")

    def input_speed(self, item: Pass, samples_per_s: float, data_wait_pct: float) -> None:
        """Keep the reading speed of a training pass, for the line of the epoch."""
        loader: Loader = item.loader
        self._input_speed = {"samples_per_s": samples_per_s, "data_wait_pct": data_wait_pct}
        self._input_speed["row_counts"] = item.part.row_counts
        if data_wait_pct > SLOW_INPUT_PCT and item.part.seconds > 1 and isinstance(loader.reader, MapReader):
            may_prepare = getattr(loader.shard.dataset, "prepare", True)
            cure = "try cfg.loader=workers=N" + (", or prepare it once with --prepare-batches" if may_prepare else "")
            self.notice(f"reading datasets.{loader.shard.name} holds up training; {cure}")

    def end_epoch(self, values: Mapping[str, float], epoch: int | None = None) -> None:
        """Report the numbers recorded since the end of the last epoch, if any.

        `values` are numbers that user code logs for the whole epoch, and `epoch` is its number, if user code gives it.
        """
        self._epoch = self._epoch if epoch is None else epoch
        if self._context.topology.writes:
            self.logged |= set(values)
            self.collect(values)
        if self._of_epoch:
            cfg, progress, seconds = self._context.cfg, self._context.progress, time.monotonic() - self._epoch_started
            epochs = cfg.num_epochs if progress.epochs is None else progress.epochs
            ended = EpochEnded(self._epoch, epochs, dict(self._of_epoch), seconds, **self._input_speed)
            self.send(ended)
            self.record({**values, "time/epoch_s": seconds}, progress.global_step, self._epoch)
            if self.tracking is not None:
                self.tracking.trackers.handle(ended)
        self._of_epoch, self._input_speed = {}, {}
        self._epoch_started = time.monotonic()
