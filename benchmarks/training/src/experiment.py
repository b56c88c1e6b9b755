"""The loop of `workload` under mlx."""

from dataclasses import dataclass
from pathlib import Path

import torch

import mlx_runtime
from mlx_runtime import DUMMY_PARAMS, BaseModule, prepare_model
from src.workload import LEARNING_RATE, Clock, Gpt, Text, step


@dataclass
class TrainConfig(mlx_runtime.TrainConfig):
    name: str = "training"
    num_epochs: int = 1
    out: Path = Path("measured.json")


@dataclass
class Datasets:
    train: Text = Text()


@dataclass
class Models:
    net: Gpt = Gpt()

    map_params_to_optimizers = {"net": "adam"}


@dataclass
class Optimizers:
    adam: torch.optim.Adam = torch.optim.Adam(DUMMY_PARAMS, lr=LEARNING_RATE)


class Experiment(BaseModule):
    cfg: TrainConfig
    datasets: Datasets
    models: Models
    optimizers: Optimizers

    def worker_loop(self, dataset_shards) -> None:
        network, clock = prepare_model(self.models.net), Clock()
        self.models.net = network
        (train,) = self.generate_loaders(dataset_shards=dataset_shards)
        for batch in train:
            step(network, self.optimizers.adam, batch["input"], batch["target"])
            clock.tick()
        clock.write(self.cfg.out)
