"""Save and restore everything on an experiment that changes while it trains.

A checkpoint is a folder with one file, `state.pt`: a dict of plain values and tensors, so that reading it never runs
code (`torch.load(weights_only=True)`).

    {"epoch": 3, "global_step": 180, "passes": {"train": 4, "val": 4},
     "models": {name: state}, "optimizers": {name: state}, "tools": {name: state}}
"""

import copy
import pickle
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray.train
import torch
from torch import nn

from mlx_runtime.errors import ConfigError, StorageError
from mlx_runtime.parallel import unwrapped

STATE = "state.pt"

State = dict[str, Any]


def state_of(group: Any) -> State:
    """The state of every member of a group (`models`, `optimizers`, `tools`) that has one."""
    return {name: found for name, member in members(group).items() if (found := _member_state(member))}


def load_into(group: Any, state: Mapping[str, Any], where: str) -> None:
    """Put saved states back into the members of a group.

    Args:
        where: what the error should call the group, like `models`.

    Raises:
        ConfigError: a member's state does not fit what conf.yaml now describes.
    """
    present = members(group)
    for name, saved in state.items():
        member = present.get(name)
        if member is None:
            continue  # removed from the code since
        try:
            if hasattr(member, "load_state_dict"):
                (unwrapped(member) if isinstance(member, nn.Module) else member).load_state_dict(saved)
            else:
                vars(member).update(copy.deepcopy(saved))
        except (RuntimeError, ValueError, KeyError) as error:
            detail = " ".join(str(error).split())
            raise ConfigError(f"{where}.{name} in the checkpoint does not fit the config: {detail:.300}") from error


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


def _write(state: State, beside: Path | None) -> Path:
    """A new folder with the state in it, on the file system of `beside` or in the system's place for passing files."""
    folder = Path(tempfile.mkdtemp(prefix=".checkpoint-", dir=beside.parent if beside else None))
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
        raise ConfigError(
            f"{folder} is not a checkpoint: it has no {STATE}. A run keeps them in checkpoints/epoch_NNNN"
        )
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ConfigError(f"{file} is damaged: {str(error).splitlines()[0]}") from error
    assert isinstance(state, dict)
    return state


def members(group: Any) -> dict[str, Any]:
    """What a group holds by name, without private attributes."""
    return {name: value for name, value in vars(group).items() if not name.startswith("_")} if group is not None else {}


def _member_state(member: Any) -> State | None:
    if hasattr(member, "state_dict"):
        return dict((unwrapped(member) if isinstance(member, nn.Module) else member).state_dict())
    if not hasattr(member, "__dict__") or isinstance(member, type):
        return None
    return {name: copy.deepcopy(value) for name, value in vars(member).items() if _plain(value)}


def _plain(value: Any) -> bool:
    """Whether `weights_only` loading gives this value back."""
    if isinstance(value, list | tuple):
        return all(_plain(item) for item in value)
    if isinstance(value, dict):
        return all(_plain(key) and _plain(item) for key, item in value.items())
    return value is None or type(value) in (bool, int, float, complex, str, bytes) or isinstance(value, torch.Tensor)


_ASYNC = ray.train.CheckpointUploadMode.ASYNC
