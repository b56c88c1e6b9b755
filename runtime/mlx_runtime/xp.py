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


def board(experiment: str | None, run: str | None, port: int) -> None:
    """Become a TensorBoard on one run, all runs of an experiment, or all there are. Does not return.

    Raises:
        UsageError: no such experiment or run.
    """
    folder = storage()
    if experiment is not None:
        found = find_run(folder, experiment, run or "latest")
        folder = found.path if run else found.path.parent
    elif not folder.is_dir():
        raise UsageError(f"there are no runs in {folder} yet; make one with: mlx train run")
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder), "--port", str(port)]
    os.execv(sys.executable, command)
