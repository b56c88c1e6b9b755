"""Synchronization of any number of metrics over all workers in one collective.

TorchMetrics would gather each state of each metric separately. Here each worker packs all states into one message;
rank 0 merges them as defined by the metrics (`dist_reduce_fx`) and computes the values. The exchange runs in a
separate group on the CPU while training continues.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from mlx_runtime.distributed.collectives import data_parallel_group
from mlx_runtime.distributed.topology import Topology
from mlx_runtime.errors import MlxError
from mlx_runtime.runs.metric_states import (
    AnyMetric,
    State,
    compute_from,
    is_average,
    is_updated,
    keeps_rows,
    merge_states,
    state_of,
    syncs_itself,
)

BUFFER_BYTES = 4096
"""Size of the first message; the rest is sent in a second collective."""

MAX_BUFFER_BYTES = 65_536

Snapshot = State | None
"""A copy of a metric's state on the CPU; None if the metric has seen no data."""


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
        group = self._group = data_parallel_group(topology)
        self._rank: int = 0 if group is None else group.rank()
        self._world_size: int = 1 if group is None else group.size()
        self._buffer_bytes = BUFFER_BYTES
        self._in_flight: tuple[Any, list[torch.Tensor], bytes] | None = None
        self._local: list[SyncMessage] = []

    def send(self, message: SyncMessage) -> None:
        """Start an exchange in the background."""
        if self._group is None:
            self._local = [message]
            return
        from mlx_runtime.distributed.messages import encode  # here, because a single worker sends nothing

        head = encode((message.position, sorted(message.groups), message.numbers))
        body = encode(dict(message.snapshots))
        buffer = torch.zeros(self._buffer_bytes, dtype=torch.uint8)
        data = len(head).to_bytes(4, "big") + len(body).to_bytes(8, "big") + head
        data += body if len(data) + len(body) <= self._buffer_bytes else b""
        buffer[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        received = [torch.empty_like(buffer) for _ in range(self._world_size)]
        work = torch.distributed.all_gather(received, buffer, group=self._group, async_op=True)
        self._in_flight = work, received, body

    def receive(self) -> list[SyncMessage]:
        """Wait for the exchange. Return the messages by rank, with snapshots on rank 0 only. Call once after `send`."""
        if self._in_flight is None:
            return self._local
        from mlx_runtime.distributed.messages import decode

        (work, received, body), self._in_flight = self._in_flight, None
        work.wait()
        messages, sizes, bodies, needed = [], [], [], 0
        for part in (tensor.numpy() for tensor in received):
            head, size = int.from_bytes(part[:4].tobytes(), "big"), int.from_bytes(part[4:12].tobytes(), "big")
            position, groups, values = decode(part[12 : 12 + head].tobytes())
            messages.append(SyncMessage(position, frozenset(groups), values))
            needed = max(needed, 12 + head + size)
            sizes.append(size)
            bodies.append(part[12 + head : 12 + head + size])
        _check(messages)
        bodies = self._gather_bodies(body, sizes) if needed > len(received[0]) else bodies
        self._buffer_bytes = min(MAX_BUFFER_BYTES, max(self._buffer_bytes, 2 * needed))
        if self._rank != 0:
            return messages
        return [
            SyncMessage(item.position, item.groups, item.numbers, decode(part.tobytes()))
            for item, part in zip(messages, bodies, strict=True)
        ]

    def _gather_bodies(self, body: bytes, sizes: Sequence[int]) -> list[Any]:
        """Gather the snapshots of all workers on rank 0, if some did not fit into the first message."""
        buffer = torch.zeros(max(sizes), dtype=torch.uint8)
        buffer[: len(body)] = torch.frombuffer(bytearray(body), dtype=torch.uint8)
        received = [torch.empty_like(buffer) for _ in sizes] if self._rank == 0 else None
        torch.distributed.gather(buffer, received, group=self._group, group_dst=0)
        return [part[:size].numpy() for part, size in zip(received or (), sizes, strict=False)]


class SyncedMetric:
    """A metric of this worker, left unchanged, whose value is computed over all workers."""

    def __init__(self, metric: AnyMetric) -> None:
        self.metric = metric

    @cached_property
    def keeps_rows(self) -> bool:
        """True if its state grows with each row, like that of AUROC."""
        return keeps_rows(self.metric)

    @cached_property
    def syncs_itself(self) -> bool:
        """True if it implements its own synchronization."""
        return syncs_itself(self.metric)

    def snapshot(self) -> Snapshot:
        if not is_updated(self.metric):
            return None
        state = state_of(self.metric)
        for part in state.values():
            part["states"] = {name: _copy(value) for name, value in part["states"].items()}
        return state

    @cached_property
    def is_average(self) -> bool:
        """True if the data since an earlier state has a value of its own; see `state_since`."""
        return is_average(self.metric)

    def merge(self, name: str, snapshots: Sequence[Snapshot]) -> Snapshot:
        """Return its state over all workers; None if none of them has updated it."""
        states = [item for item in snapshots if item is not None]
        if not states:
            return None
        if len(states) < len(snapshots):
            raise MlxError(UPDATED_ON_SOME.format(name))
        return merge_states(self.metric, states)

    def value(self, name: str, state: State) -> dict[str, float]:
        """Return its value for a state, as numbers by name."""
        return numbers(name, compute_from(self.metric, state))


UPDATED_ON_SOME = "{} was updated on some workers only; update it on every worker, or its value cannot be computed"


def snapshots(metrics: Mapping[str, SyncedMetric], *, whole_pass: bool) -> dict[str, Snapshot]:
    """Copy the states of metrics by name, except those that synchronize themselves.

    Metrics that keep every row are copied only for a whole pass, because their states grow with each step.
    """
    return {
        name: item.snapshot()
        for name, item in metrics.items()
        if not item.syncs_itself and (whole_pass or not item.keeps_rows)
    }


def numbers(name: str, value: Any) -> dict[str, float]:
    """Return the numbers in a result of `compute` by name, without arrays."""
    named = {f"{name}_{key}": item for key, item in value.items()} if isinstance(value, dict) else {name: value}
    return {key: float(item) for key, item in named.items() if torch.as_tensor(item).numel() == 1}


def _copy(state: Any) -> Any:
    if isinstance(state, list):
        return [_copy(item) for item in state]
    return state.detach().clone() if state.device.type == "cpu" else state.detach().cpu()


def _check(messages: Sequence[SyncMessage]) -> None:
    """Raise an error if workers are at different positions or record different groups."""
    first = messages[0]
    for rank, other in enumerate(messages):
        if other.position != first.position:
            here, there = (f"step {item.position[1]} of {item.position[0]}" for item in (first, other))
            raise MlxError(f"rank 0 records at {here}, rank {rank} at {there}; every worker must run the same loop")
    for name in sorted(frozenset().union(*(item.groups for item in messages))):
        silent = [str(rank) for rank, item in enumerate(messages) if name not in item.groups]
        if silent:
            at = f"until step {first.position[1]} of {first.position[0]}"
            raise MlxError(
                f"{name} were saved on some workers only: not on rank {', '.join(silent)} {at}; every worker must make "
                "the same calls of save_metrics_and_losses, save_metrics and save_losses"
            )
