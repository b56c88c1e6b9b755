"""The forward pass of a model that is cut into stages, in microbatches (GPipe), through which autograd goes back."""

import random
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_unflatten

from mlx_runtime.companions.fragments.cutting import Cut
from mlx_runtime.companions.fragments.holders import Holders
from mlx_runtime.companions.fragments.links import Journey, Links
from mlx_runtime.companions.fragments.tensors import (
    Execution,
    Shapes,
    Spec,
    StageTensor,
    ValueDependentError,
    check_traceable,
    packed,
    unpacked,
)
from mlx_runtime.data.sampling import mix_seeds
from mlx_runtime.distributed.randomness import temporary_seed
from mlx_runtime.errors import MlxError

KEPT = 100
"""Kinds of inputs for which it is known what a microbatch receives."""

_OF_STAGE = 2
"""Kind of the seeds of stages, among those mixed from one number."""

_generators: Any = np.random  # NumPy does not export its functions that replace generators to type checkers


class Pipelined:
    """What a cut model needs for its forward pass; in its attribute `pipelined`.

    Args:
        name: Name of the model, for errors.
        cut: Its stages.
        links: Connections to the other stages.
        holders: Workers that hold its tensors.
        microbatches: Number of parts into which each batch is split.
    """

    def __init__(self, name: str, cut: Cut, links: Links, holders: Holders, microbatches: int) -> None:
        self.name, self.cut, self.links, self.microbatches = name, cut, links, microbatches
        self._holders = holders
        self.shapes = Shapes(links.device)
        self.execution: Execution | None = None  # during a forward pass
        self.infers = False  # a unit runs on fake tensors
        self._received: dict[Any, list[Any]] = {}  # what a microbatch receives, by kinds of inputs
        self._unknown: set[str] = set()  # units with shapes that depend on values

    def __deepcopy__(self, memo: Any) -> "Pipelined":
        return self

    def install(self, model: nn.Module) -> None:
        """Change the `forward` of a model and of its units, in place, so that the names in its state stay the same."""
        for path in self.cut.units:
            replace_forward(model.get_submodule(path), path, self._unit)
        replace_forward(model, "", self._model)
        # The parts stay where they are, also if user code moves the model.
        model.to = types.MethodType(lambda self, *args, **options: self, model)  # type: ignore[method-assign]

    def _unit(self, unit: nn.Module, path: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a unit at its stage."""
        if self.infers:
            return forward(*args, **kwargs)
        title = f"models.{self.name}.{path}" if path else f"models.{self.name}"
        if self.execution is None:
            raise MlxError(
                f"{title} was called outside of the forward pass of models.{self.name}, which is cut into stages; call "
                "the model itself, not its parts or another of its methods"
            )
        params: list[tuple[Any, str, Any]] = [
            (module, name, param)
            for module in unit.modules()
            for name, param in module._parameters.items()
            if param is not None
        ]
        shared = [item for item in params if isinstance(item[2], StageTensor)]
        trained = tuple((param.spec if isinstance(param, StageTensor) else param).requires_grad for *_, param in params)

        def infer(*args: Any, **kwargs: Any) -> Any:
            held = (*unit.named_parameters(), *unit.named_buffers())
            fakes = {
                name: self.shapes.empty(item.spec if isinstance(item, StageTensor) else Spec.of(item))
                for name, item in held
            }
            self.infers = True
            try:
                with temporary_seed(0):  # the generators of the loop stay the same if shapes are known
                    return functional_call(unit, fakes, args, kwargs)
            finally:
                self.infers = False

        case, stage = (path, unit.training, trained), self.cut.units[path]
        shape = None
        if path not in self._unknown:
            try:
                shape = self.shapes.infer(case, infer, args, kwargs, title)
            except ValueDependentError:
                self._unknown.add(path)
        # NumPy drops the second of a pair of normal numbers if its generator is replaced, so all stages drop it.
        _generators.set_bit_generator(_generators.get_bit_generator())
        forward = self.execution.draws.around(forward)
        for _, _, param in shared:
            self.execution.bring(param, stage)
        try:
            for module, name, param in shared:
                module._parameters[name] = param.value
            return self.execution.run_at(stage, forward, args, kwargs, shape, title)
        finally:
            for module, name, param in shared:
                module._parameters[name] = param

    def _model(self, model: nn.Module, path: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the whole model, microbatch by microbatch."""
        if self.execution is not None:
            return forward(*args, **kwargs)
        links, sent = self.links, self.links.sent
        leaves, structure = tree_flatten((args, kwargs))
        needing = [
            place
            for place, item in enumerate(leaves)
            if isinstance(item, torch.Tensor) and item.requires_grad and torch.is_grad_enabled()
        ]
        journey = Journey(links, [leaves[place] for place in needing], lambda: self._done(model))
        for place, item in zip(needing, journey.inputs, strict=True):
            leaves[place] = item
        parts = _split(leaves, self.microbatches)
        draws = Draws(links.device, mix_seeds(int(torch.randint(2**31, ())), _OF_STAGE, links.stage))
        outputs = []
        alike = [tuple(map(_kind_of, part)) for part in parts]
        case = alike[0], structure, model.training, torch.is_grad_enabled(), len(parts)
        known = self._received.get(case)
        with self._loose_parameters(model, links.stage) as loose:
            for number, part in enumerate(parts):
                first = bool(loose)  # the first microbatch receives shared weights as well
                for ahead in (number, number + 1) if number == first else (number + 1,) if number > first else ():
                    if known is not None and ahead < len(parts) and alike[ahead] == alike[0]:
                        links.expect(*known)
                journey.received.clear()
                self.execution = execution = Execution(links.stage, self.shapes, journey.transfer, draws, self._share)
                for tensor in loose:
                    tensor.runner = execution
                given = [
                    StageTensor.make(execution, Spec.of(item), 0, item) if place in needing else item
                    for place, item in enumerate(part)
                ]
                try:
                    run_args, run_kwargs = tree_unflatten(given, structure)
                    outputs.append(tree_flatten(forward(*run_args, **run_kwargs)))
                finally:
                    self.execution = None
                if number == 1 and alike[1] == alike[0] and not self._unknown:
                    if len(self._received) == KEPT:
                        self._received.pop(next(iter(self._received)))
                    self._received[case] = list(journey.received)
        rows = [_rows(part) for part in parts]
        joined = self._join(journey, [leaves for leaves, _ in outputs], rows)
        if not torch.is_grad_enabled():
            links.wait()
            links.sent = sent
        return tree_unflatten(joined, outputs[0][1])

    @contextmanager
    def _loose_parameters(self, model: nn.Module, own: int) -> Iterator[list[Any]]:
        """Replace parameters outside of units by stage tensors within the block."""
        replaced: list[tuple[nn.Module, str, Any]] = []
        made: dict[int, Any] = {}
        for title, stage in self.cut.loose.items():
            path, _, name = title.rpartition(".")
            owner = model.get_submodule(path)
            param: Any = owner._parameters[name]
            if id(param) not in made:
                here = stage == own
                nowhere: Any = None  # the pass is set for each microbatch
                made[id(param)] = StageTensor.make(nowhere, Spec.of(param), stage, param if here else None)
            replaced.append((owner, name, param))
            owner._parameters[name] = made[id(param)]
        try:
            yield list(made.values())
        finally:
            for owner, name, param in replaced:
                owner._parameters[name] = param

    def _share(self, found: tuple[list[Any], Any], stage: int) -> tuple[list[Any], Any]:
        """Return the leaves of a result, without values, and their structure, which a stage has."""
        return unpacked(*self.links.share(packed(*found), stage))

    def _join(self, journey: Journey, outputs: Sequence[list[Any]], rows: Sequence[int]) -> list[Any]:
        """Return the outputs of all microbatches together, on all workers."""
        links, joined = self.links, list(outputs[0])
        places, tensors, kept, grads = [], [], [], []
        for place, items in enumerate(zip(*outputs, strict=True)):
            if not isinstance(items[0], torch.Tensor):
                continue
            if not isinstance(items[0], StageTensor):
                joined[place] = self._merge(items, items, rows)
                continue
            check_traceable(items)
            stage = max(items[0].stages)
            specs = [item.spec for item in items]
            here = stage == links.stage
            if here:
                merged = self._merge([item.value for item in items], specs, rows)
            else:
                merged = torch.empty(_merged_shape(specs), dtype=specs[0].dtype, device=links.device)
            places.append(place)
            kept.append(here)
            grads.append(any(item.requires_grad for item in specs))
            whole = merged.detach().contiguous()
            links.broadcast(whole, stage)
            tensors.append(merged if here else whole)
        for place, item in zip(places, journey.finish(tensors, kept, grads), strict=True):
            joined[place] = item
        return joined

    def _merge(self, items: Sequence[torch.Tensor], specs: Sequence[Any], rows: Sequence[int]) -> torch.Tensor:
        if len(items) == 1:
            return items[0]
        if not specs[0].shape:
            weights = torch.tensor(rows, dtype=torch.float64) / sum(rows)
            return torch.stack([item * float(weight) for item, weight in zip(items, weights, strict=True)]).sum(0)
        if any(spec.shape[0] != count for spec, count in zip(specs, rows, strict=True)):
            raise MlxError(
                f"models.{self.name} returns a tensor {tuple(specs[0].shape)} for {rows[0]} rows, so the outputs of "
                "microbatches cannot be joined: the first dimension must be that of the batch, or there must be none, "
                "as for a mean over rows; or set cfg.fragments.microbatches=1"
            )
        return torch.cat(list(items))

    def _done(self, model: nn.Module) -> None:
        """After the backward pass, average the gradients of this stage over pipelines, unless more are accumulated."""
        if self.links.syncs and self.links.replicas > 1:
            trained = {name: item for name, item in model.named_parameters() if item.requires_grad and not item.is_meta}
            self.links.average_gradients(self._holders.grouped(trained))


def _kind_of(item: Any) -> Any:
    """Return what decides which path a model takes for an argument: shape and type, or the value of a flag."""
    if isinstance(item, torch.Tensor):
        return tuple(item.shape), item.dtype
    kind = type(item)
    return (kind, item) if kind in (bool, int, str, type(None)) else kind


def _merged_shape(specs: Sequence[Spec]) -> tuple[int, ...]:
    if len(specs) == 1 or not specs[0].shape:
        return specs[0].shape
    return sum(item.shape[0] for item in specs), *specs[0].shape[1:]


def _rows(leaves: Sequence[Any]) -> int:
    """Return the size of a batch: that of the first dimension of the first tensor that has one."""
    return next((item.shape[0] for item in leaves if isinstance(item, torch.Tensor) and item.ndim), 1)


def _split(leaves: Sequence[Any], count: int) -> list[list[Any]]:
    """Split the tensors of a batch like `torch.chunk`; others belong to every part."""
    rows = _rows(leaves)
    chunks = [
        item.chunk(count) if isinstance(item, torch.Tensor) and item.ndim and item.shape[0] == rows else None
        for item in leaves
    ]
    parts = next((len(item) for item in chunks if item is not None), 1)
    return [
        [item if chunk is None else chunk[part] for item, chunk in zip(leaves, chunks, strict=True)]
        for part in range(parts)
    ]


class Draws:
    """Lets a stage draw random numbers, while the generators of the loop stay equal on all stages.

    Each forward pass draws a seed from the generator of the loop. From it, each stage has its own numbers.
    """

    def __init__(self, device: torch.device, seed: int) -> None:
        self._device = device
        self._numpy, self._python = np.random.MT19937(seed), random.Random(seed).getstate()
        on_gpu = torch.Generator(device).manual_seed(seed).get_state() if device.type == "cuda" else None
        self._torch = torch.Generator().manual_seed(seed).get_state(), on_gpu

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Let an operation of torch draw."""
        outer = _states(self._device)
        _set_states(self._device, self._torch)
        try:
            yield
        finally:
            self._torch = _states(self._device)
            _set_states(self._device, outer)

    def around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the code of a block, which also draws from the generators of Python and NumPy."""

        def run(*args: Any, **kwargs: Any) -> Any:
            python, numpy = random.getstate(), _generators.get_bit_generator()
            random.setstate(self._python)
            _generators.set_bit_generator(self._numpy)
            try:
                return forward(*args, **kwargs)
            finally:
                self._python = random.getstate()
                random.setstate(python)
                _generators.set_bit_generator(numpy)

        return run


def _states(device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the states of torch's generators."""
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def _set_states(device: torch.device, states: tuple[torch.Tensor, torch.Tensor | None]) -> None:
    on_cpu, on_gpu = states
    torch.set_rng_state(on_cpu)
    if on_gpu is not None:
        torch.cuda.set_rng_state(on_gpu, device)


def replace_forward(module: nn.Module, path: str, run: Callable[..., Any]) -> None:
    """Let a module call `run` with itself, its path, its former `forward` and the arguments."""
    before = module.forward
    function = getattr(before, "__func__", None)  # None if `forward` was replaced by a plain function

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return run(self, path, types.MethodType(function, self) if function else before, args, kwargs)

    module.forward = types.MethodType(forward, module)  # a method, so that a deep copy runs its own weights
