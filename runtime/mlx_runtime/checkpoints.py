"""Save and restore everything that changes while an experiment trains.

A checkpoint is a folder that appears whole or not at all:

checkpoints/epoch_0004/
    state.pt           everything, as plain values and tensors: reading it never runs code (`weights_only=True`)
    checkpoint.json    what it is, its numbers, and the SHA-256 of state.pt

`state.pt` is this dict; what belongs to one rank stands in `ranks`, one entry per worker:

    {"epoch": 3, "finished": True, "global_step": 180, "seed": 0, "world_size": 2, "config": conf.yaml as it was,
     "models": {name: state}, "optimizers": {name: state}, "tools": {name: state}, "own": {name: state},
     "loaders": {name: place in its pass}, "numbers": {"latest": ..., "unreported": ...},
     "tracking": {"sizes": {file: length in bytes}, "reports": how many, "seconds": trained}, "scaler": state,
     "on_device": [attribute of a tool that was on a GPU, ...],
     "ranks": [{"random": ..., "metrics": {name: state}, "losses": {name: state}}, ...]}
"""

import collections
import contextlib
import copy
import hashlib
import math
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import numpy as np
import torch
from torch import nn
from torchmetrics import Metric, MetricCollection

from mlx_runtime.errors import ConfigError, StorageError, first_line
from mlx_runtime.parallel import unwrapped
from mlx_runtime.saved import ABOUT, STATE, Checkpoint, described, found_in, saved_in
from mlx_runtime.storage import Storage, joined, split_options, to_json

PARTS = {
    *("epoch", "finished", "global_step", "seed", "world_size", "config", "models", "optimizers", "tools", "own"),
    *("loaders", "numbers", "on_device", "ranks", "scaler", "tracking"),
}

State = dict[str, Any]

_DICTS = (dict, collections.OrderedDict, collections.Counter)
"""Mappings that loading with `weights_only` gives back as what they were."""


