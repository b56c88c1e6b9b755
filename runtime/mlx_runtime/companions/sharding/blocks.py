"""The blocks of a model: modules that are gathered, and recomputed, one at a time."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mlx_runtime.errors import ConfigError, suggest
from mlx_runtime.loop.forward import wrap_forward

_CURE = "print(model) shows their paths, like 'layers.*'"


def blocks_of(group: object, models: Mapping[str, nn.Module]) -> dict[str, list[str]]:
    """Return the paths of the blocks of each model of a group: repeated blocks, or those of `Models.shard_plan`.

    Raises:
        ConfigError: the plan does not fit the models.
    """
    plans = getattr(group, "shard_plan", {})
    for name in plans:
        if name not in models:
            raise ConfigError(f"Models.shard_plan names {name!r}, which is not a model.{suggest(name, models)}")
    return {
        name: planned_blocks(model, plans[name], f"Models.shard_plan[{name!r}]")
        if name in plans
        else repeated_blocks(model)
        for name, model in models.items()
    }


def repeated_blocks(model: nn.Module) -> list[str]:
    """Return the paths of the members of each `ModuleList` and `Sequential` whose class occurs more than once in it.

    Blocks within blocks and blocks without parameters are left out.
    """
    found: list[str] = []

    def visit(module: nn.Module, path: str) -> None:
        repeated: set[type] = set()
        if isinstance(module, nn.ModuleList | nn.Sequential):
            counts = Counter(type(child) for child in module)
            repeated = {kind for kind, count in counts.items() if count > 1}
        for name, child in module.named_children():
            below = f"{path}.{name}" if path else name
            if type(child) in repeated and _callable(child) and next(child.parameters(), None) is not None:
                found.append(below)
            else:
                visit(child, below)

    visit(model, "")
    return found


def planned_blocks(model: nn.Module, patterns: Any, title: str) -> list[str]:
    """Return the paths of the modules that a plan selects. `title` names the plan in errors.

    Raises:
        ConfigError: it is not a list of patterns, or a pattern selects nothing, or a container that is never called.
    """
    if not isinstance(patterns, list | tuple) or not all(isinstance(item, str) for item in patterns):
        raise ConfigError(f"{title} is {patterns!r:.60}; write a list of module paths, like ['layers.*']")
    found: dict[str, None] = {}  # a set that keeps its order
    for pattern in patterns:
        matches = select_modules(model, pattern)
        if not matches:
            raise ConfigError(f"{title}: {pattern!r} matches no module; {_CURE}")
        found |= dict.fromkeys(matches)
    for path in found:
        module = model.get_submodule(path)
        if not _callable(module):
            kind = type(module).__name__
            raise ConfigError(f"{title}: {path} is a {kind}, which is never called; write {path + '.*'!r}")
    return [*found]


def select_modules(model: nn.Module, pattern: str) -> list[str]:
    """Return the paths of modules that match a pattern; `*` matches any text without a dot."""
    wanted = pattern.split(".")
    parts = [path.split(".") for path, _ in model.named_modules() if path]
    return [".".join(part) for part in parts if len(part) == len(wanted) and all(map(fnmatchcase, part, wanted))]


def without_shared(model: nn.Module, blocks: Iterable[str]) -> list[str]:
    """Leave out blocks that share parameters with the rest of the model, such as tied weights.

    The blocks of a group are gathered together, so a parameter belongs to one group only.
    """
    kept = set(blocks)
    while True:
        owners: dict[int, set[str]] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            parts = path.split(".")
            above = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
            owner = next((name for name in above if name in kept), "")
            for param in module.parameters(recurse=False):
                owners.setdefault(id(param), set()).add(owner)
        shared = set().union(*(found for found in owners.values() if len(found) > 1)) & kept
        if not shared:
            return [path for path in blocks if path in kept]
        kept -= shared


def recompute_blocks(models: Mapping[str, nn.Module], blocks: Mapping[str, list[str]], wanted: bool | str) -> None:
    """Recompute the activations of the blocks of each model, or of the modules that a pattern selects.

    Raises:
        ConfigError: there is no such block or module.
    """
    if not wanted:
        return
    if isinstance(wanted, str):
        blocks = {name: select_modules(model, wanted) for name, model in models.items()}
    if not any(blocks.values()):
        if not isinstance(wanted, str):
            cure = "name them with a pattern, like 'encoder.*'"
            raise ConfigError(f"cfg.activation_checkpointing is true, but no model has blocks that repeat; {cure}")
        raise ConfigError(f"cfg.activation_checkpointing: {wanted!r} matches no module; {_CURE}")
    for name, paths in blocks.items():
        for module in {id(item): item for item in map(models[name].get_submodule, paths)}.values():
            recompute(module)


def recompute(module: nn.Module) -> None:
    """Store only the inputs of a module's `forward`, and run it again in the backward pass.

    Running statistics count each batch once.
    """
    norms = [item for item in module.modules() if isinstance(item, nn.modules.batchnorm._NormBase)]

    def twice(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if norms and not torch.compiler.is_compiling():  # a compiled graph updates the statistics outside of the region
            kwargs["context_fn"] = lambda: (contextlib.nullcontext(), _without_statistics(norms))
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    wrap_forward(module, twice)


@contextlib.contextmanager
def _without_statistics(norms: Iterable[Any]) -> Iterator[None]:
    """Keep the running statistics of normalizations unchanged, by giving the batch no weight in them."""
    before = [(item.momentum, item.num_batches_tracked) for item in norms]
    for item in norms:
        item.momentum, item.num_batches_tracked = 0.0, None
    try:
        yield
    finally:
        for item, (momentum, count) in zip(norms, before, strict=True):
            item.momentum, item.num_batches_tracked = momentum, count


def _callable(module: Any) -> bool:
    return not (isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward is nn.Module.forward)
