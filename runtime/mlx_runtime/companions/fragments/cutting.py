"""Cuts a model into stages: consecutive units, which are its blocks and the modules beside them."""

from bisect import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from mlx_runtime.companions.fragments.costs import Block, Costs, Machine
from mlx_runtime.companions.fragments.scripted import OpenedModule
from mlx_runtime.errors import ConfigError


@dataclass(frozen=True)
class Cut:
    """The stages of a model.

    Attributes:
        units: stage of each module that one stage holds, by path, in order. No unit is within another; "" is the model.
        loose: stage of each parameter outside of units, or shared by units of several stages, by each of its names.
            Its value is sent to the other stages in each forward pass.
    """

    units: Mapping[str, int]
    loose: Mapping[str, int]

    def stage_of(self, name: str) -> int | None:
        """Return the stage of a parameter or buffer by name; None for buffers outside of units, which all hold."""
        if name in self.loose:
            return self.loose[name]
        parts = name.split(".")
        above = (".".join(parts[:end]) for end in range(len(parts) - 1, -1, -1))
        return next((self.units[path] for path in above if path in self.units), None)


def units_of(model: nn.Module, blocks: Iterable[str]) -> list[str]:
    """Return the paths of the units of a model: its blocks, and the largest modules with parameters beside them."""
    chosen = set(blocks)
    found: list[str] = []

    def visit(module: nn.Module, path: str) -> None:
        for name, child in module.named_children():
            below = f"{path}.{name}" if path else name
            whole = below in chosen or (isinstance(child, OpenedModule) and not child.is_open)
            if not whole and (any(block.startswith(f"{below}.") for block in chosen) or _has_units(child)):
                visit(child, below)
            elif whole or next(child.parameters(), None) is not None or next(child.buffers(), None) is not None:
                found.append(below)

    visit(model, "")
    return found


def _has_units(module: nn.Module) -> bool:
    """Return True for lists of modules, which are never called, and for the graphs of scripts."""
    if isinstance(module, OpenedModule):
        return next(module.parameters(recurse=False), None) is None
    return isinstance(module, nn.ModuleList | nn.ModuleDict)


def cut(name: str, model: nn.Module, blocks: Sequence[str], stages: int, ends: Sequence[int] | None = None) -> Cut:
    """Return the stages of a model.

    Args:
        name: Name of the model, for errors.
        model: The whole model; may be on the meta device.
        blocks: Paths of its blocks in order.
        stages: Number of stages.
        ends: Position of the last block of each stage; None cuts into stages with about as many parameters.

    Raises:
        ConfigError: the model has too few units.
    """
    paths = units_of(model, blocks)
    if len(paths) < stages:
        known = f": {', '.join(paths)}" if paths else ""
        raise ConfigError(
            f"models.{name} cannot be cut into {stages} stages: it has {len(paths)} blocks{known}. Name smaller "
            "modules in Models.shard_plan, lower cfg.fragments.stages, or keep the model whole on the last "
            f'worker: Models.strategies = {{"{name}": "ddp"}}'
        )
    if ends is None:
        sizes = [sum(item.numel() for item in model.get_submodule(path).parameters()) for path in paths]
        numbers = balanced(sizes, stages)
    else:
        modules = dict(model.named_modules())
        unknown = [path for path in blocks if path not in modules]
        if unknown or ends[-1] != len(blocks) - 1:
            found = f"the model has no {unknown[0]}" if unknown else f"it ends at block {ends[-1]} of {len(blocks)}"
            raise ConfigError(
                f"cfg.fragments.plan does not match models.{name}: {found}; plan again with `mlx train clusterize`"
            )
        places = {path: next(stage for stage, end in enumerate(ends) if at <= end) for at, path in enumerate(blocks)}
        numbers, last = [], 0
        for path in paths:  # a unit beside blocks belongs to the stage of the one before it
            last = places.get(path, last)
            numbers.append(last)
    units = dict(zip(paths, numbers, strict=True))
    made = Cut(units, {})
    loose: dict[str, int] = {}
    names: dict[int, list[str]] = {}
    for title, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(title)
    for titles in names.values():
        holders = {made.stage_of(title) or 0 for title in titles}
        if len(holders) > 1 or made.stage_of(titles[0]) is None:
            loose |= dict.fromkeys(titles, min(holders))
    return Cut(units, loose)


def balanced(sizes: Sequence[int], stages: int) -> list[int]:
    """Return the stage of each of consecutive items, so that the largest stage is as small as possible.

    No stage is empty.
    """
    blocks = [Block("", size, 0, seconds=size) for size in sizes]
    _, starts = Costs(blocks, [Machine("", float("inf"))] * stages, 1, 0).cut(range(stages))
    return [bisect(starts, item) - 1 for item in range(len(sizes))]


def tensors_of(model: nn.Module, *, aliases: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and buffers, shared ones once, or by each of their names."""
    yield from model.named_parameters(remove_duplicate=not aliases)
    yield from model.named_buffers(remove_duplicate=not aliases)