class Checkpoints:
    """The checkpoints of one run.

    Args:
        root: folder or URI that holds them.
    """

    def __init__(self, root: str) -> None:
        self._storage = Storage(root)
        self._verified: set[str] = set()
        self._damaged: list[str] = []

    def all(self) -> list[Checkpoint]:
        """Those that are whole, oldest first.

        Raises:
            StorageError: the storage does not answer.
        """
        return saved_in(self._storage)

    def any(self) -> bool:
        """True if there are checkpoints, even damaged ones.

        Raises:
            StorageError: the storage does not answer.
        """
        return bool(self._found())

    def _found(self) -> dict[str, Checkpoint | None]:
        """What there is by name, None for what has no readable description."""
        return found_in(self._storage)

    def path(self, checkpoint: Checkpoint) -> str:
        """Where it is, to read it from."""
        return joined(self._storage.root, checkpoint.name)

    def save(self, state: State, checkpoint: Checkpoint, allowed: Callable[[], None] = lambda: None) -> Checkpoint:
        """Store a checkpoint. Whatever is killed meanwhile, there is all of it or nothing.

        Args:
            state: plain values and tensors.
            checkpoint: what it is.
            allowed: called before it becomes visible; raises when this run has been taken over.

        Raises:
            StorageError: the disk is full or not writable.
        """
        storage, name, unique = self._storage, checkpoint.name, uuid.uuid4().hex[:8]
        # On a folder it is renamed once it is whole. An object store has no rename: there a file of its own, which
        # nobody else overwrites, is named by the description that is written last.
        folder, file_name = (f".saving-{unique}", STATE) if storage.local else (name, f"state-{unique}.pt")
        try:
            if storage.local:
                Path(storage.of(folder)).mkdir(parents=True)
            with _Hashed(storage.create(folder, file_name)) as file:
                torch.save(state, cast("IO[bytes]", file))  # it only writes
            fields = asdict(checkpoint) | {"sha256": file.sha256, "size_bytes": file.size_bytes, "file": file_name}
            about = Checkpoint(**fields)
            allowed()
            storage.write(to_json(asdict(about)).encode(), folder, ABOUT)
            if storage.local:
                self._put_in_place(Path(storage.of(folder)), Path(storage.of(name)))
            else:
                for old in storage.names(name):
                    if old not in (ABOUT, file_name):
                        storage.remove_file(name, old)
        except (OSError, RuntimeError) as error:
            self._take_back(folder, file_name)
            reason = error.__context__ if isinstance(error.__context__, OSError) else error  # torch hides a full disk
            raise StorageError(f"cannot write a checkpoint to {storage.root}: {first_line(reason)}") from error
        except StorageError:
            self._take_back(folder, file_name)
            raise
        return about

    @staticmethod
    def _put_in_place(made: Path, final: Path) -> None:
        """Rename a folder, also over an older one, which `clean` puts back after a kill between the two renames."""
        old = made.with_name(f"{made.name}-old")
        if final.exists():
            final.rename(old)
        made.rename(final)
        shutil.rmtree(old, ignore_errors=True)

    def _take_back(self, folder: str, file_name: str) -> None:
        """Remove what a save that failed has written, and nothing else."""
        with contextlib.suppress(OSError):
            if self._storage.local:
                self._storage.remove_folder(folder)
            else:
                self._storage.remove_file(folder, file_name)

    def load(self, checkpoint: Checkpoint) -> State:
        """Its state on the CPU.

        Raises:
            ConfigError: it is damaged.
        """
        return self._load(checkpoint.name, checkpoint)

    def newest(self, tell: Callable[[str], None]) -> Checkpoint | None:
        """Return the latest one that is not damaged; report damaged ones, which `set_damaged_aside` then renames.

        Returns:
            None if there are no checkpoints.

        Raises:
            ConfigError: all are damaged.
            StorageError: the storage does not answer, so that nobody knows.
        """
        found = self._found()
        problems = {
            name: f"{joined(self._storage.root, name, ABOUT)} is damaged: it is no description of a checkpoint"
            for name, item in found.items()
            if item is None
        }
        usable = None
        for item in reversed(self.all()):
            try:
                self._verify(item)
                usable = item
                break
            except ConfigError as error:
                problems[item.name] = str(error)
        if problems and usable is None:
            raise ConfigError(
                "; ".join(problems.values()) + ". No other checkpoint is left to resume from. "
                "Put a good copy back, or start over in a new run with --from"
            )
        self._damaged = list(problems)
        for text in problems.values():
            tell(f"{text}; going on from the one before")
        return usable

    def set_damaged_aside(self) -> None:
        """Rename what `newest` has found damaged to `damaged_…`: no save overwrites it, and nobody tries it again.

        Raises:
            StorageError: the storage does not take it.
        """
        damaged, self._damaged = self._damaged, []
        try:
            for name in damaged:
                self._storage.move(name, f"damaged_{name}_{uuid.uuid4().hex[:8]}")
        except OSError as error:
            raise StorageError(f"cannot write to {self._storage.root}: {first_line(error)}") from error

    def prune(self, keep: int, monitor: str | None, mode: str) -> None:
        """Keep the best `keep` by `monitor` (without one the newest), always the latest, and remove the rest.

        Of those in the middle of an epoch only the newest two stay, until the epoch is over.
        """
        found = self.all()
        finished = [item for item in found if item.finished]
        ranked = sorted(finished, key=lambda item: (score(item.metrics, monitor, mode), item.order), reverse=True)
        kept = {item.name for item in [*ranked[:keep], *finished[-1:]]}
        last = finished[-1].order if finished else (-1, True, 0)
        kept |= {item.name for item in [item for item in found if item.order > last][-2:]}
        for item in found:
            if item.name not in kept:
                self.remove(item)

    def remove(self, checkpoint: Checkpoint) -> None:
        with contextlib.suppress(OSError):
            self._discard(checkpoint.name)

    def clean(self) -> None:
        """Undo what a save that was killed has left: an older one of the same name that it moved away is put back.

        Raises:
            StorageError: the storage does not take it.
        """
        try:
            names = self._storage.names()
            for name in [name for name in names if name.startswith(".saving-") and name.endswith("-old")]:
                about = described(self._storage, name)
                if about is not None and about.name not in names:
                    self._storage.move(name, about.name)
        except OSError as error:
            raise StorageError(f"cannot write to {self._storage.root}: {first_line(error)}") from error
        with contextlib.suppress(OSError):
            for name in self._storage.names():
                if name.startswith((".saving-", ".removed-")):
                    self._discard(name)

    def _discard(self, name: str) -> None:
        """Remove a folder so that nobody takes a part of it for a whole checkpoint, or renames it into place."""
        storage = self._storage
        if storage.local:
            gone = f".removed-{uuid.uuid4().hex[:8]}"
            storage.move(name, gone)
            storage.remove_folder(gone)
        else:
            storage.remove_file(name, ABOUT)
            storage.remove_folder(name)

    def _verify(self, about: Checkpoint) -> None:
        """Compare the state with its checksum.

        Raises:
            ConfigError: they differ.
            StorageError: the storage does not answer.
        """
        if about.sha256 in self._verified:
            return
        where = joined(self._storage.root, about.name, about.file)
        try:
            with self._storage.open(about.name, about.file) as file:
                digest, size = hashlib.sha256(), 0
                while block := file.read(1 << 20):
                    digest.update(block)
                    size += len(block)
        except FileNotFoundError as error:
            raise ConfigError(f"{where} is damaged: there is no such file") from error
        except OSError as error:
            raise StorageError(f"cannot read {where}: {first_line(error)}") from error
        if size != about.size_bytes:
            raise ConfigError(f"{where} is damaged: it has {size:,} bytes of {about.size_bytes:,}")
        if digest.hexdigest() != about.sha256:
            raise ConfigError(f"{where} is damaged: its SHA-256 is not the one it was saved with")
        self._verified.add(about.sha256)

    def _load(self, name: str, about: Checkpoint | None) -> State:
        file_name = about.file if about is not None else STATE
        where = joined(self._storage.root, name, file_name)
        if about is not None:
            self._verify(about)
        try:
            with self._storage.open(name, file_name) as file:
                state = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # unpickling bytes that are no state raises errors of all kinds
            raise ConfigError(f"{where} is damaged: {first_line(error)}") from error
        found: State = state if isinstance(state, dict) else {}
        if missing := PARTS - found.keys():
            raise ConfigError(f"{where} was not saved by this version: it has no {', '.join(sorted(missing))}")
        return found


