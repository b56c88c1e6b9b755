"""A forward pass by block: what each one keeps for the backward pass, and what crosses each cut.

The model runs as in a pipeline of which each block is a stage, but here alone. Fake tensors, which have shapes but no
memory, are not a documented part of torch 2.13.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

from mlx_runtime.companions.fragments.links import wire_type
from mlx_runtime.companions.fragments.pipelined import replace_forward
from mlx_runtime.companions.fragments.tensors import Execution, Spec, StageTensor

ShapeError = DynamicOutputShapeException
"""The shape of a tensor depends on values. Its `func` is the operation."""


@dataclass(frozen=True)
class Recorded:
    """Facts about the blocks of a model, in the order of execution."""

    names: list[str]
    users: dict[str, set[int]]  # blocks that hold a parameter or buffer, by its name
    activations: list[int]  # bytes kept for the backward pass
    flops: list[int]  # of the forward pass
    crossing: list[int]  # bytes of the tensors that cross the cut after a block
    sends: list[int]  # bytes of these that travel; of the last block, bytes of outputs
    returns: list[int]  # the same of their gradients


class _Recorder(Execution):
    """Runs operations, each at the block at which a pipeline would, and notes what they need."""

    def __init__(self, mode: Any) -> None:
        shapes: Any = SimpleNamespace(infer=lambda *_: None)  # every operation has its values here
        super().__init__(0, shapes, self._send, self._measured, lambda found, _: found)
        self._mode = mode
        self.names: list[str] = []  # of blocks
        self.flops: Counter[int] = Counter()
        self.sent: list[tuple[int, int, Spec]] = []  # between two blocks
        self.kept: dict[int, tuple[int, int, StorageWeakRef]] = {}  # block and bytes of a storage; keeps its number

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Note that the backward pass needs a tensor."""
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]  # torch has not annotated it
        self.kept.setdefault(int(reference.cdata), (self.stage, storage.nbytes(), reference))
        return tensor

    def unit(self, module: nn.Module, path: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a block."""
        if path not in self.names:
            self.names.append(path)
        return self.run_at(self.names.index(path), forward, args, kwargs, None, path)

    def run_at(self, stage: int, *args: Any, **kwargs: Any) -> Any:
        before = self.stage, self._current
        self.stage = stage
        found = super().run_at(stage, *args, **kwargs)
        if not any(isinstance(item, StageTensor) for item in tree_leaves(found)):
            self.stage, self._current = before  # as a pipeline, which knows shapes without running anything
        return found

    def _send(self, value: torch.Tensor, spec: Spec, source: int, target: int) -> torch.Tensor:
        self.sent.append((source, target, spec))
        return value

    @contextmanager
    def _measured(self) -> Iterator[None]:
        with self._mode, FlopCounterMode(display=False) as counter:
            yield
        self.flops[self.stage] += counter.get_total_flops()


def record(
    model: nn.Module, args: Any, kwargs: Any, names: Sequence[str], traffic: str | None, *, fake: bool
) -> Recorded:
    """Record a forward pass of a model. With `fake`, no memory is needed, and no value is computed.

    Raises:
        ShapeError: a shape depends on values.
    """
    mode: Any = FakeTensorMode(allow_non_fake_inputs=True) if fake else nullcontext()
    recorder, paths = _Recorder(mode), names or [""]
    holders = _holders(model, paths)
    states: dict[str, torch.Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if fake:
        with mode:
            states = {name: _like(item) for name, item in states.items()}
            args, kwargs = tree_map(
                lambda item: _like(item) if isinstance(item, torch.Tensor) else item, (args, kwargs)
            )
    own = {StorageWeakRef(item.untyped_storage()).cdata for item in states.values()}  # type: ignore[no-untyped-call]

    def at_first(item: Any) -> Any:
        """Return a tensor that only the first stage has."""
        has_gradient = isinstance(item, torch.Tensor) and item.requires_grad
        return StageTensor.make(recorder, Spec.of(item), 0, item) if has_gradient else item

    given = {name: item if holders[name] else at_first(item) for name, item in states.items()}
    args, kwargs = tree_map(at_first, (args, kwargs))
    replaced = [(module, vars(module).get("forward")) for module in map(model.get_submodule, paths)]
    for path in paths:
        replace_forward(model.get_submodule(path), path, recorder.unit)
    try:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(recorder.keep, lambda tensor: tensor):
            outputs = torch.func.functional_call(model, given, args, kwargs)
    finally:
        for module, before in replaced:
            del module.forward
            if before is not None:
                module.forward = before
    left: list[Any] = [item for item in tree_leaves(outputs) if isinstance(item, torch.Tensor)]
    for item in left:  # the loss needs them
        value: Any = item.value if isinstance(item, StageTensor) else item
        recorder.keep(value)
    count = len(recorder.names)
    activations, crossing, sends, returns = ([0] * count for _ in range(4))
    for number, (block, size, _) in recorder.kept.items():
        activations[block] += size if number not in own else 0
    for source, target, spec in recorder.sent:
        values, size = torch.Size(spec.shape).numel(), wire_type(traffic, spec.dtype).itemsize
        for at in range(min(source, target), max(source, target)):
            crossing[at] += values * spec.dtype.itemsize
            sends[at] += values * size
            returns[at] += values * size * spec.requires_grad
    sends[-1] = sum(item.nbytes for item in left)  # not compressed
    order = {path: number for number, path in enumerate(recorder.names)}
    users = {name: {order[path] for path in own_paths if path in order} for name, own_paths in holders.items()}
    return Recorded(
        recorder.names, users, activations, [recorder.flops[at] for at in range(count)], crossing, sends, returns
    )


def _holders(model: nn.Module, paths: Sequence[str]) -> Mapping[str, set[str]]:
    """Return the blocks to which each parameter and buffer belongs, by its first name; shared ones to several."""
    first: dict[int, str] = {}
    found: dict[str, set[str]] = {}
    for title, item in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        name = first.setdefault(id(item), title)
        found.setdefault(name, set()).update(path for path in paths if not path or title.startswith(f"{path}."))
    return found


def _like(tensor: torch.Tensor) -> torch.Tensor:
    device = "cpu" if tensor.is_meta else tensor.device
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return made.requires_grad_(tensor.requires_grad)
