"""Save and restore everything on an experiment that changes while it trains.

A checkpoint is a folder with one file, `state.pt`: a dict of plain values and tensors, so that reading it never runs
code (`torch.load(weights_only=True)`).

    {"epoch": 3, "global_step": 180, "passes": {"train": 4, "val": 4},
      "models": {name: state}, "optimizers": {name: state}, "tools": {name: state},
     "config": conf.yaml as it was}
"""

import copy
import math
import pickle
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import ray.train
import torch
from torch import nn

from mlx_runtime.errors import ConfigError, StorageError, first_line
from mlx_runtime.parallel import unwrapped

STATE = "state.pt"

PARTS = {"epoch", "global_step", "passes", "models", "optimizers", "tools", "config"}

State = dict[str, Any]


def state_of(group: Any) -> tuple[State, list[str]]:
    """The state of every member of a group (`models`, `optimizers`, `tools`) that has one.

    Returns:
        The states by name, and what cannot be part of a checkpoint, like `stopper.history`.
    """
    states: State = {}
    left_out: list[str] = []
    for name, member in members(group).items():
        if hasattr(member, "state_dict"):
            states[name] = dict((unwrapped(member) if isinstance(member, nn.Module) else member).state_dict())
        elif hasattr(member, "__dict__") and not isinstance(member, type):
            states[name] = {}
            for attribute, value in vars(member).items():
                try:
                    states[name][attribute] = _plain(value)
                except TypeError:
                    left_out.append(f"{name}.{attribute}")
    return states, left_out


def load_into(
    group: Any, saved: Mapping[str, Any], where: str, *, then: Mapping[str, Any], now: Mapping[str, Any]
) -> list[str]:
    """Put saved states back into the members of a group.

    An attribute of a plain tool that its constructor took keeps the value of the present config if that was changed
    since: a higher `patience` on the command line wins over the checkpoint's.

    Args:
        group: that holds the members.
        saved: states by name.
        where: what the user calls the group, like `models`.
        then: the group's config when the checkpoint was saved.
        now: the group's config.

    Returns:
        What was not restored, one line each.

    Raises:
        ConfigError: a model or an optimizer has no counterpart, or its state does not fit.
    """
    present = {name: member for name, member in members(group).items() if _has_state(member)}
    unmatched = sorted(set(present) ^ set(saved))
    if unmatched and where != "tools":
        sides = ", ".join(f"{name} ({'only in the code' if name in present else 'only there'})" for name in unmatched)
        raise ConfigError(f"the checkpoint does not fit: {where} {sides}. Restore with the code that saved it")
    for name in sorted(set(present) & set(saved)):
        member = present[name]
        try:
            if hasattr(member, "load_state_dict"):
                (unwrapped(member) if isinstance(member, nn.Module) else member).load_state_dict(saved[name])
            else:
                given_then, given_now = (given.get(name) or {} for given in (then, now))
                evolved = {key for key in saved[name] if given_then.get(key) == given_now.get(key)}
                vars(member).update({key: copy.deepcopy(saved[name][key]) for key in evolved})
        except (RuntimeError, ValueError, KeyError) as error:
            detail = " ".join(str(error).split())
            raise ConfigError(f"{where}.{name} in the checkpoint does not fit the config: {detail:.300}") from error
    return [
        f"{where}.{name} is new: the checkpoint has no state for it"
        if name in present
        else f"{where}.{name} is in the checkpoint only; if worker_loop makes it, call self.restore_checkpoint() after"
        for name in unmatched
    ]


def save(state: State, metrics: Mapping[str, float], folder: Path, *, writes: bool, local: bool) -> None:
    """Store a checkpoint in `folder` and report it to Ray Train. Every worker must call this.

    Args:
        state: as `state_of` gives; only the writing worker's is stored.
        metrics: decide which checkpoints are kept.
        folder: final place, inside the run's checkpoints.
        writes: whether this worker stores (rank 0).
        local: training runs inside this process, where Ray Train stores nothing.

    Raises:
        StorageError: the disk is full or not writable.
    """
    if not writes:
        ray.train.report(dict(metrics), checkpoint=None, checkpoint_dir_name=folder.name, checkpoint_upload_mode=_ASYNC)
        return
    made = _write(state, beside=folder if local else None)
    if local:
        if folder.exists():
            shutil.rmtree(folder)
        made = made.rename(folder)
    checkpoint = ray.train.Checkpoint.from_directory(str(made))
    ray.train.report(
        dict(metrics), checkpoint=checkpoint, checkpoint_dir_name=folder.name, checkpoint_upload_mode=_ASYNC
    )


def prune(folder: Path, keep: int, scores: Mapping[str, float]) -> None:
    """Keep the best `keep` checkpoints and the latest, as Ray Train does for its workers.

    Args:
        folder: of the checkpoints.
        keep: how many.
        scores: by folder name, higher is better; without any the newest are best.
    """
    found = sorted(path.name for path in folder.iterdir() if (path / STATE).is_file())
    ranked = sorted(found, key=lambda name: (scores.get(name, -math.inf), name), reverse=True)
    for name in set(found) - set(ranked[:keep]) - set(found[-1:]):
        shutil.rmtree(folder / name)


def _write(state: State, beside: Path | None) -> Path:
    """A new folder with the state in it, on the file system of `beside` or in the system's place for passing files."""
    folder = Path(tempfile.mkdtemp(prefix=".checkpoint-", dir=beside.parent if beside else None))
    folder.chmod(0o755)  # mkdtemp makes it private; colleagues share a storage
    try:
        with (folder / STATE).open("wb") as file:
            torch.save(state, file)
    except (OSError, RuntimeError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        reason = error.__context__ if isinstance(error.__context__, OSError) else error  # torch hides a full disk
        raise StorageError(f"cannot write a checkpoint to {folder.parent}: {reason}") from error
    return folder


def newest() -> Path | None:
    """The latest checkpoint of this run that Ray Train knows: set after a worker was lost and replaced."""
    checkpoint = ray.train.get_checkpoint()
    return Path(checkpoint.path) if checkpoint else None


def read(folder: Path) -> State:
    """A checkpoint's state on the CPU.

    Raises:
        ConfigError: there is none at this path, or it is damaged.
    """
    file = folder / STATE
    if not file.is_file():
        others = sorted(path.name for path in folder.parent.glob("*") if (path / STATE).is_file())
        there = f" Beside it there is: {', '.join(others)}." if others else ""
        raise ConfigError(f"{folder} is not a checkpoint: it has no {STATE}.{there}")
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ConfigError(f"{file} is damaged: {first_line(error)}") from error
    if not isinstance(state, dict) or not state.keys() >= PARTS:
        raise ConfigError(f"{file} was not saved by this library: it has no {', '.join(sorted(PARTS))}")
    return state


def members(group: Any) -> dict[str, Any]:
    """What a group holds by name, without private attributes."""
    return {name: value for name, value in vars(group).items() if not name.startswith("_")} if group is not None else {}


def _has_state(member: Any) -> bool:
    return hasattr(member, "state_dict") or (hasattr(member, "__dict__") and not isinstance(member, type))


def _plain(value: Any) -> Any:
    """A copy that `weights_only` loading gives back.

    Raises:
        TypeError: it would not.
    """
    if value is None or type(value) in (bool, int, float, complex, str, bytes):
        return value
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in (list, tuple):
        return type(value)(_plain(item) for item in value)
    if type(value) is dict:
        return {_plain(key): _plain(item) for key, item in value.items()}
    raise TypeError


_ASYNC = ray.train.CheckpointUploadMode.ASYNC
