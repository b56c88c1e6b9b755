"""Training steps under the schedules of `torch.distributed.pipelining`, which own the backward pass.

torch decides when a stage runs which microbatch forward and backward, and exchanges tensors between adjacent stages. A
stage is the model's own code, of which it runs the operations of that stage only, as in `pipelined`. A run without
values finds the tensors that cross each cut. A tensor for a later stage passes through those in between.
"""

import math
import traceback
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from mlx_runtime.companions.fragments.cutting import Cut
from mlx_runtime.companions.fragments.links import Links
from mlx_runtime.companions.fragments.pipelined import OF_STAGE, Draws, Pipelined, kind_of, spare_generators
from mlx_runtime.companions.fragments.tensors import Execution, Spec, StageTensor, check_traceable
from mlx_runtime.companions.sharding.aliasing import alias
from mlx_runtime.data.sampling import mix_seeds
from mlx_runtime.distributed.messages import decode, encode
from mlx_runtime.distributed.randomness import temporary_seed
from mlx_runtime.errors import MlxError
from mlx_runtime.runs.metric_states import AnyMetric, keeps_rows, load_state, state_of

LossFunction = Callable[[Any], tuple[torch.Tensor, torch.Tensor | None]]
"""Returns the loss of a part of a batch, and its weight; None counts rows."""

KEPT = 2
"""Kinds of batches, by shapes, whose buffers are kept."""

_OF_LOSS, _OF_MODEL = 1, 3
"""Kinds of seeds, besides `OF_STAGE`: of the loss of a part, and of the code between blocks."""


class Call(NamedTuple):
    """A call of a model, as the loss made it."""

    pipelined: Pipelined
    model: nn.Module
    forward: Callable[..., Any]
    args: Any
    kwargs: Any
    autocast: tuple[bool, torch.dtype]

    @property
    def inputs(self) -> Hashable:
        leaves, structure = tree_flatten((self.args, self.kwargs))
        inputs = tuple(Spec.of(item) if isinstance(item, torch.Tensor) else kind_of(item) for item in leaves)
        return self.pipelined.name, inputs, str(structure), self.autocast

    @property
    def case(self) -> Hashable:
        """Calls for which the same tensors cross the cuts are equal in this."""
        model = tuple(item.training for item in self.model.modules())
        trained = tuple(item.requires_grad for item in self.model.parameters())
        return self.inputs, model, trained


class _CallSeen(BaseException):
    """Ends a loss function at its call of a model."""

    def __init__(self, call: Call) -> None:
        self.call = call


