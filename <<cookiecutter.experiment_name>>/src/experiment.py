"""The experiment. Edit: name what it consists of in the groups, and train it in worker_loop.

Every default below becomes a line of src/conf.yaml (`make bind`), and is built from there for each run.
"""

from dataclasses import dataclass

import torch
from mlx_runtime import DUMMY_PARAMS, BaseModule
from mlx_runtime.datasets import DatasetShards, Loader
from ray.train.torch import prepare_model
from torch import nn
from torch.optim import Adam, Optimizer
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from src.config import TrainConfig
from src.datasets import Digits
from src.losses import CrossEntropy
from src.metrics import MeanConfidence
from src.models import DigitsNet
from src.tools import EarlyStopping, WarmupCosine


@dataclass
class Datasets:
    train: Digits = Digits(split="train")
    val: Digits = Digits(split="val", batch_size=128)
    test: Digits = Digits(split="test", batch_size=128)


@dataclass
class Models:
    net: nn.Module = DigitsNet()

    map_params_to_optimizers = {"net": "adam"}  # which optimizer trains which model


@dataclass
class Optimizers:
    adam: Optimizer = Adam(DUMMY_PARAMS, lr=3e-3)  # a wide type, so that conf.yaml may name another class


@dataclass
class Losses:
    cross_entropy: CrossEntropy = CrossEntropy()


@dataclass
class Metrics:
    accuracy: MulticlassAccuracy = MulticlassAccuracy(num_classes=10, average="micro")
    f1: MulticlassF1Score = MulticlassF1Score(num_classes=10)
    confidence: MeanConfidence = MeanConfidence()


@dataclass
class Tools:
    early_stopping: EarlyStopping = EarlyStopping()
    schedule: WarmupCosine = WarmupCosine()


class Experiment(BaseModule):
    cfg: TrainConfig
    datasets: Datasets
    models: Models
    optimizers: Optimizers
    losses: Losses
    metrics: Metrics
    tools: Tools

    def worker_loop(self, dataset_shards: DatasetShards) -> None:
        """What every worker runs."""
        self.models.net = prepare_model(self.models.net)  # DDP
        train, val, test = self.generate_loaders(dataset_shards=dataset_shards)
        self.tools.schedule.total_steps = len(train) * self.cfg.num_epochs

        epoch = self.cfg.start_epoch - 1  # of a restored run with nothing left to train
        for epoch in range(self.cfg.start_epoch, self.cfg.num_epochs):
            self.train(train, epoch)
            val_loss = self.evaluate(val, epoch)
            stop = self.tools.early_stopping(val_loss)
            self.save_checkpoint(epoch=epoch)
            if stop:
                break
        self.evaluate(test, epoch)

    def train(self, loader: Loader, epoch: int) -> None:
        self.models.net.train()
        self.reset_all_metrics_and_losses()
        for batch_idx, batch in enumerate(loader):
            logits = self.models.net(batch["image"])
            loss = self.losses.cross_entropy(logits, batch["label"])
            loss.backward()
            self.tools.schedule.step(self.optimizers.adam)
            self.optimizers.adam.step()
            self.optimizers.adam.zero_grad()
            self.update_metrics(logits.detach(), batch["label"])
            self.save_metrics_and_losses(batch_idx=batch_idx, epoch=epoch)

    @torch.no_grad()
    def evaluate(self, loader: Loader, epoch: int) -> float:
        """Loss over all rows of all workers."""
        self.models.net.eval()
        self.reset_all_metrics_and_losses()
        for batch_idx, batch in enumerate(loader):
            logits = self.models.net(batch["image"])
            self.losses.cross_entropy.update(logits, batch["label"])
            self.update_metrics(logits, batch["label"])
            self.save_metrics_and_losses(batch_idx=batch_idx, epoch=epoch)
        return self.losses.cross_entropy.compute().item()

    def update_metrics(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        self.metrics.accuracy.update(logits, labels)
        self.metrics.f1.update(logits, labels)
        self.metrics.confidence.update(logits, labels)
