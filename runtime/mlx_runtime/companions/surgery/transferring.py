"""Weights from elsewhere: found by the driver of a new run, and loaded into its models by each worker."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from mlx_runtime import companions
from mlx_runtime.companions.surgery import rules
from mlx_runtime.companions.surgery.rules import Shape, Transfer
from mlx_runtime.companions.surgery.sources import MARK, TENSORS, find, mean, read_alike
from mlx_runtime.config.building import build_cfg
from mlx_runtime.distributed.collectives import broadcast
from mlx_runtime.distributed.wrapping import is_sharded, unwrap, whole
from mlx_runtime.driver.request import RunConfig
from mlx_runtime.errors import ConfigError, UsageError, suggest
from mlx_runtime.loop.context import RunContext
from mlx_runtime.loop.options import TrainConfig
from mlx_runtime.loop.reporting import Reporter
from mlx_runtime.runs.folder import named_run
from mlx_runtime.storage.files import storage_at, storage_root, to_json

TABLE = "transfer.json"
"""File in the folder of a run: the origin of each tensor, by model."""

Part = tuple[torch.Tensor, Shape]
"""Values, and the size of the part of a tensor that they fill: its first rows in each dimension."""


def pin(config: RunConfig) -> RunConfig:
    """Return the config of a new run with pinned sources. Called by its driver, before anything is written.

    Raises:
        ConfigError: there is no such model or source, or a rule fits none of its tensors.
    """
    path, given, pinned = config.cfg.restore_checkpoint_path, config.cfg.transfer or {}, {}
    models = [name for name in config.tree.get("models", {}) if not name.startswith("_")]
    run_of = partial(named_run, root=storage_root(config.cfg.storage_path), experiment=config.cfg.name)
    notes = config.notes
    if path and path.endswith(TENSORS):
        path, given = None, {name: {"source": path} for name in models} | given
    elif path:  # perhaps of --from, with the config of a run that began with a transfer
        given, note = {}, "note      all weights are from cfg.restore_checkpoint_path, none of cfg.transfer"
        notes = notes if config.checkpoint else (*notes, note)
    for name, node in given.items():
        if name not in models:
            raise ConfigError(f"cfg.transfer.{name}: there is no model {name!r}.{suggest(name, models)}")
        transfer = Transfer.parse(node, f"cfg.transfer.{name}")
        try:
            transfer = replace(transfer, sources=tuple(find(item, run_of) for item in transfer.sources))
        except UsageError as error:
            raise ConfigError(f"{transfer.key}.source: {error}") from error
        found, tensors = read_alike(transfer, name)
        rules.named(transfer, tensors[0], found[0].title)
        pinned[name] = {**node, "source": [item.pinned for item in found]}
    changed = {"restore_checkpoint_path": path, "transfer": pinned or None}
    tree, unresolved = (one | {"cfg": one["cfg"] | changed} for one in (config.tree, config.unresolved))
    return replace(config, tree=tree, unresolved=unresolved, cfg=build_cfg(tree["cfg"], TrainConfig), notes=notes)


def hashes(pinned: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return the hashes of the sources in a pinned `cfg.transfer`, by model and source."""
    return {name: dict(item.split(MARK) for item in node["source"]) for name, node in pinned.items()}


def transfer(context: RunContext, reporter: Reporter) -> None:
    """Load weights into the models that `cfg.transfer` names. Every worker must call this.

    Raises:
        ConfigError: a source or a rule does not fit.
    """
    models, tables = context.groups.members("models"), {}
    shares, writes = context.shares_storage, context.topology.writes
    for name, node in context.cfg.transfer.items():
        targets = named_tensors(unwrap(models[name]))
        plan = None
        if shares or writes:
            shapes = {names: tuple(item.shape) for names, item in targets.items()}
            plan = Plan(Transfer.parse(node, f"cfg.transfer.{name}"), name, shapes)
        for names, target in targets.items():
            part = plan.part(names, target.dtype) if plan is not None else None
            part = part if shares else broadcast(part)
            if part is not None:
                _fill(target, *part)
        if plan is not None:
            tensors = [*map(vars, plan.treatments.values())]
            tables[name] = {"sources": node["source"], "tensors": tensors, "unused": plan.unused}
            for line in plan.lines():
                reporter.notice(line)
    if writes:
        storage_at(context.folder.location).write(to_json(tables).encode(), TABLE)


