"""The loop of `workload` under mlx."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score, MulticlassPrecision

import mlx_runtime
from mlx_runtime import DUMMY_PARAMS, BaseModule, prepare_model
from src.workload import CLASSES, EPOCHS, EVERY, Clock, Net, Rows, forward, logs


@dataclass
class TrainConfig(mlx_runtime.TrainConfig):
    name: str = "logging"
    num_epochs: int = EPOCHS
    log_every_steps: int = EVERY
    out: Path = Path("measured.json")


@dataclass
class Datasets:
    train: Rows = Rows()


@dataclass
class Models:
    net: Net = Net()

    map_params_to_optimizers = {"net": "sgd"}


@dataclass
class Optimizers:
    sgd: torch.optim.SGD = torch.optim.SGD(DUMMY_PARAMS, lr=0.01)


@dataclass
class Losses:
    cross_entropy: MeanMetric = MeanMetric(nan_strategy="ignore")
    margin: MeanMetric = MeanMetric(nan_strategy="ignore")


@dataclass
class Metrics:
    accuracy: MulticlassAccuracy = MulticlassAccuracy(CLASSES, validate_args=False)
    f1: MulticlassF1Score = MulticlassF1Score(CLASSES, validate_args=False)
    precision: MulticlassPrecision = MulticlassPrecision(CLASSES, validate_args=False)
    confidence: MeanMetric = MeanMetric(nan_strategy="ignore")


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
        metrics, clock = vars(self.losses) | vars(self.metrics), Clock()
        recorder = self._run.metrics
        recorder.save, recorder.step_finished = map(clock.timed, (recorder.save, recorder.step_finished))
        for epoch in range(self.cfg.num_epochs):
            self.reset_all_metrics_and_losses()
            clock.start()
            for batch_idx, batch in enumerate(train):
                forward(network, metrics, batch["input"], batch["label"]).backward()
                self.optimizers.sgd.step()
                self.optimizers.sgd.zero_grad()
                if logs(epoch):
                    self.save_metrics_and_losses(batch_idx=batch_idx, epoch=epoch)
            clock.stop(epoch)
        clock.write(self.cfg.out)
