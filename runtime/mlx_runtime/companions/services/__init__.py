"""Trackers of services: MLflow, and Weights & Biases."""

from mlx_runtime.importing import door

__all__, __getattr__ = door(
    __name__,
    mlflow="MLflow",
    weights_and_biases="WandB",
)
