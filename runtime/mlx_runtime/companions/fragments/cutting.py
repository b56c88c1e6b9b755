"""Cuts a model into stages: consecutive units, which are its blocks and the modules beside them."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

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

    def folded(self, workers: int) -> "Cut":
        """Return the worker of each module and parameter, if workers take turns with stages."""
        return Cut(
            {path: stage % workers for path, stage in self.units.items()},
            {name: stage % workers for name, stage in self.loose.items()},
        )


def units_of(model: nn.Module, blocks: Iterable[str]) -> list[str]:
    """Return the paths of the units of a model: its blocks, and the largest modules with parameters beside them."""
    chosen = set(blocks)
    found: list[str] = []

    def visit(module: nn.Module, path: str) -> None:
        for name, child in module.named_children():
            below = f"{path}.{name}" if path else name
            if below in chosen:
                found.append(below)
            elif any(block.startswith(f"{below}.") for block in chosen) or _is_list(child):
                visit(child, below)
            elif next(child.parameters(), None) is not None or next(child.buffers(), None) is not None:
                found.append(below)

    visit(model, "")
    return found


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.ModuleDict)  # never called itself


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
            "modules in Models.shard_plan, lower cfg.fragments.stages or chunks, or keep the model whole on the last "
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
    total = [0]
    for size in sizes:
        total.append(total[-1] + size)
    best: list[list[tuple[int, int]]] = [[(end_total, 0) for end_total in total]]  # by stages and end: cost and begin
    for count in range(1, stages):
        row = [(0, 0)] * (len(sizes) + 1)
        for end in range(count + 1, len(sizes) + 1):
            row[end] = min(
                (max(best[count - 1][begin][0], total[end] - total[begin]), begin) for begin in range(count, end)
            )
        best.append(row)
    numbers, end = [0] * len(sizes), len(sizes)
    for stage in range(stages - 1, -1, -1):
        begin = best[stage][end][1]
        numbers[begin:end] = [stage] * (end - begin)
        end = begin
    return numbers


def read_plan(path: Path, name: str, stages: int) -> tuple[list[str], list[int]] | None:
    """Return the blocks of a model in a plan, and the position of the last block of each stage.

    None if the plan is for another model.

    Raises:
        ConfigError: the plan cannot be read, has another number of stages, or pipelines that differ.
    """
    try:
        plan: Mapping[str, Any] = json.loads(path.read_text())
        blocks = [str(item) for item in plan["blocks"]]
        cuts = [[(int(stage["first"]), int(stage["last"])) for stage in item["stages"]] for item in plan["clusters"]]
        model = plan["model"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"cfg.fragments.plan={path} cannot be read ({error}); `mlx train clusterize` writes one"
        ) from error
    if model != name:
        return None
    for stage_cuts in cuts:
        expected = 0
        for first, last in stage_cuts:
            if first != expected or not first <= last < len(blocks):
                raise ConfigError(
                    f"{path} has a stage with blocks {first} to {last}; it must begin at {expected}, have at least one "
                    f"block, and end before {len(blocks)}"
                )
            expected = last + 1
    clusters = [[last for _, last in stage_cuts] for stage_cuts in cuts]
    if any(ends != clusters[0] for ends in clusters):
        raise ConfigError(
            f"{path} cuts models.{name} differently in its clusters, which cfg.strategy=pipeline cannot train; "
            "plan again with `mlx train clusterize --same-cuts`, or `--clusters 1`"
        )
    if not clusters or len(clusters[0]) != stages:
        found = len(clusters[0]) if clusters else 0
        cure = "use cfg.strategy=ddp" if found == 1 else f"set cfg.fragments.stages={found}"
        raise ConfigError(f"{path} has {found} stages per cluster, and the run {stages}; {cure}")
    return blocks, clusters[0]
