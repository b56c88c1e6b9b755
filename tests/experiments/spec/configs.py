from dataclasses import dataclass

import mlx_runtime


@dataclass
class TrainConfig(mlx_runtime.TrainConfig):
    name: str = "experiment 1"
    num_epochs: int = 2
    start_workers: int = 3
