"""Two training sets side by side: a few labeled rows, and many unlabeled ones.

The loss of unlabeled images is the difference between predictions with and without noise. Copy this file over
`src/experiment.py`.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import Adam
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

import mlx_runtime
from mlx_runtime import DUMMY_PARAMS, BaseModule, prepare_model
from mlx_runtime.datasets import DatasetShards, Loader
from src.datasets import Digits

LABELLED = 240
"""Number of labeled images, of 1,257 training images."""


@dataclass
class TrainConfig(mlx_runtime.TrainConfig):
    """The settings of a run, and those of this experiment.

    Attributes:
        unlabelled_weight: weight of the loss of unlabeled images.
        noise: standard deviation of the noise added to their pixels.
    """

    name: str = "semi"
    num_epochs: int = 20
    start_workers: int = 2
    unlabelled_weight: float = 0.5
    noise: float = 0.2
    monitor: str | None = "val/accuracy"
    mode: Literal["max", "min"] = "max"


class Labelled(Digits):
    """The labeled rows: the first ones of the training split."""

    def __init__(self, batch_size: int = 8):
        super().__init__("train", batch_size)
        self.images, self.labels = self.images[:LABELLED], self.labels[:LABELLED]


class Unlabelled(Digits):
    """The unlabeled rows: all others. Larger batches give as many steps per pass; `zip` ends with the shorter one."""

    def __init__(self, batch_size: int = 34):
        super().__init__("train", batch_size)
        self.images, self.labels = self.images[LABELLED:], self.labels[LABELLED:]


class Net(nn.Sequential):
    """Images (n, 1, 8, 8) to logits (n, 10)."""

    def __init__(self, width: int = 128):
        super().__init__(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


@dataclass
class Datasets:
    train: Labelled = Labelled()
    unlabelled: Unlabelled = Unlabelled()
    val: Digits = Digits(split="val", batch_size=128)


@dataclass
class Models:
    net: Net = Net()

    map_params_to_optimizers = {"net": "adam"}


@dataclass
class Optimizers:
    adam: Adam = Adam(DUMMY_PARAMS, lr=2e-3)


@dataclass
class Metrics:
    loss: MeanMetric = MeanMetric()
    accuracy: MulticlassAccuracy = MulticlassAccuracy(num_classes=10, average="micro")


class Experiment(BaseModule):
    cfg: TrainConfig
    datasets: Datasets
    models: Models
    optimizers: Optimizers
    metrics: Metrics

    def worker_loop(self, dataset_shards: DatasetShards) -> None:
        self.models.net = prepare_model(self.models.net)
        train, unlabelled, val = self.generate_loaders(dataset_shards=dataset_shards)
        for epoch in range(self.cfg.start_epoch, self.cfg.num_epochs):
            self.train(train, unlabelled, epoch)
            self.evaluate(val, epoch)
            self.save_checkpoint(epoch=epoch)

    def train(self, train: Loader, unlabelled: Loader, epoch: int) -> None:
        self.reset_all_metrics_and_losses()
        for batch_idx, (known, unknown) in enumerate(zip(train, unlabelled, strict=True)):
            noisy = unknown["image"] + self.cfg.noise * torch.randn_like(unknown["image"])
            images = torch.cat([known["image"], unknown["image"], noisy])  # DDP: a second pass may change buffers
            rows = len(known["image"]), len(noisy), len(noisy)
            logits, clean, perturbed = self.models.net(images).split(rows)
            loss = F.cross_entropy(logits, known["label"])
            same = F.kl_div(perturbed.log_softmax(1), clean.detach().softmax(1), reduction="batchmean")
            self.optimizers.adam.zero_grad()
            (loss + self.cfg.unlabelled_weight * same).backward()
            self.optimizers.adam.step()
            self.log({"semi/consistency": same})
            self.update_metrics(logits.detach(), known["label"])
            self.save_metrics(batch_idx=batch_idx, epoch=epoch)

    @torch.no_grad()
    def evaluate(self, val: Loader, epoch: int) -> None:
        self.reset_all_metrics_and_losses()
        for batch_idx, batch in enumerate(val):
            self.update_metrics(self.models.net(batch["image"]), batch["label"])
            self.save_metrics(batch_idx=batch_idx, epoch=epoch)

    def update_metrics(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        self.metrics.loss.update(F.cross_entropy(logits, labels), weight=len(labels))
        self.metrics.accuracy.update(logits, labels)
