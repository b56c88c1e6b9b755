"""Where numbers go: the trackers that conf.yaml names under `cfg.trackers`."""

import importlib
from typing import TYPE_CHECKING, Any

from mlx_runtime.tracking.trackers import CSV, JSONL, TensorBoard

if TYPE_CHECKING:
    from mlx_runtime.tracking.mlflow import MLflow
    from mlx_runtime.tracking.weights_and_biases import WandB

__all__ = ["CSV", "JSONL", "MLflow", "TensorBoard", "WandB"]

_HOMES = {"MLflow": "mlflow", "WandB": "weights_and_biases"}
"""Modules of trackers that are imported when they are used."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"mlx_runtime.tracking.{_HOMES[name]}"), name)
