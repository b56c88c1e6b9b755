"""Changes of the config that a resumed run applies.

A checkpoint overrides most of a config, so most changed values would have no effect. These are applied:

    cfg.*         settings of the runtime except `FIXED`, and fields of your own that are marked resumable
    optimizers.*  hyperparameters of the parameter groups, like lr, after the state is restored
    tools.*       arguments that affect only attributes that have not changed since the tool was constructed

Everything else is refused before anything is written.
"""

import contextlib
import copy
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from mlx_runtime.runs import drivers, snapshots
from mlx_runtime.runs.checkpoints.groups import State, state_of
from mlx_runtime.runs.checkpoints.index import best_first, list_checkpoints
from mlx_runtime.runs.folder import RunFolder, read_errors
from mlx_runtime.storage.documents import COUNT, misfit
from mlx_runtime.storage.files import join_path
from mlx_runtime.storage.local import IrregularError
from mlx_runtime.storage.redaction import HIDDEN, LEFT_OUT, is_secret, redact, redact_override, unredact

FIXED = {
    *("cross_validation", "debug.limit_batches", "debug.limit_eval_batches", "debug.limit_train_batches"),
    *("debug.overfit_batches", "name", "restore_checkpoint_path", "restore_strict", "seed", "start_epoch"),
}
"""Settings and sections that cannot change: they determine the start of a run and its data."""

IGNORED = {"storage_path"}
"""Settings that locate a run and do not affect it."""

START = IGNORED | {"name", "restore_checkpoint_path", "restore_strict", "start_epoch"}
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


def change_lines(run: RunFolder, project: Path, found: Sequence[Change], overrides: Sequence[str]) -> Iterator[str]:
    """Yield lines about the changes since a run was stored: of its config and code, and overrides without effect."""
    for change in found:
        yield f"changed   {change}{'' if change.key.startswith('cfg.') else ', set once its state is restored'}"
    for item in overrides:
        key = item.lstrip("+~").partition("=")[0]
        if not key.startswith("-") and not any(f"{change.key}.".startswith(f"{key}.") for change in found):
            yield f"unchanged {redact_override(item)}"
    with contextlib.suppress(MlxError):  # the run stored no code, or it is damaged
        files = snapshots.changed_files(project, run)
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
    reasons = [(change, _why_refused(change, cfg)) for change in found]
    return [f"{change} ({why})" for change, why in reasons if why is not None]


def check_stored(run: RunFolder, conf: Path) -> None:
    """Raise StorageError if the config of a run, which is not trusted, cannot be compared with another one."""
    with read_errors(run, run.conf.name):
        cfg = parse_config(conf.read_bytes()).get("cfg", {})
        if problem := misfit(cfg, {"num_epochs": COUNT, "max_steps": COUNT.or_null()}):
            raise ValueError(f"cfg: {problem}")


def refuse_finished(run: RunFolder, conf: Path, cfg: TrainConfig, another: str, *, named: bool) -> None:
    """Refuse to resume a run that another driver is training, or a completed run without more epochs or steps.

    A pruned run resumes only if the user has `named` it.
    """
    try:
        record, before = drivers.refuse_living(run), parse_config(conf.read_bytes()).get("cfg", {})
    except StorageError as error:
        lost = isinstance(error.__cause__, ValueError | FileNotFoundError | IrregularError)
        saved = list_checkpoints(run.checkpoints) if lost else []
        if not saved:
            raise
        checkpoint = f"cfg.restore_checkpoint_path={join_path(run.checkpoints, saved[-1].name)}"
        raise StorageError(
            f"{error}. Put a good copy back, or train on in a new run: {another} {checkpoint}"
        ) from error
    epochs, steps = (before.get(name) for name in ("num_epochs", "max_steps"))
    more_steps = steps is not None and (cfg.max_steps is None or cfg.max_steps > steps)
    if record.get("status") == "SUCCEEDED" and (epochs is None or cfg.num_epochs <= epochs) and not more_steps:
        limits = f"cfg.num_epochs={epochs}" + (f" and cfg.max_steps={steps}" if steps is not None else "")
        saved = list_checkpoints(run.checkpoints)
        at_limit = steps is not None and saved != [] and saved[-1].global_step >= steps
        raised = "cfg.max_steps" if at_limit else "cfg.num_epochs"
        if not at_limit and epochs and (record.get("epoch") or 0) + 1 < epochs:
            patience = "tools.early_stopping.patience=20"
            raised += f". If early stopping ended the run, also raise its patience, e.g. {patience}"
        further = f", with {limits}. To train further, raise {raised}" if epochs else ""  # 0: a function decides
        raise RunFinished(
            f"{run.experiment} {run.name} has succeeded{further}; for a new run, leave out "
            + ("resume=" if hasattr(cfg, "function") else "--resume")
        )
    if not named and record.get("status") == "PRUNED":
        title = f"{run.experiment} {run.name}"
        raise RunFinished(f"{title} was pruned. To train it further: mlx train run --resume={run.name}")


