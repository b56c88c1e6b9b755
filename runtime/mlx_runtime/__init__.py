"""A thin runtime between PyTorch experiments and the Ray clusters that train them.

The names below are imported when first used, so that `import mlx_runtime` and `mlx --help` stay instant.
"""

import importlib
from typing import TYPE_CHECKING, Any

from mlx_runtime.importing import many_imports
from mlx_runtime.settings import prepare_fork

if TYPE_CHECKING:
    from mlx_runtime.companions.notebook.function_runs import Trainer
    from mlx_runtime.companions.notebook.functions import (
        load_checkpoint,
        local_rank,
        report,
        save_checkpoint,
        world_rank,
        world_size,
    )
    from mlx_runtime.companions.notebook.runs import run
    from mlx_runtime.companions.ray.datajob import DataJob, run_job
    from mlx_runtime.companions.sweeps.api import kfold, sweep
    from mlx_runtime.companions.sweeps.results import open_sweep
    from mlx_runtime.config.building import DUMMY_PARAMS
    from mlx_runtime.config.declarations import defer_loading
    from mlx_runtime.distributed.topology import get_device
    from mlx_runtime.distributed.wrapping import prepare_model
    from mlx_runtime.errors import MlxError
    from mlx_runtime.exits import clean_exit
    from mlx_runtime.runs.reader import open_run
    from mlx_runtime.training.experiment import BaseModule
    from mlx_runtime.training.options import DataConfig, TrainConfig
    from mlx_runtime.training.planning import connect
    from mlx_runtime.training.request import load_config
    from mlx_runtime.training.terminal import fit

__version__ = "0.1.0"

__all__ = [
    "DUMMY_PARAMS",
    "BaseModule",
    "DataConfig",
    "DataJob",
    "MlxError",
    "TrainConfig",
    "Trainer",
    "clean_exit",
    "connect",
    "defer_loading",
    "fit",
    "get_device",
    "kfold",
    "load_checkpoint",
    "load_config",
    "local_rank",
    "open_run",
    "open_sweep",
    "prepare_model",
    "report",
    "run",
    "run_job",
    "save_checkpoint",
    "sweep",
    "world_rank",
    "world_size",
]

_HOMES = {
    "BaseModule": "training.experiment",
    "DUMMY_PARAMS": "config.building",
    "DataConfig": "training.options",
    "DataJob": "companions.ray.datajob",
    "MlxError": "errors",
    "TrainConfig": "training.options",
    "Trainer": "companions.notebook.function_runs",
    "clean_exit": "exits",
    "connect": "training.planning",
    "defer_loading": "config.declarations",
    "fit": "training.terminal",
    "get_device": "distributed.topology",
    "kfold": "companions.sweeps.api",
    "load_checkpoint": "companions.notebook.functions",
    "load_config": "training.request",
    "local_rank": "companions.notebook.functions",
    "open_run": "runs.reader",
    "open_sweep": "companions.sweeps.results",
    "prepare_model": "distributed.wrapping",
    "report": "companions.notebook.functions",
    "run": "companions.notebook.runs",
    "run_job": "companions.ray.datajob",
    "save_checkpoint": "companions.notebook.functions",
    "sweep": "companions.sweeps.api",
    "world_rank": "companions.notebook.functions",
    "world_size": "companions.notebook.functions",
}


def load_ipython_extension(shell: Any) -> None:
    """Register `%%mlx`; IPython calls this for `%load_ext mlx_runtime`."""
    from mlx_runtime.companions.notebook.magic import register

    register(shell)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in ("connect", "fit", "kfold", "sweep"):
        prepare_fork()  # before NumPy or torch is imported
    with many_imports():
        value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
