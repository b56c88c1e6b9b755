"""Everything between a PyTorch experiment and the Ray cluster that trains it.

The names below are imported when first used, so that `import mlx_runtime` and `mlx --help` stay instant.
"""

import importlib
from typing import TYPE_CHECKING, Any

from mlx_runtime.importing import many_imports
from mlx_runtime.settings import prepare_fork, prepare_ray

if TYPE_CHECKING:
    from mlx_runtime.cluster import connect
    from mlx_runtime.config import DataConfig, TrainConfig
    from mlx_runtime.datajob import DataJob, run_job
    from mlx_runtime.errors import MlxError, clean_exit
    from mlx_runtime.experiment import BaseModule
    from mlx_runtime.loading import load_config
    from mlx_runtime.nodes import DUMMY_PARAMS
    from mlx_runtime.runs import open_run
    from mlx_runtime.trainer import fit

__version__ = "0.1.0"

__all__ = [
    "DUMMY_PARAMS",
    "BaseModule",
    "DataConfig",
    "DataJob",
    "MlxError",
    "TrainConfig",
    "clean_exit",
    "connect",
    "fit",
    "load_config",
    "open_run",
    "run_job",
]

prepare_ray()  # before anyone's `import ray`

_HOMES = {
    "BaseModule": "experiment",
    "DUMMY_PARAMS": "nodes",
    "DataConfig": "config",
    "DataJob": "datajob",
    "MlxError": "errors",
    "TrainConfig": "config",
    "clean_exit": "errors",
    "connect": "cluster",
    "fit": "trainer",
    "load_config": "loading",
    "open_run": "runs",
    "run_job": "datajob",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in ("connect", "fit"):
        prepare_fork()  # before whatever imports NumPy or torch first
    with many_imports():
        value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
