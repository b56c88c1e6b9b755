"""The verbs of `mlx xp`: look at runs."""

import os
import sys
from pathlib import Path

from mlx_runtime.errors import UsageError
from mlx_runtime.layout import CONF, find_run, storage_folder
from mlx_runtime.settings import Settings


def storage() -> Path:
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
    return storage_folder(chosen)


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
    if name is None:
        return storage()
    if os.sep in name:
        return Path(name).resolve()
    found = find_run(storage(), name, run or "latest")
    return found.path if run else found.path.parent
