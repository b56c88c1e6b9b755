"""Connections between the stages of a pipeline, and the operations that send gradients back through them.

Each worker runs the whole backward pass in the reverse order of its forward pass: autograd executes the nodes of a
graph in the reverse order of their creation, and all nodes of a pass are connected to its outputs. So the messages of
two workers always meet, whatever the loss depends on.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist

from mlx_runtime.companions.fragments.tensors import Spec
from mlx_runtime.companions.sharding.aliasing import raw
from mlx_runtime.distributed.messages import decode, encode
from mlx_runtime.distributed.topology import Topology
from mlx_runtime.errors import MlxError

Ranks = tuple[int, ...]

Message = tuple[tuple[int, ...], torch.dtype, int]
"""Shape and type of a tensor, and the stage that sends it."""

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Types in which float32 tensors travel, by `cfg.fragments.traffic`."""

BUCKET_BYTES = 25 * 2**20
"""Size of the all-reduces of gradients, as in DDP."""


class Links:
    """Connections of this worker. Every worker must construct it.

    Args:
        topology: Position of this worker. Each of its replicas is a pipeline, whose ranks are in the order of stages.
        traffic: `cfg.fragments.traffic`.
    """

    def __init__(self, topology: Topology, traffic: str | None = None) -> None:
        self._traffic = traffic
        self.pipelines: Sequence[Ranks] = topology.replicas
        self._ranks = self.pipelines[topology.data_parallel_rank]
        self.stages, self.stage = len(self._ranks), topology.model_parallel_rank
        self.device = topology.device
        self.replicas = len(self.pipelines)
        self.syncs = True  # average gradients over replicas in the next backward passes
        self.sent = 0  # bytes to other stages of this pipeline, for training
        self.peers: dict[Ranks, Any] = {}  # process groups of the workers that hold the same tensors
        self.ahead = topology.device.type != "cuda"  # NCCL runs a group's messages in their order, with all workers
        self.pipeline: Any = dist.group.WORLD
        if self.replicas > 1:
            self.pipeline, _ = dist.new_subgroups_by_enumeration(self.pipelines)  # type: ignore[no-untyped-call]
        self._sending: list[Any] = []
        self._early: defaultdict[int, deque[Any]] = defaultdict(deque)  # begun to be received, by stage

    def __deepcopy__(self, memo: Any) -> "Links":
        return self

    def send(self, value: torch.Tensor, stage: int) -> None:
        """Send a tensor in the background."""
        self.check(value)
        packed = value.detach().to(wire_type(self._traffic, value.dtype)).contiguous()
        self.sent += packed.nbytes
        self._sending.append((dist.isend(raw(packed), self._ranks[stage]), packed))

    def receive(self, shape: Sequence[int], dtype: torch.dtype, stage: int) -> torch.Tensor:
        early = self._early[stage]
        if not early:
            self._post((tuple(shape), dtype, stage))
        work, received, expected = early.popleft()
        if expected != (tuple(shape), dtype, stage):
            raise MlxError(
                "code between the blocks of a model took different paths for microbatches of the same shapes; move the "
                "branch into a block, or set cfg.fragments.microbatches=1"
            )
        work.wait()
        value: torch.Tensor = received.to(dtype)
        return value

    def expect(self, *messages: Message) -> None:
        """Begin to receive tensors, in the order in which each stage sends them, while this one computes."""
        for message in messages if self.ahead else ():
            self._post(message)

    def _post(self, message: Message) -> None:
        shape, dtype, stage = message
        received = torch.empty(shape, dtype=wire_type(self._traffic, dtype), device=self.device)
        self._early[stage].append((dist.irecv(raw(received), self._ranks[stage]), received, message))

    def wait(self) -> None:
        """Wait until everything is sent."""
        sending, self._sending = self._sending, []
        for work, _ in sending:
            work.wait()

    def check(self, value: torch.Tensor) -> None:
        """Raise MlxError for a tensor on another device than that of this worker."""
        if value.device.type != self.device.type:
            raise MlxError(
                f"a tensor {tuple(value.shape)} that one stage of a model sends to another is on {value.device.type}, "
                f"not on {self.device.type}; create it with device=x.device, where x is an input of the block"
            )

    def broadcast(self, value: torch.Tensor, stage: int) -> torch.Tensor:
        """Fill a contiguous tensor with its value at a stage. Every worker must call this."""
        self.check(value)
        dist.broadcast(raw(value), self._ranks[stage], group=self.pipeline)
        self.sent += value.nbytes * (self.stages - 1) if stage == self.stage else 0
        return value

    def share(self, value: Any, stage: int) -> Any:
        """Return a value that a stage has; see `messages.encode` for its types. Every worker must call this."""
        message = encode(value) if stage == self.stage else b""
        size = int(self.broadcast(torch.tensor(len(message), device=self.device), stage))
        content = torch.frombuffer(bytearray(message or size), dtype=torch.uint8).to(self.device)
        return decode(self.broadcast(content, stage).cpu().numpy().tobytes())

    def sum_over_stages(self, value: torch.Tensor, *, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        dist.all_reduce(value, op, group=self.pipeline)
        return value

    def add_peers(self, ranks: Ranks) -> None:
        """Create the process group of the workers that hold a tensor. Every worker must call this."""
        if ranks not in self.peers:
            none = self.replicas == 1 or len(ranks) == sum(map(len, self.pipelines))
            self.peers[ranks] = dist.group.WORLD if none else dist.new_group(ranks)

    def broadcast_to_peers(self, value: torch.Tensor, ranks: Ranks) -> None:
        """Fill a tensor with its value in the first pipeline. All workers with these ranks must call this."""
        whole = value.contiguous()
        dist.broadcast(raw(whole), ranks[0], group=self.peers[ranks])
        value.copy_(whole)

    def average_gradients(self, groups: Sequence[tuple[Ranks, Sequence[torch.Tensor]]]) -> None:
        """Average the gradients of parameters over the workers that hold them in each pipeline, in place.

        As with DDP, a parameter that only some pipelines have used has zeros on the others.
        """
        found, queues = [], []
        for ranks, params in groups:
            used = torch.tensor([float(item.grad is not None) for item in params], device=self.device)
            gradients = [torch.zeros_like(item) if item.grad is None else item.grad for item in params]
            found.append((params, gradients, used))
            queues.append([(self.peers[ranks], bucket) for bucket in _buckets([*gradients, used])])
        for buckets in zip_longest(*queues):  # one per group at a time, because groups overlap
            self._average([item for item in buckets if item is not None])
        for params, gradients, used in found:
            for item, gradient, part in zip(params, gradients, used.tolist(), strict=True):
                if part:
                    item.grad = gradient

    def _average(self, buckets: Sequence[tuple[Any, list[torch.Tensor]]]) -> None:
        """Average tensors, which are given with their process group."""
        running = []
        for group, bucket in buckets:
            total = torch.cat([item.reshape(-1) for item in bucket])
            running.append((dist.all_reduce(total, group=group, async_op=True), total, bucket))
        for work, total, bucket in running:
            work.wait()
            total /= self.replicas
            for item, part in zip(bucket, torch.split(total, [item.numel() for item in bucket]), strict=True):
                item.copy_(part.view_as(item))


def wire_type(traffic: str | None, dtype: torch.dtype) -> torch.dtype:
    """Return the type in which values travel."""
    return HALVES[traffic] if traffic is not None and dtype == torch.float32 else dtype


def _buckets(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Group tensors of the same type."""
    buckets: list[list[torch.Tensor]] = []
    open_buckets: dict[torch.dtype, tuple[list[torch.Tensor], int]] = {}
    for item in tensors:
        bucket, size = open_buckets.get(item.dtype, ([], BUCKET_BYTES))
        if size + item.nbytes > BUCKET_BYTES:
            bucket, size = [], 0
            buckets.append(bucket)
        bucket.append(item)
        open_buckets[item.dtype] = bucket, size + item.nbytes
    return buckets


class Journey:
    """The transfers of one call of a model, from its inputs to its outputs and back.

    Args:
        links: Connections of this worker.
        inputs: Those of the model that need gradients, which only the first stage uses.
        done: Called at the end of the backward pass.
    """

    def __init__(self, links: Links, inputs: Sequence[torch.Tensor], done: Callable[[], None]) -> None:
        self.links, self.grad = links, torch.is_grad_enabled()
        self.received: list[Message] = []  # by this worker in the forward pass, to be emptied by the caller
        self._returning: list[Message] = []  # gradients of what this worker has sent
        self._tokens: list[torch.Tensor] = []
        self.inputs: Sequence[torch.Tensor] = inputs
        if self.grad:
            root = torch.zeros((), device=links.device, requires_grad=True)
            self._begin, *self.inputs = _begin(links, done, root, *inputs)
            self._tokens = [self._begin]

    def transfer(self, value: torch.Tensor | None, spec: Spec, source: int, target: int) -> torch.Tensor | None:
        """Send a value from one stage to another; return it on the latter. Every worker must call this."""
        links = self.links
        if links.stage not in (source, target):
            return None
        if links.stage == target:
            self.received.append((spec.shape, spec.dtype, source))
        if not (self.grad and spec.requires_grad):
            if links.stage == target:
                return links.receive(spec.shape, spec.dtype, source)
            assert value is not None
            links.send(value, target)
            return None
        with torch.enable_grad():
            if links.stage == target:
                received: torch.Tensor
                received, token = _receive(links, spec, source, self._begin)
                self._tokens.append(token)
                return received
            self._returning.append((spec.shape, spec.dtype, target))
            self._tokens.append(_send(links, value, target))
        return None

    def finish(
        self, outputs: Sequence[torch.Tensor], kept: Sequence[bool], grads: Sequence[bool]
    ) -> list[torch.Tensor]:
        """Return the outputs on all workers.

        Args:
            outputs: Their values.
            kept: True for outputs whose gradient this worker needs.
            grads: True for outputs that have gradients.
        """
        if not self.grad or not outputs:
            return list(outputs)
        joined: Any = _Join
        return list(joined.apply(self._expect_gradients, tuple(kept), tuple(grads), *outputs, *self._tokens))

    def _expect_gradients(self) -> None:
        self.links.expect(*reversed(self._returning))


class _Begin(torch.autograd.Function):
    """The first node of a pass, whose backward runs after all others."""

    @staticmethod
    def forward(ctx: Any, links: Links, done: Callable[[], None], root: torch.Tensor, *inputs: torch.Tensor) -> Any:
        ctx.links, ctx.done = links, done
        return root.detach(), *(item.detach() for item in inputs)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor, *gradients: torch.Tensor) -> Any:
        ctx.links.wait()
        shared = [ctx.links.broadcast(item.contiguous(), 0) for item in gradients]
        ctx.done()
        return None, None, None, *shared


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, links: Links, value: torch.Tensor, stage: int) -> torch.Tensor:
        ctx.links, ctx.stage, ctx.facts = links, stage, (value.shape, value.dtype)
        links.send(value, stage)
        return torch.zeros((), device=links.device)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        return None, ctx.links.receive(*ctx.facts, ctx.stage), None


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, links: Links, spec: Spec, stage: int, begin: torch.Tensor) -> Any:
        ctx.links, ctx.stage = links, stage
        return links.receive(spec.shape, spec.dtype, stage), torch.zeros((), device=links.device)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: torch.Tensor) -> Any:
        ctx.links.send(gradient, ctx.stage)
        return None, None, None, None


class _Join(torch.autograd.Function):
    """The last node of a pass, which connects its outputs to everything that must run in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, begin: Callable[[], None], kept: tuple[bool, ...], grads: tuple[bool, ...], *tensors: torch.Tensor
    ) -> Any:
        ctx.begin, ctx.kept, ctx.tokens = begin, kept, len(tensors) - len(kept)
        outputs = tuple(item.detach() for item in tensors[: len(kept)])
        ctx.mark_non_differentiable(*(item for item, has in zip(outputs, grads, strict=True) if not has))
        ctx.device = tensors[-1].device
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.begin()
        used = (item if keep else None for item, keep in zip(gradients, ctx.kept, strict=True))
        return None, None, None, *used, *(torch.zeros((), device=ctx.device) for _ in range(ctx.tokens))


_begin: Any = _Begin.apply
_send: Any = _Send.apply
_receive: Any = _Receive.apply
