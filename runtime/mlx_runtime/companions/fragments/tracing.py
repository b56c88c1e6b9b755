"""The blocks of a model, with the memory and the time that each of them needs."""

import contextlib
import inspect
import itertools
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

import mlx_runtime
from mlx_runtime.companions.fragments.costs import Block, joined
from mlx_runtime.companions.fragments.recording import Recorded, ShapeError, record
from mlx_runtime.companions.fragments.scripted import OpenedModule, opened
from mlx_runtime.companions.sharding.blocks import repeated_blocks
from mlx_runtime.distributed.randomness import temporary_seed
from mlx_runtime.distributed.wrapping import unwrap
from mlx_runtime.errors import USER_ERRORS, ConfigError, short_message

ROUNDS = 3
"""Number of timed forward and backward passes; one before them is not timed."""

OURS = (str(Path(torch.__file__).parent), str(Path(mlx_runtime.__file__).parent), "<")


@dataclass(frozen=True)
class Trace:
    """The blocks of a model in the order of execution, and lines for the user about them."""

    blocks: list[Block]
    notes: list[str]


def trace(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    optimizers: Iterable[Optimizer] = (),
    *,
    traffic: str | None = None,
    device: torch.device | None = None,
) -> Trace:
    """Return the blocks of a model with the memory and the time that a batch needs.

    A block begins when its module is called, and ends where the next one begins: operations between modules belong to
    the block before them. Blocks are the members of repeated parts, like the layers of a transformer, and all other
    modules that have parameters and no blocks inside. Blocks that share parameters, and those between them, are one.

    Args:
        model: it may be on the meta device. Its values and gradients are not changed.
        args: arguments of a call.
        kwargs: keyword arguments of the call.
        optimizers: those of its parameters.
        traffic: `cfg.fragments.traffic`.
        device: for which times are given; None for that of the model.

    Raises:
        ConfigError: shapes depend on values, or the model fails.
    """
    model, kwargs = opened(unwrap(model)), kwargs or {}
    modes = {module: module.training for module in model.modules()}
    model.train()
    try:
        found, notes = _structure(model, args, kwargs, traffic)
        seconds, measured = _seconds(model, args, kwargs, found, device or device_of(model))
    finally:
        for module, mode in modes.items():
            module.training = mode
    states = {param: size for item in optimizers for param, size in states_after_step(item).items()}
    blocks = _sized(model, found, seconds, states)
    groups, shared = _groups(model, found)
    merged, index = [], 0
    for names in groups:
        merged.append(joined(blocks[index : index + len(names)]))
        index += len(names)
    closed = [
        f"{name or 'the model'} is a ScriptModule with branches, so it is one block"
        for name in _candidates(model) or [""]
        if _is_closed(model.get_submodule(name)) and [*model.get_submodule(name).children()]
    ]
    return Trace(merged, [*closed, *notes, *shared, *measured])


def states_after_step(optimizer: Optimizer) -> dict[nn.Parameter, int]:
    """Return the bytes of each parameter's state after the first step, taken by a copy on the meta device."""
    copies = {param: _without_data(param) for group in optimizer.param_groups for param in group["params"]}
    groups = [group | {"params": [copies[item] for item in group["params"]]} for group in optimizer.param_groups]
    kind: Any = type(optimizer)
    state: Mapping[Any, Any] = {copies[param]: values for param, values in optimizer.state.items() if param in copies}
    with contextlib.suppress(Exception), torch.no_grad():  # `step` may need a closure, or other arguments
        copy = kind(groups)
        inspect.unwrap(kind.step)(copy)  # without the hooks of all optimizers
        state = copy.state
    return {
        param: sum(value.nbytes for value in state.get(item, {}).values() if isinstance(value, torch.Tensor))
        for param, item in copies.items()
    }


def _without_data(param: torch.Tensor) -> nn.Parameter:
    made = nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=param.requires_grad)
    made.grad = torch.empty_like(made) if param.requires_grad else None
    return made


