"""Changes of the config that a resumed run applies.

A checkpoint overrides most of a config, so most changed values would have no effect. These are applied:

    cfg.*         settings of the runtime except `FIXED`, and fields of your own that are marked resumable
    optimizers.*  hyperparameters of the parameter groups, like lr, after the state is restored
    tools.*       arguments that the tool stores under their own names

Everything else is refused before anything is written.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.optim import Optimizer

from mlx_runtime.config.building import build
from mlx_runtime.config.composition import Config
from mlx_runtime.config.constructors.signatures import MISSING, parameters, plain
from mlx_runtime.config.constructors.targets import object_at
from mlx_runtime.config.interpolation import parse_config
from mlx_runtime.distributed import randomness
from mlx_runtime.errors import ConfigError, MlxError, RunFinished, StorageError
from mlx_runtime.loop.options import TrainConfig
from mlx_runtime.runs import drivers, sources
from mlx_runtime.runs.checkpoints.groups import State, state_of
from mlx_runtime.runs.checkpoints.index import best_first, list_checkpoints
from mlx_runtime.runs.checkpoints.store import CheckpointStore
from mlx_runtime.runs.folder import RunFolder, read_errors
from mlx_runtime.storage.documents import COUNT, misfit
from mlx_runtime.storage.files import join_path
from mlx_runtime.storage.local import IrregularError
from mlx_runtime.storage.redaction import HIDDEN, LEFT_OUT, is_secret, redact, unredact

FIXED = {
    *("cross_validation", "debug.limit_batches"),
    *("debug.overfit_batches", "name", "restore_checkpoint_path", "seed", "start_epoch", "transfer"),
    "tuning",
}
"""Settings and sections that cannot change: they determine the start of a run and its data."""

IGNORED = {"storage_path"}
"""Settings that locate a run and do not affect it."""

START = IGNORED | {"name", "restore_checkpoint_path", "start_epoch", "transfer"}
"""Settings that every new run from a checkpoint may choose for itself."""

MAY_START = {"lr", "weight_decay"}
"""Hyperparameters that may change from or to 0. Others, like momentum, would need another kind of state."""


@dataclass(frozen=True)
class Change:
    """A changed value of a run's config; `MISSING` means no value."""

    key: str
    before: Any
    after: Any

    def __str__(self) -> str:
        before, after = (HIDDEN if is_secret(self.key) else _format_value(value) for value in (self.before, self.after))
        return f"{self.key}: {before} → {after}"


def change_lines(run: RunFolder, project: Path, found: Sequence[Change]) -> Iterator[str]:
    """Yield lines about the changes of the config and the code since a run was stored."""
    for change in found:
        yield f"changed   {change}{'' if change.key.startswith('cfg.') else ', set once its state is restored'}"
    with contextlib.suppress(MlxError):  # the run stored no code, or it is damaged
        files = sources.changed_files(project, run)
        if files := [name for name in files if not name.endswith(".yaml")]:
            yield f"changed   {', '.join(files)}, since the run stored its code"


def best_kept(run: RunFolder, monitor: str | None, mode: str) -> dict[str, Any] | None:
    """Return the entry in a run's record for its best checkpoint, by a metric that it may not have monitored before."""
    for item in best_first(list_checkpoints(run.checkpoints), monitor, mode):
        step = {} if item.finished else {"step": item.global_step}
        value = item.metrics[monitor or ""]
        return {"epoch": item.epoch, "path": join_path(run.checkpoints, item.name), "value": value, **step}
    return None


def changes(before: Any, after: Any, key: str = "") -> list[Change]:
    """Return the differences between two configs, one per value. An omitted argument counts as its default."""
    if not (isinstance(before, dict) and isinstance(after, dict)):
        return [] if _same(before, after) else [Change(key, before, after)]
    if before.get("_target_") != after.get("_target_"):
        return [Change(f"{key}._target_", before.get("_target_", MISSING), after.get("_target_", MISSING))]
    found = []
    for name in {**before, **after}:
        old, new = (node[name] if name in node else _default(node, name) for node in (before, after))
        found += changes(old, new, f"{key}.{name}" if key else name)
    return found


def refusals(found: Iterable[Change], cfg: type) -> list[str]:
    """Return one line per change that a resumed run cannot apply, judged by the config and the class of `cfg`."""
    return [f"{change} ({why})" for change in found if (why := _why_refused(change, cfg)) is not None]


