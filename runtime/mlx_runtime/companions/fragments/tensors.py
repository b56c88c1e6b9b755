"""`StageTensor`: a tensor within the forward pass of a model that is cut into stages.

Every worker of a pipeline runs the same Python code. The value of a tensor is computed by one stage and sent to those
that need it, and the others know only its shape. Operations follow the data, so that any code between two blocks works:
residual connections, several tensors, masks. Shapes are computed once per kind of input, on fake tensors.
"""

import copy
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_structure, tree_unflatten

from mlx_runtime.errors import MlxError

KNOWN = 10_000
"""Maximum number of operations, by kinds of inputs, whose shapes are remembered."""

_NEEDS_VALUES = ("TorchScript interpreter", ".numpy() is not supported for tensor subclasses")
"""Texts of errors without a class of their own, of operations on tensors without values."""

_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)

_KNOWN = (torch.Tensor, *_PLAIN)


class Spec(NamedTuple):
    """A tensor without its value."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Spec":
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad)


class _Changed(NamedTuple):
    """An output of an operation that is one of its arguments, changed in place."""

    argument: int
    spec: Spec


class ValueDependentError(MlxError):
    """The shapes of a result depend on values, so they are not known before it is computed."""


class StageTensor(torch.Tensor):
    """A tensor whose value is on `stages`; `value` is None on others.

    To torch, it is a tensor on the meta device, so an operation that misses `__torch_function__` fails.
    """

    runner: "Execution"  # the pass in which it exists
    spec: Spec
    stages: set[int]
    value: torch.Tensor | None

    @classmethod
    def make(cls, runner: "Execution", spec: Spec, stage: int, value: torch.Tensor | None) -> "StageTensor":
        with torch._C.DisableTorchFunctionSubclass():
            made = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta").as_subclass(cls)
            made.requires_grad_(spec.requires_grad)  # so that an autograd.Function, which is not seen, can be detected
        made.runner, made.spec, made.stages, made.value = runner, spec, {stage}, value
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = next(item for item in tree_leaves((args, kwargs)) if isinstance(item, StageTensor))
        return found.runner.run(func, args, kwargs or {})


def check_traceable(tensors: Iterable[StageTensor]) -> None:
    """Raise MlxError if a tensor comes from an `autograd.Function`, whose operations were not seen."""
    with torch._C.DisableTorchFunctionSubclass():
        found = next((item.grad_fn for item in tensors if item.grad_fn is not None), None)
    if found is not None:
        name = type(found).__name__.removesuffix("Backward")
        raise MlxError(
            f"{name} is an autograd.Function called between blocks of a model that is cut into stages; call it in the "
            "forward of a block"
        )


class _SameTensors(TorchFunctionMode):
    """Deep copies within the block contain the same tensors as the originals."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.Tensor.__deepcopy__ else func(*args, **(kwargs or {}))


