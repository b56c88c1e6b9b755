"""A thin runtime between PyTorch experiments and the Ray clusters that train them.

The names below are imported when first used, so that `import mlx_runtime` and `mlx --help` stay instant.
"""

import importlib
from typing import TYPE_CHECKING, Any

from mlx_runtime.importing import many_imports
from mlx_runtime.settings import prepare_fork

if TYPE_CHECKING:
    from mlx_runtime.companions.fragments import clusterize
    from mlx_runtime.companions.notebook import (
        Trainer,
        accelerate,
        get_dataset_shard,
        load_checkpoint,
        local_rank,
        reattach,
        report,
        run,
        save_checkpoint,
        world_rank,
        world_size,
    )
    from mlx_runtime.companions.ray import DataJob, run_job
    from mlx_runtime.companions.serving import load_export
    from mlx_runtime.companions.sweeps import kfold, open_sweep, sweep
    from mlx_runtime.config import DUMMY_PARAMS
    from mlx_runtime.config.constructors.declarations import defer_loading
    from mlx_runtime.distributed import get_device, prepare_model, unwrap
    from mlx_runtime.distributed.randomness import set_seed
    from mlx_runtime.errors import MlxError
    from mlx_runtime.exits import clean_exit
    from mlx_runtime.runs.queries import open_run
    from mlx_runtime.training import DataConfig, TrainConfig, connect, fit, load_config
    from mlx_runtime.training.loop import BaseModule

__version__ = "0.1.0"

__all__ = [
    "DUMMY_PARAMS",
    "BaseModule",
    "DataConfig",
    "DataJob",
    "MlxError",
    "TrainConfig",
    "Trainer",
    "accelerate",
    "clean_exit",
    "clusterize",
    "connect",
    "defer_loading",
    "fit",
    "get_dataset_shard",
    "get_device",
    "kfold",
    "load_checkpoint",
    "load_config",
    "load_export",
    "local_rank",
    "open_run",
    "open_sweep",
    "prepare_model",
    "reattach",
    "report",
    "run",
    "run_job",
    "save_checkpoint",
    "set_seed",
    "sweep",
    "unwrap",
    "world_rank",
    "world_size",
]

_HOMES = {
    "BaseModule": "training.loop",
    "DUMMY_PARAMS": "config",
    "DataConfig": "training",
    "DataJob": "companions.ray",
    "MlxError": "errors",
    "TrainConfig": "training",
    "Trainer": "companions.notebook",
    "accelerate": "companions.notebook",
    "clean_exit": "exits",
    "clusterize": "companions.fragments",
    "connect": "training",
    "defer_loading": "config.constructors.declarations",
    "fit": "training",
    "get_dataset_shard": "companions.notebook",
    "get_device": "distributed",
    "kfold": "companions.sweeps",
    "load_checkpoint": "companions.notebook",
    "load_config": "training",
    "load_export": "companions.serving",
    "local_rank": "companions.notebook",
    "open_run": "runs.queries",
    "open_sweep": "companions.sweeps",
    "prepare_model": "distributed",
    "reattach": "companions.notebook",
    "report": "companions.notebook",
    "run": "companions.notebook",
    "run_job": "companions.ray",
    "save_checkpoint": "companions.notebook",
    "set_seed": "distributed.randomness",
    "sweep": "companions.sweeps",
    "unwrap": "distributed",
    "world_rank": "companions.notebook",
    "world_size": "companions.notebook",
}


def load_ipython_extension(shell: Any) -> None:
    """Register `%%mlx`; IPython calls this for `%load_ext mlx_runtime`."""
    from mlx_runtime.companions.notebook import register

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
