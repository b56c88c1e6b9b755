"""Resolve what a user typed: the storage, a run, or a checkpoint."""

import re
from pathlib import Path

from mlx_runtime.config.projects import CONF
from mlx_runtime.errors import ConfigError, UsageError, suggest
from mlx_runtime.runs.checkpoint_index import list_checkpoints
from mlx_runtime.runs.folder import RunFolder, find_run, named_run
from mlx_runtime.settings import Settings
from mlx_runtime.storage import files
from mlx_runtime.storage.documents import selected
from mlx_runtime.storage.files import is_uri, joined

NO_STORAGE = "which storage? Change to the folder of an experiment, or set MLX_STORAGE=FOLDER"


def storage_root() -> str:
    """Return the storage: `MLX_STORAGE`, else the one in the conf.yaml of the working directory.

    Raises:
        UsageError: neither names one.
    """
    path = Settings.read().storage or conf_value("cfg.storage_path")
    if path is None:
        raise UsageError(NO_STORAGE)
    return files.storage_root(path)


def conf_value(key: str) -> str | None:
    """Return a value in the conf.yaml of the working directory, or None if there is no such file.

    Raises:
        ConfigError: it cannot be read.
    """
    if not CONF.is_file():
        return None
    try:
        return selected(CONF.read_bytes(), key)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {CONF}: {error}; fix it") from error


def resolve_run(name: str, run: str | None = None) -> RunFolder:
    """Find the run that one or two words of a command name.

    Args:
        name: an experiment in the storage, if `run` follows. Otherwise `run_003`, `3` or `latest` of the experiment
            here, `digits/run_003`, or the path or URI of a run's folder, in which case `run` is ignored.
        run: `run_003`, `3` or `latest`.

    Raises:
        UsageError: there is no such run.
    """
    if run is not None and "/" not in name:
        return find_run(storage_root(), name, run)
    if is_uri(name) or Path(name, "run.json").is_file():
        return named_run(name, "", "")
    if "/" in name:
        return named_run(name, storage_root(), "")
    experiment = conf_value("cfg.name")
    if experiment is None:
        raise UsageError(f"cannot tell which experiment run {name!r} belongs to; write name/run_003, or the run's path")
    return named_run(name, storage_root(), experiment)


def resolve_checkpoint(text: str) -> tuple[RunFolder, str]:
    """Find a checkpoint by its folder or URI, or the latest of a run that `resolve_run` finds.

    Returns:
        The run of the checkpoint, and the folder or URI of the checkpoint.

    Raises:
        UsageError: there is no such run or checkpoint.
        StorageError: the storage does not answer.
    """
    path = text if is_uri(text) or not Path(text).is_dir() else str(Path(text).resolve())
    match = re.fullmatch(r"([^?]+)/checkpoints/(epoch_\d+(?:_step_\d+)?)/?(\?.*)?", path)
    folder = resolve_run(match[1] + (match[3] or "")) if match else resolve_run(text)
    known = [item.name for item in list_checkpoints(folder.checkpoints)]
    if not known:
        raise UsageError(f"{folder.title} has no checkpoint yet")
    name = match[2] if match else known[-1]
    if name not in known:
        raise UsageError(f"{folder.title} has no checkpoint {name}.{suggest(name, known)}")
    return folder, joined(folder.checkpoints, name)
