"""Global settings. Edit: add your own fields; they are available as self.cfg."""

from dataclasses import dataclass
from typing import Literal

import mlx_runtime.jax


@dataclass
class TrainConfig(mlx_runtime.jax.TrainConfig):
    """The fields of mlx_runtime.jax.TrainConfig (mesh, workers, seed, …), with the defaults of this experiment."""

    name: str = "<<cookiecutter.experiment_name>>"
    num_epochs: int = 30
    start_workers: int = 2
    monitor: str | None = "val/accuracy"
    mode: Literal["max", "min"] = "max"
