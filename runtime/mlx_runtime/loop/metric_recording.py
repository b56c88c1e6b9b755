"""Metrics of a pass: read at one step, exchanged between workers in the background, and reported some steps later.

TorchMetrics would gather each state of each metric separately. Here each worker packs all states into one message;
rank 0 merges them as defined by the metrics (`dist_reduce_fx`) and computes the values. The exchange runs in a
separate group on the CPU while training continues.
"""

import math
import time
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from mlx_runtime.distributed.collectives import agree, data_parallel_group, padded
from mlx_runtime.distributed.topology import Topology
from mlx_runtime.errors import ConfigError, MlxError
from mlx_runtime.loop.context import RunContext
from mlx_runtime.loop.passes import Pass
from mlx_runtime.loop.reporting import Reporter
from mlx_runtime.runs.metric_states import (
    UPDATED_ON_SOME,
    AnyMetric,
    Snapshot,
    State,
    check_metric,
    compute_from,
    is_average,
    is_metric,
    is_updated,
    keeps_rows,
    load_state,
    merge_snapshots,
    numbers,
    snapshot,
    state_of,
    state_since,
    syncs_itself,
)

BUFFER_BYTES = 4096
"""Size of the first message; the rest is sent in a second collective."""

MAX_BUFFER_BYTES = 65_536


@dataclass(frozen=True)
class SyncMessage:
    """Contribution of one worker to an exchange. Position and groups must be the same on all workers."""

    position: tuple[str, int]  # name of the pass, and step
    groups: frozenset[str]  # groups to record, of `losses` and `metrics`
    numbers: tuple[float, ...] = ()  # each is reduced to its maximum over all workers
    snapshots: Mapping[str, Snapshot] = field(default_factory=dict)


class MetricSync:
    """Exchange of messages between all replicas of the model, one at a time. Every worker must construct it."""

    def __init__(self, topology: Topology) -> None:
        self._group = data_parallel_group(topology)
        self._buffer_bytes = BUFFER_BYTES
        self._in_flight: tuple[Any, list[torch.Tensor], bytes] | None = None
        self._sent: list[SyncMessage] = []

    def send(self, message: SyncMessage) -> None:
        """Start an exchange in the background."""
        if self._group is None:
            self._sent = [message]
            return
        from mlx_runtime.distributed.messages import encode  # here, because a single worker sends nothing

        head = encode((message.position, sorted(message.groups), message.numbers))
        body = encode(dict(message.snapshots))
        data = len(head).to_bytes(4, "big") + len(body).to_bytes(8, "big") + head + body[: self._buffer_bytes]
        buffer = padded(data[: self._buffer_bytes], self._buffer_bytes)
        received = [torch.empty_like(buffer) for _ in range(self._group.size())]
        work = torch.distributed.all_gather(received, buffer, group=self._group, async_op=True)
        self._in_flight = work, received, body

    def receive(self) -> list[SyncMessage]:
        """Wait for the exchange. Return the messages by rank, with snapshots on rank 0 only. Call once after `send`."""
        if self._in_flight is None:
            return self._sent
        from mlx_runtime.distributed.messages import decode

        (work, received, body), self._in_flight = self._in_flight, None
        work.wait()
        messages, ends, sizes = [], [], []
        for part in (tensor.numpy() for tensor in received):
            ends.append(12 + int.from_bytes(part[:4].tobytes(), "big"))
            sizes.append(int.from_bytes(part[4:12].tobytes(), "big"))
            position, groups, values = decode(part[12 : ends[-1]].tobytes())
            messages.append(SyncMessage(position, frozenset(groups), values))
        _check(messages)
        needed, first = max(map(sum, zip(ends, sizes, strict=True))), self._group.rank() == 0
        if needed > len(received[0]):  # some snapshots did not fit
            rest = padded(body, max(sizes))
            received, ends = [torch.empty_like(rest) for _ in sizes], [0 for _ in sizes]
            torch.distributed.gather(rest, received if first else None, group=self._group, group_dst=0)
        self._buffer_bytes = min(MAX_BUFFER_BYTES, max(self._buffer_bytes, 2 * needed))
        if not first:
            return messages
        return [
            replace(item, snapshots=decode(part[end:][:size].numpy().tobytes()))
            for item, part, end, size in zip(messages, received, ends, sizes, strict=True)
        ]


@dataclass
class PassRecord:
    """The saved metrics of a pass."""

    sent_step: int = 0  # step of the last record
    sent_at: float = field(default_factory=time.monotonic)
    groups: set[str] = field(default_factory=set)  # saved since the pass began, of `losses` and `metrics`
    new: set[str] = field(default_factory=set)  # those saved since numbers were last recorded
    snapshots: dict[str, Snapshot] = field(default_factory=dict)  # taken when user code saved the metrics
    values: dict[str, float] = field(default_factory=dict)  # latest recorded values


class Exchange(NamedTuple):
    """An exchange in flight: the pass it belongs to, when it started, and numbers that are already known."""

    item: Pass
    step: int
    epoch: int
    rates: Mapping[str, float]


