"""The contender `mlx`: the same passes, inside `worker_loop`."""

from dataclasses import dataclass
from pathlib import Path

import torch

import mlx_runtime
from mlx_runtime import BaseModule, prepare_model
from src.workload import Images, Mlp, Tensors, cases, measured, train_step, write


@dataclass
class TrainConfig(mlx_runtime.TrainConfig):
    name: str = "input"
    out: Path = Path("measured.json")


@dataclass
class Datasets:
    tensors: Tensors = Tensors()
    images: Images = Images()


class Experiment(BaseModule):
    cfg: TrainConfig
    datasets: Datasets

    def worker_loop(self, dataset_shards) -> None:
        rates = {}
        for data, model, batch_size in cases():
            loader = getattr(dataset_shards, data).iter_torch_batches(batch_size=batch_size)
            step = self.trained_by(data) if model == "mlp" else lambda batch: None
            rates[f"{data} {model} {batch_size}"] = measured(lambda number, loader=loader: loader, step)
        write(self.cfg.out, rates)

    @staticmethod
    def trained_by(data: str):
        network = prepare_model(Mlp(data))
        optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
        return lambda batch: train_step(network, optimizer, batch["input"], batch["label"])
