"""Global settings of the experiment. Edit: add fields of your own; worker_loop finds them in self.cfg."""

from dataclasses import dataclass
from typing import Literal

import mlx_runtime


@dataclass
class TrainConfig(mlx_runtime.TrainConfig):
    """What mlx_runtime.TrainConfig has (workers, seed, checkpoints, …), with this experiment's defaults."""

    name: str = "<<cookiecutter.experiment_name>>"
    num_epochs: int = 30
    start_workers: int = 2
    monitor: str | None = "val/accuracy"
    mode: Literal["max", "min"] = "max"