class _Member(NamedTuple):
    """A metric, with what does not change while it is recorded."""

    metric: AnyMetric
    syncs_itself: bool
    keeps_rows: bool
    is_average: bool


class MetricRecorder:
    """Records the metrics and losses of an experiment over all workers. Every worker must make the same calls."""

    def __init__(self, context: RunContext, reporter: Reporter) -> None:
        self._context, self._reporter = context, reporter
        self._sync = MetricSync(context.topology)
        self._members: dict[str, _Member] = {}  # by group and name
        self._records: weakref.WeakKeyDictionary[Pass, PassRecord] = weakref.WeakKeyDictionary()
        self.unfinished: Pass | None = None
        self._in_flight: Exchange | None = None
        self._steps_left = 0  # until its numbers are reported
        self._set_aside: tuple[Pass, dict[str, State]] | None = None  # of a training pass, before a reset within a step
        self._evaluated = False  # an evaluation has run since that reset
        self._before = reporter.states  # of averages of training, when they were recorded last

    def check(self) -> None:
        """Raise a ConfigError if metrics cannot be recorded, before any of them is updated."""
        self._of(("losses", "metrics"))

    def begin(self, item: Pass) -> None:
        """Begin a pass at its current step, which a restart may have moved."""
        self._evaluated |= not item.training
        self._records[item] = PassRecord(item.step)

    def values(self, item: Pass) -> Mapping[str, float]:
        """Return the latest recorded values of a pass."""
        return self._records[item].values

    def is_due(self, item: Pass) -> bool:
        """Return True if numbers are recorded at the current step."""
        every = self._context.cfg.log_every_steps * item.accumulate
        return item.finished or (item.training and item.step % every == 0)

    def turn_to(self, item: Pass) -> None:
        """Record the saved metrics of another pass, before those of this one are saved."""
        if self.unfinished is not item:
            self.flush()
        if item.training:
            self.restore(item)
        self._evaluated |= not item.training

    def before_reset(self, around: Pass | None) -> None:
        """Record saved metrics. Within a step of a pass, set them aside, because an evaluation may follow."""
        self.receive()
        self.flush()
        self._evaluated = False
        if around is None:
            self._before.clear()
        elif self._set_aside is None:
            metrics = self._of(("losses", "metrics"))
            self._set_aside = around, {name: state_of(member.metric) for name, member in metrics.items()}

    def restore(self, item: Pass) -> None:
        """Continue a training pass with its own metrics, unless the loop reset them after evaluating within a step."""
        if self._set_aside is None:
            return
        if self.unfinished is not item:
            self.flush()  # an evaluation that was left early
        (before, states), self._set_aside = self._set_aside, None
        if before is item and self._evaluated:
            for name, member in self._of(("losses", "metrics")).items():
                load_state(member.metric, states[name])
        else:
            self._before.clear()

    def save(self, item: Pass, groups: tuple[str, ...]) -> None:
        """Record groups of metrics of a pass, now or when numbers are recorded next."""
        self.unfinished = item
        record = self._records.setdefault(item, PassRecord())
        record.groups.update(groups)
        record.new.update(groups)
        if not self.is_due(item):
            return
        if item.loader is None:  # no loader reports the end of the step
            self.send(item, last=False)
            self.receive()
        else:
            record.snapshots |= _snapshots(self._of(groups), whole_pass=item.finished)

    def step_finished(self, item: Pass, lag: int) -> None:
        """Record numbers at the current step if they are due.

        The numbers of an exchange are reported `lag` steps after its start, or when the next one starts: waiting for
        other workers already at the next step would cost time if steps are short. `lag` is the same on all workers.
        """
        if item.training:
            self.restore(item)
        self._steps_left -= 1
        if self._steps_left <= 0:
            self.receive()
        if self.is_due(item):
            self.send(item, last=item.finished)
            self._steps_left = lag if self._may_lag() else 1
        if item.finished:
            self.receive()  # user code may ask for the values of the pass next
            item.recorded = True
            if self.unfinished is item:
                self.unfinished = None

    def flush(self) -> None:
        """Record the saved metrics of a pass that the loop has left, before they are discarded."""
        item, self.unfinished = self.unfinished, None
        if item is None or item.recorded:
            return
        record = self._records[item]
        if record.new or item.loader is None or not item.active:
            self.send(item, last=True)
            self.receive()
        if item.loader is None or not item.active:
            item.recorded = True

    def send(self, item: Pass, *, last: bool) -> None:
        """Start exchanging the metrics of a pass; `last` is True at its end."""
        self.receive()
        record = self._records.setdefault(item, PassRecord())
        groups = frozenset(record.new)
        late = {name: member for name, member in self._of(groups).items() if name not in record.snapshots}
        if last and not groups:  # the numbers are already recorded, except those computed once per pass
            late = {name: member for name, member in self._of(record.groups).items() if member.keeps_rows}
            groups = frozenset(record.groups) if late else groups
        taken = _snapshots(late, whole_pass=last) | record.snapshots
        rates = self._rates(item, record) if groups and item.training and self._context.topology.writes else {}
        waited = 100 * item.part.waited_s / item.part.seconds if item.part is not None and item.training else 0.0
        progress = self._context.progress
        self._in_flight = Exchange(item, progress.global_step, progress.epoch, rates)
        device = self._context.topology.device
        maxima = waited, torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else 0.0
        self._sync.send(SyncMessage((item.name, item.step), groups, maxima, taken))
        record.new, record.snapshots = set(), {}
        record.sent_at, record.sent_step = time.monotonic(), item.step

    def receive(self) -> None:
        """Finish an exchange in flight, and report its numbers."""
        exchange, self._in_flight = self._in_flight, None
        if exchange is None:
            return
        messages = self._sync.receive()
        if not messages[0].groups:
            return
        item, writes = exchange.item, self._context.topology.writes
        values: dict[str, float] = {}
        intervals: dict[str, float] = {}
        for name, member in self._of(messages[0].groups).items():
            title, state, metric = f"{messages[0].position[0]}/{name}", None, member.metric
            if member.syncs_itself:
                found = self._value_synced_by_itself(title, metric)
            elif not writes or name not in messages[0].snapshots:
                continue
            else:
                state = merge_snapshots(title, metric, [message.snapshots[name] for message in messages])
                found = None if state is None else numbers(title, compute_from(metric, state))
            if found is None:
                self._reporter.notice(f"{title} is skipped: it was not updated")
                continue
            values |= found
            if state is not None and item.training and member.is_average:
                since = numbers(f"{title}_interval", compute_from(metric, state_since(state, self._before.get(name))))
                intervals |= {key: value for key, value in since.items() if math.isfinite(value)}
                self._before[name] = state
        self._records[item].values |= values
        self._reporter.collect(values)
        if not writes:
            return
        rates = dict(exchange.rates)
        waited, peak_gb = map(max, zip(*(message.numbers for message in messages), strict=True))
        if item.training and self._context.topology.device.type == "cuda":
            rates["gpu/memory"] = peak_gb
        if item.training and item.loader is not None:
            rates["time/data_wait_pct"] = waited
            # A single step mostly measures the start of reading.
            if (item.finished or not item.active) and item.step > 1:
                self._reporter.input_speed(item, rates["samples_per_s"], waited)
        self._reporter.record(values | intervals | rates, exchange.step, exchange.epoch)

    def _may_lag(self) -> bool:
        """Return False if there are no other workers, or if metrics that synchronize themselves keep changing."""
        alone = self._context.topology.data_parallel_size == 1
        return not alone and not any(member.syncs_itself for member in self._of(("losses", "metrics")).values())

    def _of(self, groups: Collection[str]) -> dict[str, _Member]:
        """Return the metrics of some groups by name, in the same order on all workers."""
        found = {}
        for group in sorted(groups):
            for name, item in self._context.groups.members(group).items():
                key = f"{group}.{name}"
                member = self._members.get(key)
                if member is None or member.metric is not item:  # user code may have replaced it
                    check_metric(key, item)
                    if not is_metric(item):
                        continue
                    member = _Member(item, syncs_itself(item), keeps_rows(item), is_average(item))
                    self._members[key] = member
                if name in found:
                    raise ConfigError(f"losses.{name} and metrics.{name} would be recorded under one name; rename one")
                found[name] = member
        return found

    def _value_synced_by_itself(self, title: str, metric: AnyMetric) -> dict[str, float] | None:
        (updated,) = agree([is_updated(metric)], self._context.topology.device)
        if updated is None:
            raise MlxError(UPDATED_ON_SOME.format(title))
        return numbers(title, metric.compute()) if updated else None

    def _rates(self, item: Pass, record: PassRecord) -> dict[str, float]:
        """Return the numbers that are recorded for training in addition to metrics: learning rates, speed, memory."""
        optimizers = self._context.groups.members("optimizers").items()
        rates = {
            f"lr/{name}": float(item.param_groups[0]["lr"])
            for name, item in optimizers
            if hasattr(item, "param_groups")
        }
        if item.loader is not None:
            rates |= item.part.rates
        if item.step > record.sent_step:
            rates["time/step_s"] = (time.monotonic() - record.sent_at) / (item.step - record.sent_step)
        return rates


def _snapshots(members: Mapping[str, _Member], *, whole_pass: bool) -> dict[str, Snapshot]:
    """Copy the states of metrics by name, except those that synchronize themselves.

    Metrics that keep every row are copied only for a whole pass, because their states grow with each step.
    """
    return {
        name: snapshot(member.metric)
        for name, member in members.items()
        if not member.syncs_itself and (whole_pass or not member.keeps_rows)
    }


def _check(messages: Sequence[SyncMessage]) -> None:
    """Raise an MlxError if workers are at different positions or record different groups."""
    first = messages[0]
    for rank, other in enumerate(messages):
        if (other.position, other.groups) != (first.position, first.groups):
            here, there = (
                f"{' and '.join(sorted(item.groups)) or 'nothing'} at step {item.position[1]} of {item.position[0]}"
                for item in (first, other)
            )
            raise MlxError(
                f"rank 0 records {here}, rank {rank} {there}; every worker must run the same loop, with the same calls "
                "of save_metrics_and_losses, save_metrics and save_losses"
            )
