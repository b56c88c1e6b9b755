"""The epoch of `workload` under mlx."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torchmetrics.classification import MulticlassAccuracy

import mlx_runtime
from mlx_runtime import DUMMY_PARAMS, BaseModule, prepare_model
from src.workload import CLASSES, LEARNING_RATE, CrossEntropy, Images, Net, stepped


@dataclass
class TrainConfig(mlx_runtime.TrainConfig):
    name: str = "starting"
    num_epochs: int = 1
    out: Path = Path("stepped")


@dataclass
class Datasets:
    train: Images = Images()


@dataclass
class Models:
    net: Net = Net()

    map_params_to_optimizers = {"net": "adam"}


@dataclass
class Optimizers:
    adam: torch.optim.Adam = torch.optim.Adam(DUMMY_PARAMS, lr=LEARNING_RATE)


@dataclass
class Losses:
    cross_entropy: CrossEntropy = CrossEntropy()


@dataclass
class Metrics:
    accuracy: MulticlassAccuracy = MulticlassAccuracy(CLASSES)


class Experiment(BaseModule):
    cfg: TrainConfig
    datasets: Datasets
    models: Models
    optimizers: Optimizers
    losses: Losses
    metrics: Metrics

    def worker_loop(self, dataset_shards) -> None:
        network = self.models.net = prepare_model(self.models.net)
        (train,) = self.generate_loaders(dataset_shards=dataset_shards)
        for epoch in range(self.cfg.start_epoch, self.cfg.num_epochs):
            for batch_idx, batch in enumerate(train):
                logits = network(batch["image"])
                self.losses.cross_entropy(logits, batch["label"]).backward()
                self.optimizers.adam.step()
                self.optimizers.adam.zero_grad()
                self.metrics.accuracy.update(logits.detach(), batch["label"])
                stepped(self.cfg.out)
                self.save_metrics_and_losses(batch_idx=batch_idx, epoch=epoch)
            self.save_checkpoint(epoch=epoch)