def _candidates(model: nn.Module) -> list[str]:
    """Return the paths of modules that may be blocks: repeated ones, and others with parameters and none inside."""
    repeated = set(repeated_blocks(model))

    def visit(module: nn.Module, path: str) -> Iterator[str]:
        if next(module.parameters(), None) is None:
            return
        below = [*module.named_children()]
        whole = type(module).__module__.startswith("torch.nn.") and not isinstance(
            module, nn.Sequential | nn.ModuleList | nn.ModuleDict
        )
        if path in repeated or whole or not below or _is_closed(module):
            yield path
            return
        for name, child in below:
            yield from visit(child, f"{path}.{name}" if path else name)

    return [path for path in visit(model, "") if path]


def _is_closed(module: nn.Module) -> bool:
    return isinstance(module, OpenedModule) and not module.is_open


def _structure(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], traffic: str | None
) -> tuple[Recorded, list[str]]:
    """Record a call on fake tensors or, if the model needs values, on real ones."""
    names, problem = _candidates(model), ""
    try:
        with temporary_seed(0):
            try:
                return record(model, args, kwargs, names, traffic, fake=True), []
            except ShapeError:
                raise
            except USER_ERRORS as error:
                problem = f"{_line(error)}{type(error).__name__}: {short_message(error)}"
                if _on_meta(model):
                    raise
                with _unchanged(model):
                    found = record(model, args, kwargs, names, traffic, fake=False)
        return found, [f"measured with real tensors, because the model needs values: {problem}"]
    except ShapeError as error:
        raise ConfigError(
            f"the model cannot be cut: {_line(error)}{error.func} returns a shape that depends on values, but stages "
            "exchange tensors of fixed shapes; use a mask or torch.where there"
        ) from error
    except USER_ERRORS as error:
        raise ConfigError(f"the model fails on the example rows: {_line(error)}{short_message(error)}") from error


def _line(error: BaseException) -> str:
    """Return `models.py:12: `, the innermost line of the user's code or of a library besides torch; or nothing."""
    import traceback  # here, as in `errors`

    frames = [item for item in traceback.extract_tb(error.__traceback__) if not item.filename.startswith(OURS)]
    frames = [item for item in frames if "site-packages" not in item.filename] or frames
    if not frames:
        return ""
    file = os.path.relpath(frames[-1].filename)
    return f"{frames[-1].filename if file.startswith('..') else file}:{frames[-1].lineno}: "


def _groups(model: nn.Module, found: Recorded) -> tuple[list[list[str]], list[str]]:
    """Return the names of the blocks that are one, because they share parameters, and lines about them.

    Buffers that several blocks read, like tables of positions, may be copied.
    """
    params = dict(model.named_parameters())
    ends = list(range(len(found.names)))  # last block of the group that begins with each one
    notes = {}
    for name, users in found.users.items():
        if len(users) > 1 and name in params:
            first, last = min(users), max(users)
            ends[first] = max(ends[first], last)
            notes[first, last] = (
                f"{found.names[first]} and {found.names[last]} share {name}, so all from one to the other are one block"
            )
    groups: list[list[str]] = []
    end = -1
    for index, name in enumerate(found.names):
        if index > end:
            groups.append([])
        end = max(end, ends[index])
        groups[-1].append(name)
    return groups, list(notes.values())


def _sized(
    model: nn.Module, found: Recorded, seconds: Sequence[float], states: Mapping[nn.Parameter, int]
) -> list[Block]:
    """Return a block for each name, with the parameters that it is the first to use."""
    counts: list[Counter[str]] = [Counter() for _ in found.names]
    params = dict(model.named_parameters())
    for name, tensor in (*params.items(), *model.named_buffers()):
        users = found.users.get(name) or {_owner(name, found.names)}
        count, size = counts[min(users)], tensor.numel() * tensor.element_size()
        for index in users if name not in params else [min(users)]:
            counts[index]["weights"] += size
        if name in params:
            count["parameters"] += tensor.numel()
            count["gradients"] += size * tensor.requires_grad
            count["states"] += states.get(params[name], 0)
    sizes = (found.activations, found.sends, found.returns)
    facts = zip(found.names, counts, *sizes, seconds, found.crossing, strict=True)
    return [
        Block(
            name,
            count["parameters"],
            count["weights"],
            count["gradients"],
            count["states"],
            activations,
            sends,
            returns,
            time_s,
            crossing,
        )
        for name, count, activations, sends, returns, time_s, crossing in facts
    ]