def refuse_finished(run: RunFolder, conf: Path, cfg: TrainConfig, another: str, *, named: bool) -> None:
    """Refuse to resume a run that another driver is training, or a completed run without more epochs or steps.

    A pruned run resumes only if the user has `named` it. `another` is the way to start a new run from its checkpoint.
    """
    try:
        record = drivers.refuse_living(run)
        with read_errors(run, run.conf.name):
            before = parse_config(conf.read_bytes()).get("cfg", {})
            if problem := misfit(before, {"num_epochs": COUNT, "max_steps": COUNT.or_null()}):
                raise ValueError(f"cfg: {problem}")
    except StorageError as error:
        if not isinstance(error.__cause__, ValueError | FileNotFoundError | IrregularError):
            raise
        raise StorageError(f"{error}. Put a good copy back, or start a new run: {another}") from error
    epochs, steps = (before.get(name) for name in ("num_epochs", "max_steps"))
    more_steps = steps is not None and (cfg.max_steps is None or cfg.max_steps > steps)
    if record.get("status") == "SUCCEEDED" and (epochs is None or cfg.num_epochs <= epochs) and not more_steps:
        further = f". To train further, raise cfg.num_epochs={epochs} or cfg.max_steps" if epochs else ""
        start = another if hasattr(cfg, "function") else "leave out --resume"  # not from its weights
        raise RunFinished(f"{run.title} has succeeded{further}; to start a new run: {start}")
    if not named and record.get("status") == "PRUNED":
        raise RunFinished(f"{run.title} was pruned. To train it further: mlx train run --resume={run.name}")


def allowed_changes(run: RunFolder, conf: Path, config: Config, another: str) -> tuple[Change, ...]:
    """Return the changes from the previous config of a run. Refuse those that a resumed run cannot apply.

    `another` is the way to start a new run with them.
    """
    found = _known_changes(parse_config(conf.read_text(encoding="utf-8")), config.tree)
    found = [change for change in found if change.key.removeprefix("cfg.") not in IGNORED]
    judged = [  # until the first checkpoint, the weights can come from another source
        change
        for change in found
        if change.key.split(".")[:2] != ["cfg", "transfer"] or CheckpointStore(run.checkpoints).any()
    ]
    if problems := refusals(judged, type(config.cfg)):
        listed = "\n  ".join([f"{run.title} cannot resume with other values of", *problems])
        raise ConfigError(f"{listed}\nLeave them as they were, or start a new run with them: {another}")
    return tuple(found)


def changes_since(before: Mapping[str, Any], config: Config) -> tuple[Change, ...]:
    """Return the differences from the config of a checkpoint that a new run starts from."""
    found = _known_changes(unredact(before, config.shown, config.tree), config.tree)
    return tuple(change for change in found if change.key.removeprefix("cfg.").partition(".")[0] not in START)


def _known_changes(before: Any, after: Any) -> list[Change]:
    """Return the differences between two configs, without values that were left out as secrets."""
    return [change for change in changes(before, after) if not LEFT_OUT.search(str(change.before))]


def set_group_values(optimizers: Mapping[str, Optimizer], schedulers: Sequence[Any], then: Any, now: Any) -> None:
    """Set the hyperparameters of restored optimizers that the config has changed since the checkpoint.

    A learning rate that a schedule has changed keeps its ratio to the initial rate. `then` and `now` are the configs of
    the group; among `schedulers`, other objects are ignored.

    Raises:
        ConfigError: the loop or a schedule has set another value.
    """
    for name, optimizer in optimizers.items():
        old, new = ((tree or {}).get(name) or {} for tree in (then, now))
        if old.get("_target_") != new.get("_target_"):
            continue
        for change in changes(old, new):
            full = Change(f"optimizers.{name}.{change.key}", change.before, change.after)
            why = _why_not_set(change.key, change.before, change.after)
            if not why and not _set(optimizer, change):
                why = "the loop or a schedule has set another value"
            if why:
                raise ConfigError(f"{full} cannot change on resume: {why}")
            if change.key == "lr":
                _set_base_lrs(schedulers, optimizer, change)


def with_settings(saved: State, then: Any, now: Any, key: str) -> State:
    """Return the saved state of a tool with the arguments that the config has changed.

    An argument changes if the tool stores it under its own name and has not changed it, and nothing else depends on it.
    `then` and `now` are the configs of the tool, and `key` is its key in conf.yaml.

    Raises:
        ConfigError: an argument cannot change.
    """
    found = changes(then, now)
    same_class = isinstance(then, dict) and isinstance(now, dict) and then.get("_target_") == now.get("_target_")
    if not (found and same_class):
        return saved
    first, last = _fresh(then, key), _fresh(now, key)
    wanted, changed = {item.key for item in found}, {name for name in last if not _same(last[name], first.get(name))}
    fits = changed <= wanted <= last.keys()  # an argument may leave its attribute as it was
    if not fits or not all(_same(saved.get(name), first.get(name)) for name in wanted):
        listed = ", ".join(f"{key}.{change}" for change in found)
        raise ConfigError(
            f"{listed} cannot change on resume: the tool does not store it under its own name, has changed it, or "
            "derives other attributes from it"
        )
    return saved | {name: last[name] for name in changed}


