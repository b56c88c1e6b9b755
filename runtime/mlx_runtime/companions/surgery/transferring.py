"""Weights from elsewhere: found by the driver of a new run, and loaded into its models by each worker."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from mlx_runtime import companions
from mlx_runtime.companions.sharding.tensor_files import content
from mlx_runtime.companions.surgery import rules
from mlx_runtime.companions.surgery.sources import MARK, find, mean, read_alike, sources_of
from mlx_runtime.config.building import build_cfg
from mlx_runtime.distributed.collectives import broadcast
from mlx_runtime.distributed.wrapping import is_sharded, unwrap, whole
from mlx_runtime.driver.request import RunConfig
from mlx_runtime.errors import ConfigError, UsageError, suggest
from mlx_runtime.loop.context import RunContext
from mlx_runtime.loop.options import TrainConfig
from mlx_runtime.loop.reporting import Reporter
from mlx_runtime.runs.checkpoints.groups import stateful
from mlx_runtime.runs.checkpoints.store import CheckpointStore
from mlx_runtime.runs.folder import named_run
from mlx_runtime.sections import Transfer
from mlx_runtime.storage.files import storage_at, storage_root, to_json
from mlx_runtime.storage.redaction import redact


def pin(config: RunConfig) -> RunConfig:
    """Return the config of a run without checkpoints, with pinned sources. Called by its driver, which writes it then.

    Raises:
        ConfigError: there is no such model or source, or a rule fits none of its tensors.
        UsageError: there is a checkpoint to start from, too.
    """
    if config.run is not None and CheckpointStore(config.run.checkpoints).any():
        return config
    pinned: dict[str, Any] = {}
    run_of = partial(named_run, root=storage_root(config.cfg.storage_path), experiment=config.cfg.name)
    given = {} if config.cfg.restore_checkpoint_path else config.cfg.transfer
    # Of a run that is the origin of this one, the checkpoint has the weights.
    if not given and (
        (config.origin is None and config.checkpoint is None)
        or any(item.lstrip("+").startswith(rules.KEY) for item in config.overrides)
    ):
        raise UsageError(f"{rules.KEY} and cfg.restore_checkpoint_path exclude each other; set one of them to null")
    for name, item in given.items():
        with rules.transfer_of(name):
            if name not in (models := config.tree.get("models", {})):
                raise ConfigError(f"there is no model {name!r}.{suggest(name, models)}")
            typed = sources_of(item)
            found, tensors = read_alike([find(source, run_of) for source in typed.values()], name, item.model)
            rules.named(item, tensors[0], found[0].title)
        pinned[name] = {
            **config.tree["cfg"]["transfer"][name],
            "pinned": {key: weights.pinned for key, weights in zip(typed, found, strict=True)},
        }
    tree, unresolved = (
        one | {"cfg": one["cfg"] | {"transfer": pinned or None}} for one in (config.tree, config.unresolved)
    )
    return replace(config, tree=tree, unresolved=unresolved, cfg=build_cfg(tree["cfg"], TrainConfig))


def hashes(transfers: Mapping[str, Transfer]) -> dict[str, dict[str, str]]:
    """Return the hashes of the sources in a pinned `cfg.transfer`, by model and source."""
    return {name: dict(redact(item).split(MARK) for item in given.pinned.values()) for name, given in transfers.items()}


def transfer(context: RunContext, reporter: Reporter) -> None:
    """Load weights into the models that `cfg.transfer` names. Every worker must call this.

    Raises:
        ConfigError: a source or a rule does not fit.
    """
    models, tables = context.groups.members("models"), {}
    shares, writes = context.shares_storage, context.topology.writes
    for name, given in (context.cfg.transfer or {}).items():
        model, values = stateful(unwrap(models[name]), context.groups["models"], name), {}
        with rules.transfer_of(name):
            plan = Plan(given, name, model) if shares or writes else None
            for key, own in tensors_of(model).items():
                value = plan.value(key, own) if plan is not None else None
                value = value if shares else broadcast(value)
                if value is not None and not own.is_meta:  # of another stage
                    values[key] = laid_out(value, own)
            if left := getattr(model.load_state_dict(values, strict=False), "unexpected_keys", None):
                raise ConfigError(f"load_state_dict does not take {left[0]}, which is in the state_dict")
        if plan is not None:
            tables[name] = {
                "sources": [redact(item.pinned) for item in plan.sources],
                "tensors": {key: item._asdict() for key, item in plan.treatments.items()},
                "unused": plan.unused,
            }
            for line in plan.lines():
                reporter.notice(line)
    if writes:
        storage_at(context.folder.location).write(to_json(tables).encode(), "transfer.json")


class Plan:
    """The values for the tensors of one model.

    Attributes:
        sources: the sources.
        treatments: origins of the tensors in the state of the model, by name.
        unused: tensors of the source that no rule drops and no tensor of the model takes.

    Raises:
        ConfigError: a source or a rule does not fit.
    """

    def __init__(self, given: Transfer, name: str, model: Any) -> None:
        self._name = name
        self.sources, self._tensors = read_alike([*sources_of(given).values()], name, given.model)
        named = rules.named(given, self._tensors[0], self.sources[0].title)
        shapes, targets = (
            {key: item.shape for key, item in some.items()} for some in (self._tensors[0], tensors_of(model))
        )
        self._ties = ties_of(model)
        self.treatments = rules.treatments(given, named, shapes, targets, self._ties)
        self._groups: dict[str, list[str]] = {}  # names of tensors, by line of the table
        for key, item in self.treatments.items():
            self._groups.setdefault(item.how, []).append(key)
        others = [key for key in model.state_dict() if key not in targets and not key.startswith("mlx_runtime.")]
        self._groups["no tensor, and stays initial"] = others
        taken = {item.source for item in self.treatments.values()}
        self._groups["not used"] = self.unused = [key for key, _ in named.values() if key not in taken]

    def value(self, name: str, own: torch.Tensor) -> torch.Tensor | None:
        """Return the values for the first rows of a tensor in its type, or None if it keeps its initial values.

        Raises:
            ConfigError: the type cannot hold the values, or the source has others under another name of the tensor.
        """
        if (source := self.treatments[name].source) is None:
            return None
        value, dtype = mean(source, self._tensors).contiguous(), own.dtype
        for other in self._ties[name]:
            also = self.treatments[other].source
            if also not in (None, source) and content(mean(also, self._tensors).contiguous()) != content(value):
                raise ConfigError(f"{name} and {other} are one tensor here, and differ in the source")
        value = value[tuple(map(slice, own.shape))]
        there, here = (str(kind).removeprefix("torch.") for kind in (value.dtype, dtype))
        if len(self.sources) > 1 and not value.is_floating_point():
            self._groups.setdefault("of the first source, not averaged", []).append(name)
        if there == here:
            return value
        if not (value.is_floating_point() and dtype.is_floating_point):
            raise ConfigError(f"{name} is {here} here and {there} in the source; use fresh")
        made, before, after = value.to(dtype), torch.finfo(value.dtype), torch.finfo(dtype)
        if before.eps < after.eps or before.max > after.max:
            if ((value.double().abs() > after.max) & value.double().isfinite()).any():
                raise ConfigError(f"{here} cannot hold the values of {name}, {there} in the source")
            self._groups.setdefault(f"rounded from {there} to {here}", []).append(name)
        return made

    def lines(self) -> list[str]:
        """Return a table with a line per group of tensors, once all values have been taken."""
        groups = [f"{len(names):5,}  {how}: {rules.some(names)}" for how, names in self._groups.items() if names]
        titles = " and ".join(redact(item.title) for item in self.sources)
        return [f"transfer  {self._name} from {titles}", *(f"          {line}" for line in groups)]


def tensors_of(model: Any) -> dict[str, torch.Tensor]:
    """Return the tensors in the state of a model."""
    return {name: item for name, item in model.state_dict().items() if isinstance(item, torch.Tensor)}


def ties_of(model: Any) -> dict[str, list[str]]:
    """Return all names of each tensor in the state of a model, by each of them."""
    held: dict[str, torch.Tensor] = {}
    if isinstance(model, torch.nn.Module):
        held |= model.named_parameters(remove_duplicate=False)
        held |= model.named_buffers(remove_duplicate=False)
    names: dict[object, list[str]] = {}
    keys = {name: id(held[name]) if name in held else name for name in tensors_of(model)}
    for name, key in keys.items():
        names.setdefault(key, []).append(name)
    return {name: names[key] for name, key in keys.items()}


def laid_out(value: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Return values for a tensor with its layout and, behind them, its own. Every worker must call this."""
    if value.shape != own.shape:
        made = whole(own.detach()).to("cpu", copy=True)
        made[tuple(map(slice, value.shape))] = value
        value = made
    layouts = companions.part("sharding.layouts").Layouts({}, whole=True) if is_sharded(own) else None
    return value if layouts is None else layouts.of_values(value, own)