class Plan:
    """The values for the tensors of one model.

    Args:
        given: the transfer.
        model: name of the model.
        targets: shapes of its tensors by all of their names; None for the tensors of the source that the rules leave.

    Attributes:
        sources: the sources.
        tensors: the tensors of the model in each source.
        treatments: origins of the tensors, by all of their names.
        unused: tensors of the source that no rule drops and no tensor of the model takes.

    Raises:
        ConfigError: a source or a rule does not fit.
    """

    def __init__(self, given: Transfer, model: str, targets: Mapping[tuple[str, ...], Shape] | None) -> None:
        self._title, self._model = f"{given.key}: ", model
        self.sources, self.tensors = read_alike(given, model)
        named = rules.named(given, self.tensors[0], self.sources[0].title)
        shapes = {name: tuple(item.shape) for name, item in self.tensors[0].items()}
        targets = {(name,): shapes[source] for name, (source, _) in named.items()} if targets is None else targets
        made = rules.treatments(given, named, shapes, targets)
        self.treatments = {item.names: item for item in made}
        self._groups: dict[str, list[str]] = {}  # names of tensors, by line of the table
        for item in made:
            self._groups.setdefault(item.how, []).append(item.names[0])
        self._groups["not used"] = self.unused = rules.unused(named, made)

    def part(self, names: tuple[str, ...], dtype: torch.dtype) -> Part | None:
        """Return the values for a tensor in its type, or None if it keeps its initial values.

        Raises:
            ConfigError: the type cannot hold the values, or the source has others under another name of the tensor.
        """
        item = self.treatments[names]
        if not item.sources:
            return None
        value, *others = (mean(name, self.tensors) for name in item.sources)
        if not all(torch.equal(value, other) for other in others):
            raise ConfigError(f"{self._title}{' and '.join(names)} are one tensor here, and differ in the source")
        value = value[tuple(map(slice, item.region))]
        made = value.to(dtype)
        there, here = (str(kind).removeprefix("torch.") for kind in (value.dtype, dtype))
        if len(self.sources) > 1 and not value.is_floating_point():
            self._groups.setdefault("of the first source, not averaged", []).append(names[0])
        if there != here and not (value.is_floating_point() and dtype.is_floating_point):
            raise ConfigError(f"{self._title}{names[0]} is {here} here and {there} in the source; use fresh")
        if there != here and torch.promote_types(value.dtype, dtype) != dtype:
            if value.isfinite().all() and not made.isfinite().all():
                raise ConfigError(f"{self._title}{here} cannot hold the values of {names[0]}, {there} in the source")
            self._groups.setdefault(f"rounded from {there} to {here}", []).append(names[0])
        return made, item.region

    def lines(self) -> list[str]:
        """Return a table with a line per group of tensors, once all parts have been taken."""
        groups = [f"{len(names):5,}  {how}: {rules.some(names)}" for how, names in self._groups.items() if names]
        titles = " and ".join(item.title for item in self.sources)
        return [f"transfer  {self._model} from {titles}", *(f"          {line}" for line in groups)]


def named_tensors(model: torch.nn.Module) -> dict[tuple[str, ...], torch.Tensor]:
    """Return the parameters and saved buffers of a model by all of their names."""
    held = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
    names: dict[int, list[str]] = {}
    for name in model.state_dict():
        if name in held:
            names.setdefault(id(held[name]), []).append(name)
    return {tuple(tied): held[tied[0]] for tied in names.values()}


def merged(part: Part, initial: torch.Tensor) -> torch.Tensor:
    """Return the values of a whole tensor, given those of a part, and its initial values."""
    value, sizes = part
    if sizes == tuple(initial.shape) or initial.is_meta:
        return value
    made = initial.clone()
    made[tuple(map(slice, sizes))] = value.to(made.device)
    return made


@torch.no_grad()
def _fill(target: torch.Tensor, value: torch.Tensor, sizes: Shape) -> None:
    """Copy values into the first rows of a tensor in each dimension. Every worker must call this."""
    value = merged((value, sizes), whole(target.detach()) if sizes != tuple(target.shape) else target)
    if is_sharded(target):
        companions.part("sharding.sharing").fill(target.detach(), value)
    elif not target.is_meta:  # of another stage
        target.copy_(value)