class Shapes:
    """Computes the shapes of results on fake tensors, and remembers them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._known: dict[Hashable, tuple[list[Any], Any]] = {}

    def infer(
        self, key: Hashable, func: Callable[..., Any], args: Any, kwargs: Any, title: str
    ) -> tuple[list[Any], Any]:
        """Return the leaves of a result and their structure, with `Spec` and `_Changed` in place of tensors.

        `title` names the operation in errors.

        Raises:
            ValueDependentError: the result depends on values.
            MlxError: the operation changes a tensor that all stages have.
        """
        leaves, structure = _flatten(args, kwargs)
        kind = self._device.type
        state = torch.is_grad_enabled(), torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        known = all(isinstance(item, _KNOWN) for item in leaves)
        case = (key, state, structure, tuple(map(_signature, leaves))) if known else None
        earlier = self._known.get(case)  # there is none for None
        if earlier is not None:
            return earlier
        if not known:  # objects that the operation may change, like a cache of keys and values
            with _SameTensors():
                leaves = [item if isinstance(item, torch.Tensor) else copy.deepcopy(item) for item in leaves]
        with self._mode:
            fakes = [self._fake(item) for item in leaves]
            fake_args, fake_kwargs = _unflatten(fakes, structure)
            everywhere = [
                fake
                for fake, item in zip(fakes, leaves, strict=True)
                if isinstance(item, torch.Tensor) and not isinstance(item, StageTensor)
            ]
            versions = [*map(_version, everywhere)]
            try:
                result = func(*fake_args, **fake_kwargs)
            except RuntimeError as error:
                is_fake = type(error).__module__ == "torch._subclasses.fake_tensor"
                if not is_fake and not any(text in str(error) for text in _NEEDS_VALUES):
                    raise
                raise ValueDependentError(
                    f"the model cannot be cut at {title}, which depends on values that only one stage has ({error}); "
                    "move it into a block, or compute it from the inputs of the model"
                ) from error
            if versions != [*map(_version, everywhere)]:
                raise MlxError(
                    f"the model cannot be cut at {title}, which runs at one stage, and changes a tensor that all have; "
                    "allocate it with h.new_zeros, where h is an output of a block, or use torch.stack"
                )
        outputs, form = tree_flatten(result)
        found = _described(outputs, fakes)
        if case is not None and all(isinstance(item, (Spec, _Changed, torch.Size, *_PLAIN)) for item in found):
            if len(self._known) == KNOWN:  # batches of ever other shapes
                self._known.clear()
            self._known[case] = found, form
        return found, form

    def _fake(self, item: Any) -> Any:
        if not isinstance(item, StageTensor):
            return self._mode.from_tensor(item) if isinstance(item, torch.Tensor) else item
        with torch.enable_grad():
            return self.empty(item.spec).clone()  # not a leaf, which may not be changed in place

    def empty(self, spec: Spec) -> torch.Tensor:
        """Return a fake tensor."""
        with self._mode:
            made = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=self._device)
            return made.requires_grad_(spec.requires_grad)


def _described(outputs: Iterable[Any], inputs: Iterable[Any]) -> list[Any]:
    """Return outputs with `Spec` in place of tensors, and `_Changed` for inputs that were changed in place."""
    positions = {id(item): place for place, item in enumerate(inputs) if isinstance(item, torch.Tensor)}
    return [
        item
        if not isinstance(item, torch.Tensor)
        else _Changed(positions[id(item)], Spec.of(item))
        if id(item) in positions
        else Spec.of(item)
        for item in outputs
    ]


def packed(described: list[Any], form: TreeSpec) -> tuple[list[Any], Any]:
    """Return the leaves of a result and their structure as plain values, for other workers."""
    leaves: list[Any] = []
    for item in described:
        argument, spec = item if isinstance(item, _Changed) else (None, item)
        if isinstance(spec, Spec):
            item = (argument, spec.shape, spec.stride, torch.empty(0, dtype=spec.dtype), spec.requires_grad)
        leaves.append(item)
    return leaves, tree_unflatten(range(len(leaves)), form)


def unpacked(leaves: list[Any], numbered: Any) -> tuple[list[Any], TreeSpec]:
    described: list[Any] = []
    for item in leaves:
        if isinstance(item, tuple):
            argument, shape, stride, empty, requires_grad = item
            item = Spec(shape, stride, empty.dtype, requires_grad)
            item = item if argument is None else _Changed(argument, item)
        described.append(item)
    return described, tree_structure(numbered)


def _version(item: torch.Tensor) -> int:
    return 0 if item.is_inference() else item._version  # tensors of `inference_mode` have none


def _signature(item: Any) -> Hashable:
    if isinstance(item, StageTensor):
        return item.spec
    if isinstance(item, torch.Tensor):
        return Spec.of(item)
    return type(item), item


class Execution:
    """Runs operations at the stages of their inputs; the base of a pass.

    Args:
        stage: The stage of this worker.
        shapes: Those of the model.
        transfer: Called with a value, or None where it is not, its spec, and the sending and receiving stages; returns
            the value on the receiver.
        draws: Random numbers of this stage; calling it returns a context in which operations draw them.
        share: Called with a result as from `Shapes.infer`, and the stage that has it; returns it on all stages.
    """

    def __init__(
        self,
        stage: int,
        shapes: Shapes,
        transfer: Callable[..., Any],
        draws: Any,
        share: Callable[[tuple[list[Any], Any], int], tuple[list[Any], Any]],
    ) -> None:
        self.stage, self.shapes = stage, shapes
        self.draws = draws
        self._transfer, self._share = transfer, share
        self._current = 0  # stage of the last operation

    def run(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run an operation on at least one stage tensor."""
        leaves = [item for item in tree_leaves((args, kwargs)) if isinstance(item, StageTensor)]
        check_traceable(leaves)
        title = getattr(func, "__name__", "an operation")
        if func is torch.Tensor.__setitem__:
            func = _set_item
        shape = self.shapes.infer(func, func, args, kwargs, title)
        if shape is not None and not any(isinstance(item, Spec | _Changed) for item in shape[0]):
            return tree_unflatten(*shape)
        stage = self._current
        if not all(stage in item.stages for item in leaves):
            stage = max(min(item.stages) for item in leaves)
        return self.run_at(stage, func, args, kwargs, shape, title)

    def run_at(
        self,
        stage: int,
        func: Callable[..., Any],
        args: Any,
        kwargs: Any,
        shape: tuple[list[Any], Any] | None,
        title: str,
    ) -> Any:
        """Run an operation at a stage, given the shape of its result. `title` names it in errors.

        Without a shape, which then depends on values, all stages wait for it.
        """
        result, form = shape or ([], tree_structure(()))
        self._current = stage
        leaves, structure = _flatten(args, kwargs)
        for item in leaves:
            if isinstance(item, StageTensor) and stage not in item.stages:
                self.bring(item, stage)
        values: list[Any] = [None] * len(result)
        if stage == self.stage:
            given = [item.value if isinstance(item, StageTensor) else item for item in leaves]
            real_args, real_kwargs = _unflatten(given, structure)
            with self.draws():
                outcome = func(*real_args, **real_kwargs)
            if shape is not None and isinstance(outcome, torch.Tensor):
                values, own = [outcome], form
            else:
                values, own = tree_flatten(outcome)
            if shape is None:
                result, form = _described(values, given), own
            else:
                self._check(title, values, result)
        if shape is None:
            result, form = self._share((result, form), stage)
            values = values or [None] * len(result)
        made = []
        for item, value in zip(result, values, strict=True):
            if isinstance(item, _Changed) and isinstance(leaves[item.argument], StageTensor):
                changed = leaves[item.argument]
                changed.spec, changed.stages, changed.value = item.spec, {stage}, value
                made.append(changed)
            elif isinstance(item, Spec | _Changed):
                spec = item if isinstance(item, Spec) else item.spec
                made.append(StageTensor.make(self, spec, stage, value))
            else:
                made.append(value if stage == self.stage else item)
        return made[0] if len(made) == 1 and form.is_leaf() else tree_unflatten(made, form)

    def _check(self, title: str, values: list[Any], result: list[Any]) -> None:
        """Check that an operation returned what the other stages expect."""
        expected = [item.spec if isinstance(item, _Changed) else item for item in result]
        given = [Spec.of(item) if isinstance(item, torch.Tensor) else item for item in values]
        for item, other in zip(expected, given, strict=True):
            alike = isinstance(item, Spec) == isinstance(other, Spec)
            if not alike or (isinstance(item, Spec) and (item[0], *item[2:]) != (other[0], *other[2:])):  # any stride
                raise MlxError(
                    f"the model cannot be cut at {title}: it returned {_text(other)}, but other stages expect "
                    f"{_text(item)}, as inferred from the shapes of its inputs"
                )

    def bring(self, item: StageTensor, stage: int) -> None:
        """Send a value to a stage that lacks it. Every worker must call this."""
        if stage in item.stages:
            return
        source = max((held for held in item.stages if held < stage), default=min(item.stages))
        value = self._transfer(item.value, item.spec, source, stage)
        if stage == self.stage:
            item.value = value
        item.stages.add(stage)


def _flatten(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], TreeSpec | None]:
    """Return the leaves of arguments, and their structure; None if all are leaves, without names."""
    if not kwargs and all(isinstance(item, _KNOWN) for item in args):
        return list(args), None
    return tree_flatten((args, kwargs))


def _unflatten(leaves: list[Any], structure: TreeSpec | None) -> Any:
    return (leaves, {}) if structure is None else tree_unflatten(leaves, structure)


def _set_item(tensor: Any, key: Any, value: Any) -> Any:
    tensor[key] = value
    return tensor


def _text(item: Any) -> str:
    if not isinstance(item, Spec):
        return repr(item)
    return f"{item.dtype} {item.shape} {'with' if item.requires_grad else 'without'} gradient"
