"""Resolution of names typed by users: the storage, a run, a checkpoint, or any path in the storage."""

import contextlib
import os
import re
from pathlib import Path

from mlx_runtime import companions
from mlx_runtime.companions import is_remote, reader_of
from mlx_runtime.config.projects import CONF
from mlx_runtime.errors import ConfigError, ElsewhereError, UsageError, suggest
from mlx_runtime.runs import records
from mlx_runtime.runs.checkpoints.index import CheckpointInfo, best_first, list_checkpoints
from mlx_runtime.runs.folder import RunFolder, find_run, named_run
from mlx_runtime.settings import Settings
from mlx_runtime.storage.files import is_uri, join_path
from mlx_runtime.storage.files import storage_root as root_of

RUNS = "runs"
"""The default storage, if conf.yaml does not name another."""


def storage_path(typed: str = "") -> str | None:
    """Return the storage of a command with a typed path, if there is one: each source replaces those after it.

    They are the typed path, `MLX_STORAGE`, and the conf.yaml of the working directory.
    """
    return typed or Settings.read().storage or conf_value("cfg.storage_path")


def storage_root() -> str:
    """Return the storage: `MLX_STORAGE`, the one in the conf.yaml of the working directory, or its folder `runs`."""
    path = storage_path()
    if path is None and not Path(RUNS).is_dir():
        raise UsageError("which storage? Change to the folder of an experiment, or set MLX_STORAGE=FOLDER")
    path = RUNS if path is None else path
    refuse_elsewhere(path)
    if Settings.read().on and path.startswith("/") and not Path(path).exists():
        raise UsageError(f"the cluster has no folder {path}; name another with MLX_STORAGE, or another cluster")
    return root_of(path)


def refuse_elsewhere(path: str) -> None:
    """Raise ElsewhereError for a folder that this machine lacks, if `RAY_ADDRESS` names a cluster that may have it."""
    settings = Settings.read()
    if os.environ.get("RAY_ADDRESS") and path.startswith("/") and not settings.job and not Path(path).exists():
        with contextlib.suppress(UsageError):  # like RAY_ADDRESS=auto on a node
            raise ElsewhereError(path, companions.part("ray.addresses").Address.parse(None).url)


def conf_value(key: str) -> str | None:
    """Return a value in the conf.yaml of the working directory, or None if there is no such file."""
    if not CONF.is_file():
        return None
    # here, for a quick start
    from mlx_runtime.config.interpolation import Reference, parse_config, unset_variables, values_by_key

    try:
        value = values_by_key(parse_config(CONF.read_bytes())).get(key)
        if unset := sorted(unset_variables(value)):
            raise ConfigError(f"{key} in {CONF} is {value}, and {', '.join(unset)} is not set")
        if isinstance(value, Reference) or not isinstance(value, str | int | float | None):
            raise ValueError(f"{key} is {value!r:.100}, which is not text here")
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {CONF}: {error}; fix it") from error
    return None if value is None else str(value)


def resolve_run(name: str, run: str | None = None) -> RunFolder:
    """Find the run named on a command line by one or two words: an experiment, and `run_003`, `3` or `latest`.

    A single word is a run of this experiment, `digits/run_003`, or the path or URI of a run's folder; a second word is
    then ignored.
    """
    if is_remote(name):
        raise UsageError(
            f"{name} is the mirror of a run, which has no logs and no driver; mlx xp ls, mlx train eval, --from, "
            "cfg.restore_checkpoint_path and open_run read it"
        )
    if run is not None and "/" not in name:
        return find_run(storage_root(), name, run)
    refuse_elsewhere(name)
    if is_uri(name) or name.count("/") > 1 or Path(name, "run.json").is_file():
        return named_run(name, "", "")
    experiment = "" if "/" in name else conf_value("cfg.name")
    if experiment is None:
        raise UsageError(f"cannot tell which experiment run {name!r} belongs to; write name/run_003, or the run's path")
    return named_run(name, storage_root(), experiment)


def resolve_checkpoint(text: str, which: str | None = None) -> tuple[RunFolder, str]:
    """Find a checkpoint by its folder or URI, or by its run or mirror.

    For a run, `which` is `latest` (the default), `best` or a name. Return the run, and the checkpoint's folder or URI.
    """
    refuse_elsewhere(text)
    path = text if is_uri(text) or not Path(text).is_dir() else str(Path(text).resolve())
    match = re.fullmatch(r"([^?]+)/checkpoints/(epoch_\d+(?:_step_\d+)?)/?(\?.*)?", path)
    if match and which:
        raise UsageError(f"{text} is already one checkpoint; leave out --checkpoint {which}")
    if is_remote(text):
        reader = reader_of(text)
        if which not in (None, "latest"):
            text = join_path(text, "checkpoints", find_checkpoint(reader.find(text).fetch(), which).name)
        folder, name = reader.fetch_checkpoint(text)
    else:
        folder = resolve_run(match[1] + (match[3] or "")) if match else resolve_run(text)
        name = find_checkpoint(folder, match[2] if match else which or "latest").name
    return folder, join_path(folder.checkpoints, name)


def find_checkpoint(folder: RunFolder, which: str | int) -> CheckpointInfo:
    """Return a checkpoint of a run: the `latest`, the `best` by `cfg.monitor`, or the one of a name or an epoch.

    Checkpoints with a damaged description are listed on stderr.

    Raises:
        UsageError: There is no such checkpoint.
    """
    found = list_checkpoints(folder.checkpoints, report=True)
    if not found:
        raise UsageError(f"{folder.title} has no readable checkpoint")
    if which == "latest":
        return found[-1]
    if which == "best":
        record = records.load_record(folder)
        ranked = best_first(found, record.get("monitor"), record.get("mode") or "min")
        if not ranked:
            raise UsageError(f"{folder.title} has no checkpoint with a finite value of cfg.monitor")
        return ranked[0]
    which = which if isinstance(which, str) else f"epoch_{which + 1:04d}"
    known = {item.name: item for item in found}
    if which not in known:
        raise UsageError(f"{folder.title} has no checkpoint {which}.{suggest(which, known)}")
    return known[which]