class Saver:
    """Stores checkpoints in the background, one at a time.

    Args:
        checkpoints: where.
        stored: called with each one that is complete, in the background.
    """

    def __init__(self, checkpoints: Checkpoints, stored: Callable[[Checkpoint], None], allowed: Callable[[], None]):
        self._checkpoints, self._stored, self._allowed = checkpoints, stored, allowed
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def save(self, state: State, checkpoint: Checkpoint) -> None:
        """Copy the state, and store the copy while training goes on; waits for the one before.

        Raises:
            StorageError: that one could not be stored.
        """
        self.wait()
        kept = copied(state)
        self._thread = threading.Thread(target=self._save, args=(kept, checkpoint), name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until nothing is left to store.

        Raises:
            StorageError: it could not be stored.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _save(self, state: State, checkpoint: Checkpoint) -> None:
        try:
            self._stored(self._checkpoints.save(state, checkpoint, self._allowed))
        except Exception as error:
            self._error = error


def read(path: str) -> State:
    """The state of the checkpoint in any folder or URI, on the CPU.

    Raises:
        ConfigError: there is none, or it is damaged.
    """
    base, options = split_options(path)
    parent, _, name = base.rstrip("/").rpartition("/")
    checkpoints = Checkpoints((parent or ("/" if base.startswith("/") else ".")) + options)
    try:
        about = described(checkpoints._storage, name)
        there = about is not None or checkpoints._storage.size_bytes(name, STATE) is not None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {first_line(error)}") from error
    if not there:
        others = ", ".join(item.name for item in checkpoints.all())
        beside = f" Beside it there is: {others}." if others else ""
        raise ConfigError(f"{path} is not a checkpoint: it has no {STATE}.{beside}")
    return checkpoints._load(name, about)


def score(metrics: Mapping[str, float], monitor: str | None, mode: str) -> float:
    """How good a checkpoint is, higher is better; minus infinity when nobody can say."""
    value = metrics.get(monitor or "", math.nan)
    return -math.inf if math.isnan(value) else value if mode == "max" else -value


def state_of(group: Any, hidden: Collection[str] = ()) -> tuple[State, list[str]]:
    """The state of every member of a group (`models`, `optimizers`, `tools`, …) that has one.

    Args:
        group: that holds the members.
        hidden: secrets of the config; plain tools that hold one get it from their constructor again.

    Returns:
        The states by name, and what cannot be part of a checkpoint, like `stopper.history`.
    """
    states: State = {}
    left_out: list[str] = []
    for name, member in members(group).items():
        if isinstance(member, Metric | MetricCollection):
            try:
                states[name] = _metric_state(member)
            except TypeError:
                left_out.append(name)
        elif hasattr(member, "state_dict"):
            state, unsafe = _plain_parts(unwrapped(member).state_dict())
            states[name] = state
            left_out += [f"{name}.state_dict()[{key!r}]" for key in unsafe]
        elif _has_state(member):
            kept = {key: item for key, item in vars(member).items() if not (isinstance(item, str) and item in hidden)}
            states[name], unsafe = _plain_parts(kept)
            left_out += [f"{name}.{attribute}" for attribute in unsafe]
    return states, left_out


def load_into(
    group: Any,
    saved: Mapping[str, Any],
    where: str,
    *,
    only: set[str] | None = None,
    moved: Mapping[str, torch.device] | None = None,
) -> list[str]:
    """Put saved states back into the members of a group.

    Args:
        group: that holds the members.
        saved: states by name.
        where: what the user calls the group, like `models`.
        only: names to restore; all by default.
        moved: where tensors of an attribute belong, like `{"ema.shadow": cuda:0}`; elsewhere they are on the CPU.

    Returns:
        What was not restored, one line each.

    Raises:
        ConfigError: a model or an optimizer has no counterpart, or its state does not fit.
    """
    present = {name: member for name, member in members(group).items() if _has_state(member)}
    if only is not None:
        present = {name: member for name, member in present.items() if name in only}
        saved = {name: state for name, state in saved.items() if name in only}
    unmatched = sorted(set(present) ^ set(saved))
    if unmatched and where in ("models", "optimizers"):
        sides = ", ".join(f"{name} ({'only in the code' if name in present else 'only there'})" for name in unmatched)
        raise ConfigError(
            f"the checkpoint does not fit: {where} {sides}. Restore with the code that saved it, or take over the "
            "weights that fit with cfg.restore_strict=false"
        )
    for name in sorted(set(present) & set(saved)):
        member = present[name]
        try:
            if isinstance(member, Metric | MetricCollection):
                _load_metric(member, saved[name])
            elif hasattr(member, "load_state_dict"):
                unwrapped(member).load_state_dict(copy.deepcopy(saved[name]))
            else:
                for key, item in saved[name].items():
                    value = copy.deepcopy(item)
                    place = (moved or {}).get(f"{name}.{key}")
                    setattr(member, key, value if place is None else _on(value, place))
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            detail = " ".join(str(error).split())
            raise ConfigError(f"{where}.{name} in the checkpoint does not fit the config: {detail:.300}") from error
    return [f"{where}.{name} is new: the checkpoint has no state for it" for name in unmatched if name in present]


def load_what_fits(models: Any, saved: Mapping[str, Any]) -> list[str]:
    """Take over those weights whose name and shape fit. Returns what did not match, one line each."""
    lines = []
    present = {name: unwrapped(item) for name, item in members(models).items() if isinstance(item, nn.Module)}
    for name in sorted(set(present) | set(saved)):
        if name not in saved or name not in present:
            lines.append(f"models.{name} is {'new' if name in present else 'in the checkpoint only'}")
            continue
        own, state = present[name].state_dict(), saved[name]
        fits = {key: item for key, item in state.items() if key in own and _shape(own[key]) == _shape(item)}
        for key in sorted(set(own) | set(state)):
            if key in own and key in state and key not in fits:
                lines.append(
                    f"models.{name}.{key} is {_shape(own[key])} here and {_shape(state[key])} in the checkpoint"
                )
            elif key not in fits:
                lines.append(f"models.{name}.{key} is {'new' if key in own else 'in the checkpoint only'}")
        present[name].load_state_dict(fits, strict=False)
    return lines


def merged(parts: Sequence[Mapping[str, Any]], group: Any) -> tuple[State, list[str]]:
    """The metrics of several ranks as one, for a group of another size.

    Returns:
        The states by name, and the names of metrics that cannot be merged.
    """
    states: State = {}
    lost = []
    for name, member in members(group).items():
        if not all(name in part for part in parts):
            continue
        if not isinstance(member, Metric | MetricCollection):
            states[name] = parts[0][name]
            continue
        try:
            states[name] = {
                path: _merged_metric(metric, [part[name][path] for part in parts if path in part[name]])
                for path, metric in member.named_modules()
                if isinstance(metric, Metric)
            }
        except TypeError:
            lost.append(name)
    return states, lost


def members(group: Any) -> dict[str, Any]:
    """What a group holds by name, without private attributes."""
    return {name: value for name, value in vars(group).items() if not name.startswith("_")} if group is not None else {}


def _metric_state(metric: Metric | MetricCollection) -> State:
    """The states of a metric and of the metrics inside it, by their path."""
    if isinstance(metric, MetricCollection):
        list(metric.values())  # gives members of one compute group their own, up-to-date states
    return {
        path: {"states": {key: _plain(item) for key, item in part.metric_state.items()}, "updates": part._update_count}
        for path, part in metric.named_modules()
        if isinstance(part, Metric)
    }


def _load_metric(metric: Metric | MetricCollection, saved: State) -> None:
    parts = {path: part for path, part in metric.named_modules() if isinstance(part, Metric)}
    if set(parts) != set(saved):
        raise ValueError(f"it consists of {', '.join(sorted(saved))}, and now of {', '.join(sorted(parts))}")
    for path, part in parts.items():
        part.reset()
        for key, value in saved[path]["states"].items():
            if key not in part._defaults:
                raise KeyError(key)
            setattr(part, key, _on(copy.deepcopy(value), part.device))
        part._update_count = saved[path]["updates"]


def _merged_metric(metric: Metric, parts: Sequence[State]) -> State:
    """The states of one metric on several ranks as one.

    Raises:
        TypeError: a state is reduced in a way of its own.
    """
    states: dict[str, Any] = {}
    counts = [part["updates"] for part in parts]
    for key, reduction in metric._reductions.items():
        values = [part["states"][key] for part in parts]
        name = getattr(reduction, "__name__", str(reduction))
        if isinstance(values[0], list):
            states[key] = [item for value in values for item in value]
        elif name == "dim_zero_cat":
            states[key] = torch.cat(values)
        elif name == "dim_zero_sum":
            states[key] = torch.stack(values).sum(dim=0).to(values[0].dtype)
        elif name in ("dim_zero_max", "dim_zero_min"):
            states[key] = torch.stack(values).amax(dim=0) if name.endswith("max") else torch.stack(values).amin(dim=0)
        elif name == "dim_zero_mean" and sum(counts):
            states[key] = sum(value * count for value, count in zip(values, counts, strict=True)) / sum(counts)
        elif len(values) == 1 or name == "dim_zero_mean":
            states[key] = values[0]
        else:
            raise TypeError(name)
    return {"states": states, "updates": sum(counts)}


def _has_state(member: Any) -> bool:
    return hasattr(member, "state_dict") or (hasattr(member, "__dict__") and not isinstance(member, type))


def _shape(value: Any) -> Any:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__


def _plain_parts(values: Mapping[str, Any]) -> tuple[State, list[str]]:
    """The entries that a checkpoint can hold, and the names of the others."""
    kept, left_out = {}, []
    for name, value in values.items():
        try:
            kept[name] = _plain(value)
        except TypeError:
            left_out.append(name)
    return kept, left_out


def _plain(value: Any) -> Any:
    """The value as `weights_only` loading gives it back; tensors are not copied.

    Raises:
        TypeError: it would not.
    """
    if value is None or type(value) in (bool, int, float, complex, str, bytes):
        return value
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in (list, tuple):
        return type(value)(_plain(item) for item in value)
    if isinstance(value, dict):
        kind = type(value) if type(value) in _DICTS else dict
        return kind({_plain(key): _plain(item) for key, item in value.items()})
    raise TypeError


def copied(value: Any) -> Any:
    """A copy on the CPU that training does not change."""
    return _mapped(value, lambda tensor: tensor.detach().to("cpu", copy=True))


def on_device(group: Any) -> list[str]:
    """Attributes of plain tools that hold tensors of a GPU, like `ema.shadow`."""
    found = []
    for name, member in members(group).items():
        if not hasattr(member, "state_dict") and _has_state(member):
            for attribute, value in vars(member).items():
                if any(tensor.device.type != "cpu" for tensor in _tensors(value)):
                    found.append(f"{name}.{attribute}")
    return found


def _mapped(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Plain values with each tensor in them changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return (
            type(value)({key: _mapped(item, change) for key, item in value.items()}) if type(value) in _DICTS else value
        )
    if type(value) in (list, tuple):
        return type(value)(_mapped(item, change) for item in value)
    return value


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Those among plain values."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


def _on(value: Any, device: torch.device) -> Any:
    return _mapped(value, lambda tensor: tensor.to(device))


class _Hashed:
    """A file to write to that keeps the SHA-256 of what was written, and is on the disk when it is closed."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._digest = file, hashlib.sha256()
        self.size_bytes = 0

    def write(self, data: Any) -> int:
        self._file.write(data)
        self._digest.update(data)
        self.size_bytes += memoryview(data).nbytes
        return memoryview(data).nbytes

    def flush(self) -> None:
        self._file.flush()

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def __enter__(self) -> "_Hashed":
        return self

    def __exit__(self, *_: object) -> None:
        with self._file:
            self._file.flush()
            with contextlib.suppress(OSError, AttributeError, ValueError):  # an object store has no descriptor
                os.fsync(self._file.fileno())
