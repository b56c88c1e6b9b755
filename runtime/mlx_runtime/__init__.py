"""A thin runtime between PyTorch experiments and the Ray clusters that train them.

The names below are imported when first used, so that `import mlx_runtime` and `mlx --help` stay instant.
"""

import importlib
from typing import TYPE_CHECKING, Any

from mlx_runtime.importing import many_imports
from mlx_runtime.settings import prepare_fork

if TYPE_CHECKING:
    from mlx_runtime.companions.fragments.clusterizing import clusterize
    from mlx_runtime.companions.jobs.datajob import DataJob, run_job
    from mlx_runtime.companions.jobs.options import DataConfig
    from mlx_runtime.companions.notebook.function_runs import Trainer, reattach
    from mlx_runtime.companions.notebook.functions import (
        accelerate,
        get_dataset_shard,
        load_checkpoint,
        local_rank,
        report,
        save_checkpoint,
        world_rank,
        world_size,
    )
    from mlx_runtime.companions.notebook.runs import run
    from mlx_runtime.companions.serving.exports.exported import load_export
    from mlx_runtime.companions.sweeps.api import kfold, sweep
    from mlx_runtime.companions.sweeps.results import open_sweep
    from mlx_runtime.companions.ui.tables import metrics_table, runs_table
    from mlx_runtime.config.building import DUMMY_PARAMS
    from mlx_runtime.config.constructors.declarations import defer_loading
    from mlx_runtime.distributed.randomness import set_seed
    from mlx_runtime.distributed.topology import get_device
    from mlx_runtime.distributed.wrapping import prepare_model, unwrap
    from mlx_runtime.driver.planning import connect
    from mlx_runtime.driver.request import load_config
    from mlx_runtime.driver.terminal import fit
    from mlx_runtime.errors import MlxError
    from mlx_runtime.exits import clean_exit
    from mlx_runtime.loop.experiment import BaseModule
    from mlx_runtime.loop.options import TrainConfig
    from mlx_runtime.runs.queries.reader import open_run

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
    "metrics_table",
    "open_run",
    "open_sweep",
    "prepare_model",
    "reattach",
    "report",
    "run",
    "run_job",
    "runs_table",
    "save_checkpoint",
    "set_seed",
    "sweep",
    "unwrap",
    "world_rank",
    "world_size",
]

_HOMES = {
    "BaseModule": "loop.experiment",
    "DUMMY_PARAMS": "config.building",
    "DataConfig": "companions.jobs.options",
    "DataJob": "companions.jobs.datajob",
    "MlxError": "errors",
    "TrainConfig": "loop.options",
    "Trainer": "companions.notebook.function_runs",
    "accelerate": "companions.notebook.functions",
    "clean_exit": "exits",
    "clusterize": "companions.fragments.clusterizing",
    "connect": "driver.planning",
    "defer_loading": "config.constructors.declarations",
    "fit": "driver.terminal",
    "get_dataset_shard": "companions.notebook.functions",
    "get_device": "distributed.topology",
    "kfold": "companions.sweeps.api",
    "load_checkpoint": "companions.notebook.functions",
    "load_config": "driver.request",
    "load_export": "companions.serving.exports.exported",
    "local_rank": "companions.notebook.functions",
    "metrics_table": "companions.ui.tables",
    "open_run": "runs.queries.reader",
    "open_sweep": "companions.sweeps.results",
    "prepare_model": "distributed.wrapping",
    "reattach": "companions.notebook.function_runs",
    "report": "companions.notebook.functions",
    "run": "companions.notebook.runs",
    "run_job": "companions.jobs.datajob",
    "runs_table": "companions.ui.tables",
    "save_checkpoint": "companions.notebook.functions",
    "set_seed": "distributed.randomness",
    "sweep": "companions.sweeps.api",
    "unwrap": "distributed.wrapping",
    "world_rank": "companions.notebook.functions",
    "world_size": "companions.notebook.functions",
}


def load_ipython_extension(shell: Any) -> None:
    """Register `%%mlx`; IPython calls this for `%load_ext mlx_runtime`."""
    from mlx_runtime.companions.notebook.cells import register

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