def _owner(name: str, names: Sequence[str]) -> int:
    """Return the block of a parameter that no operation uses."""
    return next((index for index, block in enumerate(names) if name.startswith(f"{block}.")), 0)


def _seconds(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], found: Recorded, device: torch.device
) -> tuple[list[float], list[str]]:
    """Return the seconds of each block for forward and backward: measured, or estimated from its FLOPs."""
    needed = sum(found.activations) + sum(item.numel() * item.element_size() for item in model.parameters())
    if _on_meta(model) or any(item.is_meta for item in tree_leaves((args, kwargs)) if isinstance(item, torch.Tensor)):
        why = "the model or its inputs are on the meta device"
    elif needed > available_bytes(device):
        why = f"it needs {needed / 1e9:,.1f} GB here, and {available_bytes(device) / 1e9:,.1f} GB are free"
    else:
        with _unchanged(model), temporary_seed(0):
            rounds = [_timed(model, args, kwargs, found.names, device) for _ in range(ROUNDS + 1)][1:]
        return [min(times) for times in zip(*rounds, strict=True)], []  # others may use this machine, too
    rate = flops_per_s(device)
    note = f"times are estimated from FLOPs, at {rate / 1e9:,.0f} GFLOP/s as measured here, because {why}"
    return [3 * flops / rate for flops in found.flops], [note]  # the backward pass takes twice the forward pass


def _timed(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], names: Sequence[str], device: torch.device
) -> list[float]:
    """Return the seconds that each block takes in one forward and backward pass."""
    marks: list[tuple[float, int]] = []

    def mark(index: int) -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        marks.append((time.perf_counter(), index))

    def begins(index: int) -> Callable[..., None]:
        return lambda *_: mark(index)

    def ends(index: int) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, outputs: Any) -> None:
            for item in tree_leaves(outputs):
                if isinstance(item, torch.Tensor) and item.requires_grad:
                    item.register_hook(lambda _: mark(index))  # type: ignore[no-untyped-call]  # when its gradient is known

        return hook

    hooks, modules = [], dict(model.named_modules())
    for index, name in enumerate(names):
        module = modules[name]
        hooks += [module.register_forward_pre_hook(begins(index)), module.register_forward_hook(ends(index))]
    try:
        with torch.enable_grad():
            mark(0)
            outputs = model(*args, **kwargs)
            mark(len(names) - 1)
            loss = [item.float().sum() for item in tree_leaves(outputs) if _has_gradient(item)]
            params = [item for item in model.parameters() if item.requires_grad]
            if loss and params:
                torch.autograd.grad(torch.stack(loss).sum(), params, allow_unused=True)
            mark(0)
    finally:
        for hook in hooks:
            hook.remove()
    spent = [0.0] * len(names)
    for (start, index), (end, _) in itertools.pairwise(marks):
        spent[index] += end - start
    return spent


def _has_gradient(item: Any) -> bool:
    return isinstance(item, torch.Tensor) and item.requires_grad


@contextlib.contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Restore the buffers of a model, like running statistics, at the end of the block."""
    buffers = [(item, item.detach().clone()) for item in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model; the CPU for one on the meta device."""
    return next((item.device for item in model.parameters() if not item.is_meta), torch.device("cpu"))


def _on_meta(model: nn.Module) -> bool:
    return any(item.is_meta for item in (*model.parameters(), *model.buffers()))


def available_bytes(device: torch.device) -> int:
    """Return the free memory of a device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def flops_per_s(device: torch.device) -> float:
    """Measure products of matrices."""
    size = 1024
    matrix = torch.ones(size, size, device=device)
    times = []
    for _ in range(ROUNDS + 1):
        start = time.perf_counter()
        (matrix @ matrix).sum().item()
        times.append(time.perf_counter() - start)
    return 2 * size**3 / min(times[1:])
