"""Trackers for `cfg.trackers`."""

from typing import TYPE_CHECKING

from mlx_runtime.importing import imports_on_use
from mlx_runtime.tracking.trackers import JSONL, TensorBoard

if TYPE_CHECKING:
    from mlx_runtime.companions.services.csv_file import CSV
    from mlx_runtime.companions.services.mlflow import MLflow
    from mlx_runtime.companions.services.weights_and_biases import WandB

__all__ = ["CSV", "JSONL", "MLflow", "TensorBoard", "WandB"]

__getattr__ = imports_on_use(
    __name__,
    {
        "CSV": "mlx_runtime.companions.services.csv_file",
        "MLflow": "mlx_runtime.companions.services.mlflow",
        "WandB": "mlx_runtime.companions.services.weights_and_biases",
    },
)
