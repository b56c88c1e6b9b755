"""Metrics over all workers: what each has seen travels in one collective, whatever the metrics and however many.

TorchMetrics would gather each state of each metric by itself. Here a worker packs all of them into one message, all
workers exchange theirs, and rank 0 reduces them as the metrics say (`dist_reduce_fx`) and computes the values. The
exchange runs on a group of its own, on the CPU, while the loop goes on.
"""

import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities import dim_zero_cat, dim_zero_sum

from mlx_runtime.errors import MlxError

State = tuple[bool, dict[str, dict[str, Any]]]
"""Of one metric: whether it was updated, and its states by path of the metric in it and name."""

States = dict[str, State]

ROOM = 4096
"""Bytes of a message at first; what does not fit is sent in a second collective."""

MOST_ROOM = 65_536


@dataclass(frozen=True)
class Message:
    """What one worker says at one place of the loop.

    Attributes:
        place: where it is, the same on all workers: stage and step.
        said: what it was asked to record, like `losses` and `metrics`; must be the same on all.
        number: of its own, of which the largest of all workers is wanted.
        states: of its metrics by name, from `packed`.
    """

    place: tuple[str, int]
    said: frozenset[str]
    number: float = 0.0
    states: States = field(default_factory=dict)


class Exchange:
    """Messages of all workers; every worker must take part, making one included. Alone, a worker hears itself."""

    def __init__(self) -> None:
        together = torch.distributed.is_initialized()
        self._world_size = torch.distributed.get_world_size() if together else 1
        self._group = torch.distributed.new_group(backend="gloo") if together else None
        self._room = ROOM
        self._sent: tuple[Any, list[torch.Tensor], bytes] | None = None
        self._own: list[Message] = []

    def send(self, message: Message) -> None:
        """Begin an exchange; the loop may go on."""
        if self._group is None:
            self._own = [message]
            return
        head, body = pickle.dumps((message.place, message.said, message.number)), _dumped(message.states)
        out = torch.zeros(self._room, dtype=torch.uint8)
        words = len(head).to_bytes(4, "big") + len(body).to_bytes(8, "big") + head
        words += body if len(words) + len(body) <= self._room else b""
        out[: len(words)] = torch.frombuffer(bytearray(words), dtype=torch.uint8)
        heard = [torch.empty_like(out) for _ in range(self._world_size)]
        work = torch.distributed.all_gather(heard, out, group=self._group, async_op=True)
        self._sent = work, heard, body

    def receive(self) -> list[Message]:
        """What all workers have said, by rank; their states on rank 0 only. Once after each `send`.

        Raises:
            MlxError: they are not at the same place, or were not asked to record the same.
        """
        if self._sent is None:
            return self._own
        (work, heard, body), self._sent = self._sent, None
        work.wait()
        messages, sizes, bodies = [], [], []
        for part in (tensor.numpy() for tensor in heard):
            head, size = int.from_bytes(part[:4].tobytes(), "big"), int.from_bytes(part[4:12].tobytes(), "big")
            messages.append(Message(*pickle.loads(part[12 : 12 + head].tobytes())))
            sizes.append(12 + head + size)
            bodies.append(part[12 + head : 12 + head + size])
        _check(messages)
        bodies = self._rest(body, sizes) if max(sizes) > len(heard[0]) else bodies
        self._room = min(MOST_ROOM, max(self._room, 2 * max(sizes)))
        if torch.distributed.get_rank() != 0:
            return messages
        return [
            Message(item.place, item.said, item.number, _loaded(part.tobytes()))
            for item, part in zip(messages, bodies, strict=True)
        ]

    def _rest(self, body: bytes, sizes: Sequence[int]) -> list[Any]:
        """The states of all workers, on rank 0, when those of one were too long to come along."""
        out = torch.zeros(max(sizes), dtype=torch.uint8)
        out[: len(body)] = torch.frombuffer(bytearray(body), dtype=torch.uint8)
        first = torch.distributed.get_rank() == 0
        heard = [torch.empty_like(out) for _ in sizes] if first else None
        torch.distributed.gather(out, heard, dst=0, group=self._group)
        return [part.numpy() for part in heard or ()]