def allowed_changes(run: RunFolder, conf: Path, config: Config, another: str) -> tuple[Change, ...]:
    """Return the changes from the previous config of a run. Refuse those that a resumed run cannot apply.

    `another` is the command that starts a new run with them.
    """
    found = _known_changes(parse_config(conf.read_text(encoding="utf-8")), config.tree)
    if problems := refusals(found, type(config.cfg)):
        listed = "\n  ".join([f"{run.title} cannot resume with other values of", *problems])
        raise ConfigError(f"{listed}\nLeave them as they were, or start a new run with them: {another}")
    return tuple(change for change in found if change.key.removeprefix("cfg.") not in IGNORED)


def changes_since(before: Mapping[str, Any], config: Config) -> tuple[Change, ...]:
    """Return the differences from the config of a checkpoint that a new run starts from."""
    found = _known_changes(unredact(before, config.shown, config.tree), config.tree)
    return tuple(change for change in found if change.key.removeprefix("cfg.") not in START)


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
        if not old or old.get("_target_") != new.get("_target_"):
            continue
        for change in changes(old, new):
            if change.key == "params":
                continue
            key = f"optimizers.{name}.{change.key}"
            if why := _why_not_a_number(change.key, change.before, change.after):
                raise ConfigError(f"{Change(key, change.before, change.after)} cannot be restored ({why})")
            if not _set(optimizer, change):
                raise ConfigError(
                    f"{key} cannot change when a run resumes: the loop or a schedule has set a value other than "
                    f"{_format_value(change.before)}"
                )
            if change.key == "lr":
                _set_base_lrs(schedulers, optimizer, change)


def with_settings(saved: State, then: Any, now: Any, key: str) -> State:
    """Return the saved state of a tool with the settings that the config has changed.

    A changed argument is a setting if the attributes that depend on it still have the values that the constructor set.
    `then` and `now` are the configs of the tool, and `key` is its key in conf.yaml.

    Raises:
        ConfigError: an attribute that depends on a changed argument has changed in training, or no attribute does.
    """
    found = changes(then, now)
    if not found or not isinstance(then, dict) or then.get("_target_") != now.get("_target_"):
        return saved
    first = _fresh(then, key)
    for change in found:
        full = Change(f"{key}.{change.key}", change.before, change.after)
        depends = _differing_names(first, _fresh(_replace(then, change), key))
        if not depends:
            raise ConfigError(f"{full} cannot change when a run resumes: no attribute of the tool shows it")
        for name in depends:
            if name in saved and not _same(saved[name], first.get(name)):
                raise ConfigError(
                    f"{full} cannot change when a run resumes: {key}.{name}, which depends on it, is "
                    f"{_format_value(saved[name])} by now and part of the checkpoint"
                )
    last = _fresh(now, key)
    return {**saved, **{name: last[name] for name in _differing_names(first, last) if name in last}}


def _why_refused(change: Change, cfg: type) -> str | None:
    group, _, rest = change.key.partition(".")
    name, _, argument = rest.partition(".")
    if group == "cfg":
        return _why_fixed(name, rest, cfg)
    if "_target_" not in change.key and MISSING not in (change.before, change.after):
        if group == "optimizers":
            return _why_not_a_number(argument, change.before, change.after)
        if group == "tools" and argument:
            return None
    return "the checkpoint determines it"


