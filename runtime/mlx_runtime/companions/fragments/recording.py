"""The operations of a forward pass, by block: what they keep for the backward pass, and what crosses each cut.

Uses parts of torch 2.13 that are not documented: fake tensors, which have shapes but no memory, and dispatch modes,
which see every operation below autograd.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from mlx_runtime.companions.fragments.wire import wire_bytes

View = tuple[Any, ...]
"""Offset, shape and strides of a tensor in its storage."""


class ShapeError(Exception):
    """The shape of a tensor depends on values."""


@dataclass
class _Memory:
    """A storage, and the views of it that operations have used."""

    reference: StorageWeakRef  # keeps its number from being reused
    size: int
    views: dict[View, "_Use"] = field(default_factory=dict)

    def share(self, uses: Sequence["_Use"]) -> tuple[int, int]:
        """Return the bytes of views, which may overlap, in memory and as they travel."""
        size, sent = sum(use.size for use in uses), sum(use.sent for use in uses)
        return (size, sent) if size <= self.size else (self.size, sent * self.size // size)


@dataclass
class _Use:
    """Blocks that use a view: the one that made it, or 0 for an input of the model, and the last one."""

    first: int
    last: int
    size: int
    sent: int  # bytes that travel
    has_gradient: bool = False


@dataclass(frozen=True)
class Recorded:
    """Facts about the blocks of a model, in the order of execution."""

    names: list[str]
    users: dict[str, set[int]]  # blocks that use a parameter or buffer, by its name
    activations: list[int]  # bytes kept for the backward pass
    flops: list[int]  # of the forward pass
    crossing: list[int]  # bytes of the tensors that cross the cut after a block
    sends: list[int]  # bytes of these that travel; of the last block, bytes of outputs
    returns: list[int]  # the same of their gradients


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has not annotated it, as below
    """Records a forward pass within `with`, whose blocks begin when the modules `names` are called first."""

    def __init__(self, states: Mapping[str, torch.Tensor], names: Sequence[str], traffic: str | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._traffic = traffic
        self._order: list[str] = []
        self._states: dict[int, str] = {}
        self._memories: dict[int, _Memory] = {}
        self._kept: dict[int, int] = {}  # block that first kept a storage
        self._flops = [0] * max(1, len(names))
        self._users: dict[str, set[int]] = {name: set() for name in states}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor)
        for name, tensor in states.items():
            self._states[self._memory(tensor)] = name

    def begins(self, name: str) -> None:
        """Note that a module of `names` is called."""
        if name not in self._order:
            self._order.append(name)

    @property
    def _block(self) -> int:
        return max(0, len(self._order) - 1)

    def __enter__(self) -> "Recorder":
        self._hooks.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._hooks.__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for tensor in _tensors((args, kwargs)):
            self._use(tensor)
        if torch.Tag.dynamic_output_shape in func.tags and _depends_on_values(func, args):
            raise ShapeError(str(func.name()).partition(".")[0])
        found = func(*args, **kwargs)
        if (count := flop_registry.get(func.overloadpacket)) is not None:
            self._flops[self._block] += count(*args, **kwargs, out_val=found)
        for tensor in _tensors(found):
            self._use(tensor)
        return found

    def _memory(self, tensor: torch.Tensor) -> int:
        reference = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        if reference.cdata not in self._memories:
            self._memories[reference.cdata] = _Memory(reference, tensor.untyped_storage().nbytes())
        return int(reference.cdata)

    def _use(self, tensor: torch.Tensor) -> None:
        number = self._memory(tensor)
        if (name := self._states.get(number)) is not None:
            self._users[name].add(self._block)
            return
        view = (tensor.storage_offset(), tensor.shape, tensor.stride())
        size = tensor.numel() * tensor.element_size()
        sent = wire_bytes(self._traffic, tensor.shape, tensor.dtype)
        use = self._memories[number].views.setdefault(view, _Use(self._block, self._block, size, sent))
        use.last = self._block
        use.has_gradient |= tensor.requires_grad

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        number = self._memory(tensor)
        if number not in self._states:
            self._kept.setdefault(number, self._block)
        return tensor

    def recorded(self, outputs: Any, inputs: Any) -> Recorded:
        """Return the facts after the pass, which has these inputs and outputs."""
        count = max(1, len(self._order))
        for tensor in _tensors(outputs):
            self._use(tensor)
            self._keep(tensor)  # for the loss
        for tensor in _tensors(inputs):
            for use in self._memories[self._memory(tensor)].views.values():
                use.first = 0
        activations = [0] * count
        for number, block in self._kept.items():
            activations[block] += self._memories[number].size
        crossing, sends, returns = [0] * count, [0] * count, [0] * count
        for memory in self._memories.values():
            for cut in range(count - 1):
                uses = [use for use in memory.views.values() if use.first <= cut < use.last]
                size, sent = memory.share(uses)
                crossing[cut] += size
                sends[cut] += sent
                returns[cut] += memory.share([use for use in uses if use.has_gradient])[1]
        sends[-1] = sum(item.nbytes for item in _tensors(outputs))  # not compressed
        return Recorded(self._order or [""], self._users, activations, self._flops[:count], crossing, sends, returns)


def record(
    model: nn.Module, args: Any, kwargs: Any, names: Sequence[str], traffic: str | None, *, fake: bool
) -> Recorded:
    """Record a forward pass of a model. With `fake`, no memory is needed, and no value is computed.

    Raises:
        ShapeError: a shape depends on values.
    """
    states = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if not fake:
        return _recorded(model, states, args, kwargs, names, traffic, lambda: model(*args, **kwargs))
    with FakeTensorMode(allow_non_fake_inputs=True):
        states = {name: _like(tensor) for name, tensor in states.items()}
        args, kwargs = tree_map(lambda item: _like(item) if isinstance(item, torch.Tensor) else item, (args, kwargs))

        def call() -> Any:
            return torch.func.functional_call(model, states, args, kwargs)

        return _recorded(model, states, args, kwargs, names, traffic, call)


def _recorded(
    model: nn.Module,
    states: Mapping[str, torch.Tensor],
    args: Any,
    kwargs: Any,
    names: Sequence[str],
    traffic: str | None,
    call: Callable[[], Any],
) -> Recorded:
    recorder = Recorder(states, names, traffic)
    hooks = [
        module.register_forward_pre_hook(lambda *_, name=name: recorder.begins(name), prepend=True)
        for name, module in model.named_modules()
        if name in names
    ]
    try:
        with torch.enable_grad(), recorder:
            outputs = call()
        return recorder.recorded(outputs, (args, kwargs))
    finally:
        for hook in hooks:
            hook.remove()


def _like(tensor: torch.Tensor) -> torch.Tensor:
    device = "cpu" if tensor.is_meta else tensor.device
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return made.requires_grad_(tensor.requires_grad)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [item for item in tree_leaves(values) if isinstance(item, torch.Tensor)]


def _depends_on_values(func: Any, args: tuple[Any, ...]) -> bool:
    """Return False for an index of whole numbers, which has a fixed shape."""
    if func.overloadpacket is not torch.ops.aten.index:
        return True
    return any(item.dtype in (torch.bool, torch.uint8) for item in _tensors(args[1]))
