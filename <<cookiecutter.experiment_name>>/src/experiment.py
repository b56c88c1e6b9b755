"""The experiment. Edit: list its parts in the groups below, and train them in worker_loop.

`make bind` writes every default below to src/conf.yaml, and each run builds the objects from that file. After changing
a default here, run `make bind` again; it keeps values that you have edited in the file.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from mlx_runtime import DUMMY_PARAMS, BaseModule, prepare_model
from mlx_runtime.datasets import DatasetShards, Loader
from torch import nn
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from src.config import TrainConfig
from src.datasets import Digits
from src.losses import CrossEntropy
from src.metrics import MeanConfidence
from src.models import DigitsNet
from src.tools import BestWeights, EarlyStopping, warmup_cosine


@dataclass
class Datasets:
    train: Digits = Digits(split="train")
    val: Digits = Digits(split="val", batch_size=128)
    test: Digits = Digits(split="test", batch_size=128)


@dataclass
class Models:
    net: nn.Module = DigitsNet()

    map_params_to_optimizers = {"net": "adam"}  # optimizer of each model


@dataclass
class Optimizers:
    adam: Optimizer = Adam(DUMMY_PARAMS, lr=3e-3)  # annotated as Optimizer, so that conf.yaml can name another class


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
    best: BestWeights = BestWeights(mode="max")
    schedule: Callable[..., LRScheduler] = partial(warmup_cosine, warmup_steps=20)  # called in worker_loop


class Experiment(BaseModule):
    cfg: TrainConfig
    datasets: Datasets
    models: Models
    optimizers: Optimizers
    losses: Losses
    metrics: Metrics
    tools: Tools

    def worker_loop(self, dataset_shards: DatasetShards) -> None:
        """Train; every worker calls this."""
        self.models.net = prepare_model(self.models.net)  # DDP
        train, val, test = self.generate_loaders(dataset_shards=dataset_shards)
        total_steps = train.updates * self.cfg.num_epochs
        self.scheduler = self.tools.schedule(
            self.optimizers.adam, total_steps=total_steps
        )  # saved because it is on self

        epoch = self.cfg.start_epoch
        while epoch < self.cfg.num_epochs and not self.tools.early_stopping.stopped:
            self.train(train, val, epoch)
            self.evaluate(val, epoch)
            self.tools.early_stopping.update(self.losses.cross_entropy.compute().item())  # of all workers
            self.tools.best.update(self.metrics.accuracy.compute().item(), epoch, self.models.net)
            self.save_checkpoint(epoch=epoch)
            epoch += 1
        self.tools.best.restore(self.models.net)
        self.evaluate(test, epoch - 1)

    def eval_loop(self, dataset_shards: DatasetShards) -> None:
        """Evaluate the models of a checkpoint; every worker calls this for `mlx train eval`."""
        self.models.net = prepare_model(self.models.net)
        _, val, test = self.generate_loaders(dataset_shards=dataset_shards)
        for loader in (val, test):
            self.evaluate(loader, epoch=self.cfg.start_epoch - 1)

    def predict(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Answer a batch without labels; `make predict`, `mlx xp export` and `mlx serve` call this."""
        probabilities = self.models.net(batch["image"]).softmax(dim=1)
        return {"digit": probabilities.argmax(dim=1), "probabilities": probabilities}

    def train(self, loader: Loader, val: Loader, epoch: int) -> None:
        self.models.net.train()
        self.reset_all_metrics_and_losses()
        for batch_idx, batch in enumerate(loader):
            logits = self.models.net(batch["image"])
            loss = self.losses.cross_entropy(logits, batch["label"])
            self.backward(loss)
            if self.optimizer_step("adam"):  # True at the last step of an update
                self.scheduler.step()
            self.update_metrics(logits.detach(), batch["label"])
            self.save_metrics_and_losses(batch_idx=batch_idx, epoch=epoch)
            if self.every(self.cfg.evaluate_every_steps):
                self.evaluate(val, epoch)

    def evaluate(self, loader: Loader, epoch: int) -> None:
        with self.evaluation():  # resets metrics and losses; no gradients, models in eval mode
            for batch_idx, batch in enumerate(loader):
                logits = self.models.net(batch["image"])
                self.losses.cross_entropy.update(logits, batch["label"])
                self.update_metrics(logits, batch["label"])
                self.save_metrics_and_losses(batch_idx=batch_idx, epoch=epoch)

    def update_metrics(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        self.metrics.accuracy.update(logits, labels)
        self.metrics.f1.update(logits, labels)
        self.metrics.confidence.update(logits, labels)