def _why_fixed(name: str, key: str, cfg: type) -> str | None:
    """Return the reason why a setting cannot change. `key` is below `cfg`, and `name` is its first part."""
    if name in IGNORED:
        return None
    if name in {field.name for field in dataclasses.fields(TrainConfig)}:
        return "it cannot change within a run" if {name, key} & FIXED else None
    fields = dataclasses.fields(cfg) if dataclasses.is_dataclass(cfg) else ()
    if any(field.name == name and field.metadata.get("resumable") for field in fields):
        return None
    return f'not marked as resumable; see field(metadata={{"resumable": True}}) for {name} in the guide to faults'


def _why_not_a_number(argument: str, before: Any, after: Any) -> str | None:
    def numbers(value: Any) -> list[float] | None:
        values = value if isinstance(value, list | tuple) else [value]
        fits = all(isinstance(item, int | float) and not isinstance(item, bool) for item in values)
        return list(values) if fits else None

    new = numbers(after)
    old = new if before is MISSING else numbers(before)
    if not argument or old is None or new is None or len(old) != len(new):
        return "only numeric arguments of an optimizer can change"
    started = any(bool(one) != bool(other) for one, other in zip(old, new, strict=True))
    if started and argument not in MAY_START:
        return "the state of the optimizer differs between zero and another value"
    return None


def _set(optimizer: Optimizer, change: Change) -> bool:
    """Set a value in the parameter groups that still have the previous one. Return True if there are any."""
    done = False
    for group in optimizer.param_groups:
        if change.key not in group:
            return False
        scheduled = change.key == "lr" and "initial_lr" in group
        present = group["initial_lr"] if scheduled else group[change.key]
        if not _same_number(present, change.before) and (scheduled or change.key != "lr"):
            continue
        done = True
        if scheduled:
            ratio = float(group["lr"]) / float(present) if float(present) else 1.0
            _put(group, "initial_lr", change.after)
            _put(group, "lr", float(change.after) * ratio)
        else:
            _put(group, change.key, change.after)
    return done


def _set_base_lrs(schedulers: Sequence[Any], optimizer: Optimizer, change: Change) -> None:
    for scheduler in _walk(schedulers):
        if getattr(scheduler, "optimizer", None) is not optimizer or not hasattr(scheduler, "base_lrs"):
            continue
        rates = [change.after if _same_number(base, change.before) else base for base in scheduler.base_lrs]
        scheduler.base_lrs = rates
        scheduler._last_lr = [float(group["lr"]) for group in optimizer.param_groups]


def _walk(schedulers: Iterable[Any]) -> Iterator[Any]:
    for scheduler in schedulers:
        yield scheduler
        yield from _walk(getattr(scheduler, "_schedulers", ()))


def _put(group: dict[str, Any], key: str, value: Any) -> None:
    present = group.get(key)
    if isinstance(present, torch.Tensor):
        present.fill_(value)
    else:
        group[key] = tuple(value) if isinstance(value, list) else value


def _same_number(present: Any, wanted: Any) -> bool:
    if wanted is MISSING:
        return True
    if isinstance(present, list | tuple):
        return list(present) == list(wanted)
    return float(present) == float(wanted)


def _default(node: Mapping[str, Any], name: str) -> Any:
    """Return the default of an argument that a node omits, if it is a plain value."""
    if "_target_" not in node:
        return MISSING
    known = {item.name: item.default for item in parameters(object_at(node["_target_"])) or []}
    default = known.get(name, MISSING)
    return default if isinstance(default, str) else plain(default)


def _replace(node: Mapping[str, Any], change: Change) -> dict[str, Any]:
    """Return a node with one value changed."""
    changed = copy.deepcopy(dict(node))
    *above, last = change.key.split(".")
    inner = changed
    for name in above:
        inner = inner[name]
    if change.after is MISSING:
        inner.pop(last, None)
    else:
        inner[last] = change.after
    return changed


def _fresh(node: Any, key: str) -> State:
    """Return the plain state of a newly constructed tool."""
    with randomness.temporary_seed(0):
        made = build(node, key)
    state: State = state_of(SimpleNamespace(tool=made))[0].get("tool", {})
    return state


def _differing_names(one: State, other: State) -> list[str]:
    return [name for name in {**one, **other} if not _same(one.get(name, MISSING), other.get(name, MISSING))]


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
