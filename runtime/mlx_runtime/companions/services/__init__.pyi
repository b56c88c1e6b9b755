# Written by runtime/stubs.py.
from mlx_runtime.companions.services.mlflow import MLflow as MLflow
from mlx_runtime.companions.services.weights_and_biases import WandB as WandB