class Known:
    """A metric, and what is found out about it once: recording happens often.

    Attributes:
        metric: of this worker.
        parts: the metric and those inside it, by path.
        keeps_rows: whether its states grow with each row, as those of AUROC do.
        syncs_itself: whether it has ways of its own to come to terms with other workers.
    """

    def __init__(self, metric: Metric | MetricCollection) -> None:
        self.metric = metric
        self.parts = {path: part for path, part in metric.named_modules() if isinstance(part, Metric)}
        self.keeps_rows = any(
            isinstance(item, list) for part in self.parts.values() for item in part._defaults.values()
        )
        self.syncs_itself = any(
            part.dist_sync_fn is not None
            or part.process_group is not None
            or not part.sync_on_compute
            or (type(part)._sync_dist is not Metric._sync_dist and part._reductions)
            for part in self.parts.values()
        )

    def updated(self) -> bool:
        """Whether it has seen anything."""
        if isinstance(self.metric, MetricCollection):
            return all(map(_is_updated, self.metric.values()))
        return any(part.update_called for part in self.parts.values())

    def state(self) -> State:
        """A copy of what it has seen, on the CPU."""
        updated = self.updated()  # which gives members of a collection their own, up-to-date states
        return updated, {
            path: {key: _copied(getattr(part, key)) for key in part._reductions} for path, part in self.parts.items()
        }

    def reduced(self, name: str, states: Sequence[State]) -> dict[str, float] | None:
        """Its value over all workers, as numbers by name; None when it has seen nothing. It is left as it is.

        Args:
            name: of the metric, with that of the stage.
            states: of all workers.

        Raises:
            MlxError: it was updated on some workers only.
        """
        updated = {item for item, _ in states}
        if len(updated) == 2:
            raise MlxError(f"{name} was updated on some workers only; update it on all, or its value never comes")
        if updated == {False}:
            return None
        joined = {
            path: {
                key: _on(_joined([item[path][key] for _, item in states], reduction), part.device)
                for key, reduction in part._reductions.items()
            }
            for path, part in self.parts.items()
        }
        before = {
            path: {key: vars(part)[key] for key in (*part._reductions, *_ALONE)} for path, part in self.parts.items()
        }
        try:
            for path, part in self.parts.items():
                vars(part).update(joined[path] | _ALONE)  # states are plain attributes
            return numbers(name, self.metric.compute())
        finally:
            for path, part in self.parts.items():
                vars(part).update(before[path])


def packed(group: Mapping[str, Known], *, whole_pass: bool) -> States:
    """A copy of what metrics have seen, by name.

    Args:
        group: metrics by name.
        whole_pass: those that keep every row, too; they grow, and are worth their price once per pass.
    """
    chosen = {name: item for name, item in group.items() if not item.syncs_itself}
    return {name: item.state() for name, item in chosen.items() if whole_pass or not item.keeps_rows}


def numbers(name: str, value: Any) -> dict[str, float]:
    """What `compute` gave, as numbers by name; arrays are left out."""
    found = {f"{name}_{key}": item for key, item in value.items()} if isinstance(value, dict) else {name: value}
    return {key: float(item) for key, item in found.items() if torch.as_tensor(item).numel() == 1}


def _is_updated(metric: Metric) -> bool:
    return any(part.update_called for part in metric.modules() if isinstance(part, Metric))


_ALONE: dict[str, Any] = {"_computed": None, "distributed_available_fn": lambda: False}
"""Attributes of a metric that has all states already, and has not computed its value yet."""


def _joined(states: Sequence[Any], reduction: Any) -> Any:
    """One state of all workers, as TorchMetrics joins them."""
    if isinstance(states[0], list):
        items = [item for state in states for item in state]
        return dim_zero_cat(items) if items and reduction is dim_zero_cat else items
    if reduction is dim_zero_cat:
        return torch.cat([state.reshape(-1) if state.ndim == 0 else state for state in states])
    if reduction is dim_zero_sum and len(states) <= 2:  # as the sum over a stack of them, in half the time
        return sum(states[1:], states[0])
    stacked = torch.stack(tuple(states))
    return stacked if reduction is None else reduction(stacked)


def _copied(state: Any) -> Any:
    if isinstance(state, list):
        return [_copied(item) for item in state]
    return state.detach().clone() if state.device.type == "cpu" else state.detach().cpu()


def _on(state: Any, device: torch.device) -> Any:
    if device.type == "cpu":
        return state
    return [item.to(device) for item in state] if isinstance(state, list) else state.to(device)


def _check(messages: Sequence[Message]) -> None:
    """Refuse to go on when workers say different things."""
    first = messages[0]
    for rank, other in enumerate(messages):
        if other.place != first.place:
            here, there = (f"step {item.place[1]} of {item.place[0]}" for item in (first, other))
            raise MlxError(f"rank 0 records at {here}, rank {rank} at {there}; every worker must run the same loop")
    for name in sorted(frozenset().union(*(item.said for item in messages))):
        silent = [str(rank) for rank, item in enumerate(messages) if name not in item.said]
        if silent:
            at = f"until step {first.place[1]} of {first.place[0]}"
            raise MlxError(
                f"{name} were saved on some workers only: not on rank {', '.join(silent)} {at}; every worker must call "
                "save_metrics_and_losses (or save_metrics, save_losses) alike"
            )


class _Pickler(pickle.Pickler):
    """Tensors as arrays, which takes a tenth of the time."""

    def reducer_override(self, item: Any) -> Any:
        if isinstance(item, torch.Tensor) and item.dtype is not torch.bfloat16:
            return torch.from_numpy, (item.numpy(),)
        return NotImplemented


def _dumped(states: States) -> bytes:
    stream = io.BytesIO()
    _Pickler(stream, protocol=5).dump(states)
    return stream.getvalue()


def _loaded(data: bytes) -> States:
    found: States = pickle.loads(data)
    return found