def _why_refused(change: Change, cfg: type) -> str | None:
    group, _, rest = change.key.partition(".")
    name, _, argument = rest.partition(".")
    if group == "cfg":
        if name in TrainConfig.__dataclass_fields__:
            return "it cannot change within a run" if {name, rest} & FIXED else None
        own = getattr(cfg, "__dataclass_fields__", {}).get(name)  # other classes may have the settings, too
        if own is not None and own.metadata.get("resumable"):
            return None
        return f'not marked as resumable; see field(metadata={{"resumable": True}}) for {name} in the guide to faults'
    if "_target_" not in change.key and MISSING not in (change.before, change.after):
        if group == "optimizers":
            return _why_not_set(argument, change.before, change.after)
        if group == "tools" and argument:
            return None
    return "the checkpoint determines it"


def _why_not_set(argument: str, before: Any, after: Any) -> str | None:
    """Return the reason why an argument of an optimizer cannot change, or None."""
    old, new = (value if isinstance(value, list | tuple) else [value] for value in (before, after))
    if len(old) != len(new) or any(type(item) not in (int, float) for item in (*old, *new)):
        return "only numeric arguments of an optimizer can change"
    if argument not in MAY_START and [*map(bool, old)] != [*map(bool, new)]:
        return "the state of the optimizer differs between zero and another value"
    return None


def _set(optimizer: Optimizer, change: Change) -> bool:
    """Set a value in the parameter groups that still have the previous one. Return True if there are any.

    A learning rate without a schedule, which the loop may set itself, is set in all groups if none has it.
    """
    every = [group for group in optimizer.param_groups if change.key in group]
    groups = [(group, own) for group in every if (own := _scaled(change, group))]
    name = "initial_lr" if change.key == "lr" and any("initial_lr" in group for group, _ in groups) else change.key
    fitting = [item for item in groups if name in item[0] and _numbers(item[0][name]) == _numbers(item[1].before)]
    for group, change in fitting or (groups if name == "lr" else ()):
        if name == "initial_lr":
            ratio = float(group["lr"]) / change.before if change.before else 1.0
            _put(group, "lr", change.after * ratio)
        _put(group, name, change.after)
    return bool(fitting or (groups and name == "lr"))


def _scaled(change: Change, group: Mapping[str, Any]) -> Change | None:
    """Return a change for a group of `cfg.tuning`, whose learning rate may be a multiple, or its own: None."""
    scale = group.get("lr_scale", 1) if change.key == "lr" else 1
    if scale == 1:
        return change
    return replace(change, before=change.before * scale, after=change.after * scale) if scale else None


def _set_base_lrs(schedulers: Iterable[Any], optimizer: Optimizer, change: Change) -> None:
    for scheduler in schedulers:
        if getattr(scheduler, "optimizer", None) is optimizer and hasattr(scheduler, "base_lrs"):
            scheduler.base_lrs = [
                own.after if (own := _scaled(change, group)) and base == own.before else base
                for base, group in zip(scheduler.base_lrs, optimizer.param_groups, strict=False)
            ]
        _set_base_lrs(getattr(scheduler, "_schedulers", ()), optimizer, change)


def _put(group: dict[str, Any], key: str, value: Any) -> None:
    if isinstance(group[key], torch.Tensor):
        group[key].fill_(value)
    else:
        group[key] = tuple(value) if isinstance(value, list) else value


def _numbers(value: Any) -> list[float]:
    return [float(item) for item in (value if isinstance(value, list | tuple) else [value])]


def _default(node: Mapping[str, Any], name: str) -> Any:
    """Return the default of an argument that a node omits, if it is a plain value."""
    if "_target_" not in node:
        return MISSING
    known = {item.name: item.default for item in parameters(object_at(node["_target_"])) or []}
    default = known.get(name, MISSING)
    return default if isinstance(default, str) else plain(default)


def _fresh(node: Any, key: str) -> State:
    """Return the plain state of a newly constructed tool."""
    with randomness.temporary_seed(0):
        made = build(node, key)
    state: State = state_of(SimpleNamespace(tool=made))[0].get("tool", {})
    return state


def _same(one: Any, other: Any) -> bool:
    """Return True if two plain values are equal; a list may equal a tuple."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        return both and one.dtype == other.dtype and torch.equal(one.cpu(), other.cpu())
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other or (one != one and other != other))


def _format_value(value: Any) -> str:
    return "nothing" if value is MISSING else "null" if value is None else redact(f"{value!r:.60}")
