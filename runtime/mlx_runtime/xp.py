"""The verbs of `mlx xp`: look at runs, and end them."""

import os
import sys
import time
from pathlib import Path

from mlx_runtime import registry
from mlx_runtime.errors import MlxError, UsageError
from mlx_runtime.layout import CONF, find_run, storage_root
from mlx_runtime.settings import Settings
from mlx_runtime.storage import is_uri

STOP_S = 60
"""How long `stop` waits for the run to end: it finishes a step and saves a checkpoint."""


def storage() -> str:
    """The storage of the experiment here: `MLX_STORAGE`, else what its conf.yaml says.

    Raises:
        UsageError: neither says anything.
    """
    chosen = Settings.read().storage
    if chosen is None and CONF.is_file():
        from omegaconf import OmegaConf

        chosen = OmegaConf.select(OmegaConf.load(CONF), "cfg.storage_path")
    if chosen is None:
        raise UsageError("which storage? Change into an experiment, or set MLX_STORAGE=FOLDER")
    return storage_root(str(chosen))


def stop(name: str, run: str) -> str:
    """Ask a run to save a checkpoint and end, wherever its driver is, and wait until it has.

    Args:
        name: an experiment in the storage.
        run: `run_003`, `3` or `latest`.

    Returns:
        How it ended.

    Raises:
        UsageError: there is no such run, or it does not run.
        MlxError: it has not ended in time.
    """
    folder = find_run(storage(), name, run)
    title = f"{folder.experiment} {folder.name}"
    status = registry.status_of(registry.recorded(folder))
    if status not in ("PENDING", "RUNNING"):
        raise UsageError(f"{title} is {status}; there is nothing to stop")
    folder.ask_to_stop()
    until = time.monotonic() + STOP_S
    while status in ("PENDING", "RUNNING"):
        if time.monotonic() > until:
            raise MlxError(f"{title} was asked to stop and is still {status} after {STOP_S} s; is its step so long?")
        time.sleep(0.5)
        status = registry.status_of(registry.recorded(folder))
    return f"{title} is {status}"


def board(name: str | None, run: str | None, port: int) -> None:
    """Become a TensorBoard on one run, all runs of an experiment, or all there are. Does not return.

    Args:
        name: an experiment in the storage, or the path of any folder with runs.
        run: `run_003`, `3` or `latest`; all runs when None.
        port: on 127.0.0.1.

    Raises:
        UsageError: no such experiment, run or folder.
    """
    folder = _folder(name, run)
    if not folder.is_dir():
        raise UsageError(f"there are no runs in {folder} yet; make one with: mlx train run")
    options = ["--logdir", str(folder), "--host", "127.0.0.1", "--port", str(port)]
    os.execv(sys.executable, [sys.executable, "-m", "tensorboard.main", *options])


def _folder(name: str | None, run: str | None) -> Path:
    if name is not None and os.sep in name:
        return Path(name).resolve()
    root = storage()
    if is_uri(root):
        raise UsageError(f"TensorBoard reads folders, and runs are in {root}; copy them to this machine first")
    if name is None:
        return Path(root)
    found = find_run(root, name, run or "latest")
    return found.path if run else found.path.parent