class Schedule:
    """Trains a model of a strategy step by step.

    Args:
        kind: `cfg.fragments.schedule`.
        microbatches: `cfg.fragments.microbatches`.
        chunks: number of stages per worker.
        links: connections to the other workers.
        models: models of the strategy, with their stages; models that are not cut have none.
    """

    def __init__(
        self,
        kind: str,
        microbatches: int,
        chunks: int,
        links: Links,
        models: Sequence[tuple[nn.Module, Pipelined, Cut | None]],
    ) -> None:
        self.kind, self.microbatches, self.links, self.models = kind, microbatches, links, models
        self.stages = links.stages * chunks
        self.passes: OrderedDict[Hashable, _Passes] = OrderedDict()

    def step(
        self,
        loss: LossFunction,
        batch: Any,
        *,
        scale: torch.Tensor,
        factor: Callable[[torch.Tensor | None], float | torch.Tensor],
        metrics: Mapping[str, AnyMetric],
    ) -> torch.Tensor:
        """Add the gradients of the loss of a batch to those of the models. Every worker must call this.

        Args:
            loss: called with parts of the batch, the last time on the last stage only.
            batch: that of the loader.
            scale: factor of losses before the backward pass, for half precision.
            factor: returns that of gradients, for the weight of all parts.
            metrics: those that the loss may update, by name.

        Returns:
            The loss of the batch, () without gradient, the same on all workers of a pipeline.
        """
        params = [
            param
            for model, *_ in self.models
            for param in model.parameters()
            if param.requires_grad and not param.is_meta
        ]
        earlier = [param.grad for param in params]
        for param in params:
            param.grad = None
        before = {name: _updates(item) for name, item in metrics.items()}
        seed = int(torch.randint(2**31, ()))
        parts = split(batch, self.microbatches)
        tensors = [item for item in tree_leaves(batch) if isinstance(item, torch.Tensor) and not item.is_inference()]
        versions = [item._version for item in tensors]  # views count with them
        calls = self._calls(loss, parts, seed)
        if versions != [item._version for item in tensors]:
            raise MlxError(
                "self.loss changes a tensor of its batch in place before it calls the model; use an operation that "
                f"returns a new one, because cfg.fragments.schedule={self.kind} calls self.loss twice"
            )
        touched = [name for name, item in metrics.items() if _updates(item) != before[name]]
        if touched:
            raise MlxError(f"self.loss updates {touched[0]} before it calls the model; update it after the call")
        if len(parts) == self.microbatches and len({call.inputs for call in calls}) == 1:
            outcome = self._passes_of(calls[0]).run(loss, parts, calls, seed, scale)
        else:
            outcome = self._whole(loss, batch, scale)
        value, weight, correction = self._share(outcome, metrics, before)
        total = factor(weight)
        for param, kept in zip(params, earlier, strict=True):
            if param.grad is not None and (isinstance(total, torch.Tensor) or total * correction != 1):
                param.grad.mul_(total * correction)
            if kept is not None:
                param.grad = kept if param.grad is None else kept.add_(param.grad)
        for model, pipelined, _ in self.models:
            pipelined.average_gradients(model)
        return value

    @contextmanager
    def _intercepted(self, call: Callable[..., Any]) -> Iterator[None]:
        for _, pipelined, _ in self.models:
            pipelined.intercept = call
        try:
            yield
        finally:
            for _, pipelined, _ in self.models:
                pipelined.intercept = None

    def _calls(self, loss: LossFunction, parts: Sequence[Any], seed: int) -> list[Call]:
        """Return the call of a model by the loss of each part."""
        kind = self.links.device.type

        def stop(pipelined: Pipelined, model: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            state = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
            raise _CallSeen(Call(pipelined, model, forward, args, kwargs, state))

        with self._intercepted(stop), spare_generators(self.links.device) as reseed:
            calls = []
            for part, number in zip(parts, _seeds(seed, _OF_LOSS, len(parts)), strict=True):
                reseed(number)
                calls.append(self._call(loss, _again(part)))
            return calls

    def _call(self, loss: LossFunction, part: Any) -> Call:
        try:
            loss(part)
        except _CallSeen as seen:
            call = seen.call
            seen.__traceback__ = None
        else:
            raise MlxError(
                "self.loss(batch) does not call a model that is cut into stages; call one of self.models in it, or set "
                "cfg.fragments.schedule=gpipe"
            )
        if any(isinstance(item, torch.Tensor) and item.requires_grad for item in tree_leaves((call.args, call.kwargs))):
            raise MlxError(
                f"an input of models.{call.pipelined.name} needs gradients, which cfg.fragments.schedule={self.kind} "
                "does not compute; compute the input within the model, or set cfg.fragments.schedule=gpipe"
            )
        return call

    def _passes_of(self, call: Call) -> "_Passes":
        case = call.case
        if case not in self.passes:
            cut = next(cut for _, pipelined, cut in self.models if pipelined is call.pipelined)
            if cut is None:
                raise MlxError(
                    f"self.loss(batch) first calls models.{call.pipelined.name}, which is whole on the last stage; "
                    "cfg.fragments.schedule is for losses of one model that is cut: set it to gpipe"
                )
            self.passes[case] = _Passes(self, call, cut)
            if len(self.passes) > KEPT:
                self.passes.popitem(last=False)[1].release()
        self.passes.move_to_end(case)
        return self.passes[case]

    def _whole(self, loss: LossFunction, batch: Any, scale: torch.Tensor) -> "_Outcome":
        """Train through autograd, as without a schedule: parts of a batch have different shapes."""
        syncs, self.links.syncs = self.links.syncs, False
        for _, pipelined, _ in self.models:
            pipelined.schedule = None
        try:
            value, weight = loss(batch)
            (value * scale).backward()  # type: ignore[no-untyped-call]  # torch has not annotated it
        finally:
            self.links.syncs = syncs
            for _, pipelined, cut in self.models:
                pipelined.schedule = self.kind if cut is not None else None
        return _Outcome(value.detach(), weight)

    def _share(
        self, outcome: "_Outcome | None", metrics: Mapping[str, AnyMetric], before: Mapping[str, int]
    ) -> tuple[torch.Tensor, torch.Tensor | None, float]:
        """Return the outcome of the last stage, on every worker, which gets the states of metrics from there, too.

        Raises:
            MlxError: self.loss failed on the last stage. It is raised on all workers, which would otherwise hang.
        """
        links, last = self.links, self.links.stages - 1
        facts, message = torch.zeros(4, dtype=torch.float64), b""  # loss, its weight, correction, bytes that follow
        if links.stage == last:
            assert outcome is not None
            error = outcome.error
            changed = {name: item for name, item in metrics.items() if _updates(item) != before[name]}
            rows = [name for name, item in changed.items() if keeps_rows(item)]
            if rows and error is None:
                error = MlxError(f"self.loss updates {rows[0]}, which keeps every row; update it where you evaluate")
            if error is not None:
                message = encode((str(error), {}))
            elif changed:
                message = encode((None, {name: state_of(item) for name, item in changed.items()}))
            weight = math.nan if outcome.weight is None else float(outcome.weight)
            facts = torch.tensor([float(outcome.value), weight, outcome.correction, len(message)], dtype=torch.float64)
        value, weight, correction, size = links.broadcast(facts.to(links.device), last).tolist()
        if size:
            content = torch.frombuffer(bytearray(message or int(size)), dtype=torch.uint8)
            failure, states = decode(links.broadcast(content.to(links.device), last).cpu().numpy().tobytes())
            if failure is not None:
                raise error if links.stage == last and error is not None else MlxError(failure)
            if links.stage != last:
                for name, state in states.items():
                    load_state(metrics[name], state)
        made = torch.tensor(weight, dtype=torch.float64, device=links.device)
        return torch.tensor(value, device=links.device), None if math.isnan(weight) else made, correction


class _Outcome(NamedTuple):
    """The loss of a batch, on the last stage.

    Gradients are those of the loss after they are multiplied by `correction`.
    """

    value: torch.Tensor
    weight: torch.Tensor | None
    correction: float = 1.0
    error: MlxError | None = None


class _Crossing(NamedTuple):
    """A tensor that one stage sends to a later one."""

    source: int
    target: int
    spec: Spec


class _Passes:
    """The stages of this worker for calls of one kind, and torch's schedule of their passes."""

    def __init__(self, schedule: Schedule, call: Call, cut: Cut) -> None:
        self._cut, self._schedule = cut, schedule
        self._pipelined = call.pipelined
        links, count = schedule.links, schedule.stages
        self._crossings, outputs = self._traced(call)
        self._across = [  # crossings from each stage to the next
            [at for at, item in enumerate(self._crossings) if item.source <= stage < item.target]
            for stage in range(count - 1)
        ]
        if schedule.kind == "zero_bubble":
            self._check_gradients(call)
        from torch.distributed import get_group_rank, pipelining

        stages: list[Any] = []
        for stage in range(links.stage, count, links.stages):
            module = _Stage(self, stage, call.model)
            entering = self._examples(stage - 1) if stage else ()
            leaving = self._examples(stage) if stage < count - 1 else tuple(map(_example, outputs))
            stages.append(
                pipelining.PipelineStage(module, stage, count, links.device, entering, leaving, group=links.pipeline)
            )
        for item in stages:
            item.group_rank = links.stage  # torch plans for stages in the order of ranks
        options: dict[str, Any] = {"loss_fn": self._loss_of, "scale_grads": False}
        if schedule.kind == "1f1b":
            self._torch: Any = pipelining.Schedule1F1B(stages[0], schedule.microbatches, **options)
        elif schedule.kind == "interleaved":
            self._torch = pipelining.ScheduleInterleaved1F1B(stages, schedule.microbatches, **options)
        else:
            self._torch = pipelining.ScheduleInterleavedZeroBubble(stages, schedule.microbatches, **options)
        ranks = [get_group_rank(links.pipeline, links.rank_of(stage)) for stage in range(links.stages)]
        for item in stages:  # the order of a plan may be another one
            item.group_rank = ranks[links.stage]
            item.stage_index_to_group_rank = {stage: ranks[stage % links.stages] for stage in range(count)}

    def release(self) -> None:
        """Let go of the buffers, which refer back to this."""
        self._torch = None

    def _check_gradients(self, call: Call) -> None:
        """Raise MlxError if torch would not find the weights of a stage, which it does from gradients of inputs."""
        trained = {self._cut.stage_of(name) for name, item in call.model.named_parameters() if item.requires_grad}
        for stage, across in enumerate(self._across, start=1):
            if stage in trained and not any(self._crossings[at].spec.requires_grad for at in across):
                raise MlxError(
                    f"no input of stage {stage} of models.{call.pipelined.name} needs gradients, without which torch's "
                    "zero-bubble schedule does not train its weights; set cfg.fragments.schedule=interleaved"
                )

    def _traced(self, call: Call) -> tuple[list[_Crossing], list[Spec]]:
        """Return the tensors that stages send, and the outputs of the model that are tensors."""
        found: list[_Crossing] = []

        def transfer(value: None, spec: Spec, source: int, target: int) -> None:
            if source > target:
                raise MlxError(
                    f"a tensor {spec.shape} of models.{call.pipelined.name} goes back from stage {source} to stage "
                    f"{target}, because the model calls its blocks in another order than it has them; "
                    f"cfg.fragments.schedule={self._schedule.kind} needs them in order, or set it to gpipe"
                )
            found.append(_Crossing(source, target, spec))

        execution = Execution(-1, call.pipelined.shapes, transfer, nullcontext, self._refuse)
        with (
            temporary_seed(0),  # the loop draws as many numbers in a resumed run
            call.pipelined.cut_into(self._cut, call.model, execution),
            self._autocast(call),
        ):
            outputs = tree_leaves(call.forward(*call.args, **call.kwargs))
            return found, [item.spec for item in self._collect(execution, outputs)]

    def _refuse(self, *_: Any) -> None:
        raise MlxError(
            f"a block of models.{self._pipelined.name} decides by values, which cfg.fragments.schedule="
            f"{self._schedule.kind} cannot follow; set it to gpipe"
        )

    def _collect(self, execution: Execution, outputs: Sequence[Any]) -> list[StageTensor]:
        """Bring the outputs of the model to the last stage."""
        tensors = [item for item in outputs if isinstance(item, StageTensor)]
        check_traceable(tensors)
        for item in tensors:
            execution.bring(item, self._schedule.stages - 1)
        return tensors

    def _autocast(self, call: Call) -> Any:
        kind, (enabled, dtype) = self._schedule.links.device.type, call.autocast
        if call.autocast == (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)):
            return nullcontext()
        return torch.autocast(kind, dtype, enabled=enabled)

    def _examples(self, stage: int) -> tuple[torch.Tensor, ...]:
        """Return tensors without values like those that cross the cut after a stage."""
        specs = (self._crossings[at].spec for at in self._across[stage])
        wire = self._schedule.links.wire.type_of
        return tuple(
            torch.empty(spec.shape, dtype=wire(spec.dtype), device="meta", requires_grad=spec.requires_grad)
            for spec in specs
        )

    def run(
        self, loss: LossFunction, parts: Sequence[Any], calls: Sequence[Call], seed: int, scale: torch.Tensor
    ) -> _Outcome | None:
        """Run all microbatches forward and backward; return the outcome on the last stage."""
        self._loss, self._parts, self._calls, self._scale = loss, parts, calls, scale
        self._seeds_of_loss, self._seeds_of_model = (_seeds(seed, kind, len(parts)) for kind in (_OF_LOSS, _OF_MODEL))
        self._error: MlxError | None = None
        self._values: list[torch.Tensor] = []
        self._weights: list[torch.Tensor | None] = []
        self._results: dict[int, Any] = {}
        device = self._schedule.links.device
        own = range(self._schedule.links.stage, self._schedule.stages, self._schedule.links.stages)
        self._draws = {stage: Draws(device, mix_seeds(seed, OF_STAGE, stage)) for stage in own}
        numbers = torch.arange(len(parts))
        failed: BaseException | None = None
        self._pipelined.forget()
        try:
            with spare_generators(device) as self._reseed:
                self._torch.step(target=numbers, return_outputs=False, number=numbers)
        except RuntimeError as error:
            failed = error
            while failed.__cause__ is not None and _is_of_torch(failed):
                failed = failed.__cause__
        finally:
            self._parts, self._calls = (), ()
        if failed is not None:
            raise failed  # here, where it keeps its own cause
        if self._error is not None:
            return _Outcome(torch.zeros(()), None, error=self._error)
        if not self._values:
            return None
        values, weights = torch.stack(self._values), [item for item in self._weights if item is not None]
        if not weights:
            return _Outcome(values.mean(), None)
        total = torch.stack(weights)
        whole = float(total.sum())
        value = float((values * total).sum()) / (whole or 1)
        return _Outcome(torch.tensor(value), total.sum(), len(parts) * self._unit / (whole or 1))

    def forward(self, model: nn.Module, stage: int, at: int, inputs: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """Run a stage on a microbatch, of which other stages have computed the inputs."""
        call, count = self._calls[at], self._schedule.stages
        links, crossings = self._schedule.links, iter(enumerate(self._crossings))
        entered = [alias(item) if item.requires_grad else item for item in inputs]
        known: dict[int, torch.Tensor] = dict(zip(self._across[stage - 1], entered, strict=True)) if stage else {}
        versions: dict[int, int] = {}

        def transfer(value: torch.Tensor | None, spec: Spec, source: int, target: int) -> torch.Tensor | None:
            number, expected = next(crossings, (0, None))
            if expected != (source, target, spec):
                raise MlxError(
                    "code between the blocks of a model took different paths for microbatches of the same shapes; move "
                    "the branch into a block, or set cfg.fragments.microbatches=1 and cfg.fragments.schedule=gpipe"
                )
            if source == stage:
                assert value is not None
                known[number], versions[number] = value, value._version
            return known[number].to(spec.dtype) if target == stage else None

        execution = Execution(stage, call.pipelined.shapes, transfer, self._draws[stage], self._refuse)
        self._reseed(self._seeds_of_model[at])
        with (
            call.pipelined.cut_into(self._cut, model, execution, self._draws[stage]),
            self._autocast(call),
        ):
            outputs, structure = tree_flatten(call.forward(*call.args, **call.kwargs))
            tensors = self._collect(execution, outputs)
        for number, version in versions.items():
            if known[number]._version != version:
                raise MlxError(
                    f"models.{call.pipelined.name} changes a tensor {tuple(known[number].shape)} in place that it has "
                    "sent to another stage; use an operation that returns a new one"
                )
        links.sent += sum(item.nbytes for item in inputs if item.requires_grad)  # their gradients
        anchor = next((item for item in inputs if item.requires_grad), None)

        def leaving(value: Any) -> Any:
            anchored = anchor is not None and value.requires_grad and self._schedule.kind == "zero_bubble"
            return _anchor(value, anchor) if anchored else value

        if stage == count - 1:
            values = [leaving(item.value) if isinstance(item, StageTensor) else item for item in outputs]
            self._results[at] = tree_unflatten(values, structure)
            return tuple(item.value for item in tensors)
        crossing = [known[number] for number in self._across[stage]]
        for value in crossing:
            links.check(value)
        sent = [_own(value, links.wire.type_of(value.dtype)) for value in crossing]
        links.sent += sum(item.nbytes for item in sent)
        return tuple(map(leaving, sent))

    def _loss_of(self, outputs: Any, number: torch.Tensor) -> torch.Tensor:
        """Return the scaled loss of a microbatch, on the last stage; after an error, one with which the others end."""
        if self._error is None:
            try:
                return self._loss_at(int(number))
            except MlxError as error:
                self._error = error
        return sum((item.sum() for item in tree_leaves(outputs) if item.requires_grad), torch.zeros(())) * 0

    def _loss_at(self, at: int) -> torch.Tensor:
        results, part = self._results, self._parts[at]

        def answer(pipelined: Pipelined, *_: Any) -> Any:
            if pipelined is not self._pipelined or at not in results:
                raise MlxError(
                    f"self.loss(batch) calls models.{pipelined.name} after models.{self._pipelined.name}; with "
                    f"cfg.fragments.schedule={self._schedule.kind}, it calls one model once: set it to gpipe"
                )
            return results.pop(at)

        self._reseed(self._seeds_of_loss[at])
        with self._schedule._intercepted(answer):
            value, weight = self._loss(_again(part))
        self._values.append(value.detach())
        self._weights.append(weight)
        share: Any = 1.0
        if weight is not None:
            if len(self._values) == 1:
                self._unit = float(weight) or 1.0
            share = weight / self._unit
        scaled: torch.Tensor = value * (share * self._scale / len(self._parts)).to(value.dtype)
        return scaled


class _Anchor(torch.autograd.Function):
    """Returns a tensor, which then depends on another one, whose gradient is none.

    Zero bubble splits a backward pass where paths of weights meet those of inputs, and drops weights that meet none.
    """

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


_anchor: Any = _Anchor.apply


class _Stage(nn.Module):
    """A stage, as torch calls it."""

    def __init__(self, passes: _Passes, stage: int, model: nn.Module) -> None:
        super().__init__()
        self._run: Callable[..., tuple[Any, ...]] = lambda at, inputs: passes.forward(model, stage, at, inputs)
        self._held = [
            param
            for title, param in model.named_parameters()
            if passes._cut.stage_of(title) == stage and param.requires_grad
        ]

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return iter(self._held)

    def forward(self, *inputs: torch.Tensor, number: torch.Tensor) -> tuple[Any, ...]:
        return self._run(int(number), inputs)


def _example(spec: Spec) -> torch.Tensor:
    """Return a tensor without values."""
    made = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta")
    return made.requires_grad_(spec.requires_grad)


def _seeds(seed: int, kind: int, count: int) -> list[int]:
    return [mix_seeds(seed, kind, at) for at in range(count)]


def _is_of_torch(error: BaseException) -> bool:
    """Return True if torch's schedules have raised an error, as they do around those of models."""
    tracebacks = [*traceback.walk_tb(error.__traceback__)]
    return bool(tracebacks) and tracebacks[-1][0].f_globals["__name__"].startswith("torch.distributed.pipelining")


def _own(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a contiguous tensor that torch's schedules may detach: neither a leaf nor a view."""
    made = value.to(dtype)
    if made is not value or not (value._is_view() or value.is_leaf or not value.is_contiguous()):
        return made.contiguous()
    return value.clone(memory_format=torch.contiguous_format)


def split(batch: Any, count: int) -> list[Any]:
    """Split a batch into parts with as many rows. None of them if that is not possible.

    Tensors and lists with as many rows as the first tensor are split; anything else belongs to every part.
    """
    tensors = [item for item in tree_leaves(batch) if isinstance(item, torch.Tensor) and item.ndim]
    rows = len(tensors[0]) if tensors else 0
    if not rows or rows % count:
        return []
    size = rows // count

    def is_rows(item: Any) -> bool:
        return isinstance(item, list) and len(item) == rows

    def part(at: int) -> Any:
        def cut(item: Any) -> Any:
            split = is_rows(item) or (isinstance(item, torch.Tensor) and item.ndim and len(item) == rows)
            return item[at * size : (at + 1) * size] if split else item

        return tree_map(cut, batch, is_leaf=is_rows)

    return [part(at) for at in range(count)]


def _again(part: Any) -> Any:
    """Return a part for another call of the loss, which may replace items of its containers."""
    return tree_map(lambda item: item, part)


def _updates(metric: AnyMetric) -> int:
    return sum(part["updates"] for part in state_of(metric).values())
