"""The experiment. Edit: list its parts in the groups below, and train them in worker_loop.

`make bind` writes every default below to src/conf.yaml, and each run builds the objects from that file. After changing
a default here, run `make bind` again; it keeps values that you have edited in the file.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from mlx_runtime.datasets import DatasetShards, Loader
from mlx_runtime.jax import JaxModule
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from src.config import TrainConfig
from src.datasets import Digits
from src.losses import CrossEntropy, cross_entropy
from src.metrics import MeanConfidence
from src.models import DigitsNet
from src.tools import BestEpoch, EarlyStopping, warmup_cosine

Batch = dict[str, jax.Array]  # the rows of all workers; `mask` (n,) is False for those that fill up a short batch
Outputs = tuple[jax.Array, jax.Array]  # logits (n, classes), and the loss of each row (n,)


@dataclass
class Datasets:
    train: Digits = Digits(split="train")
    val: Digits = Digits(split="val", batch_size=128)
    test: Digits = Digits(split="test", batch_size=128)


@dataclass
class Models:
    net: nnx.Module = DigitsNet(rngs=nnx.Rngs())


@dataclass
class Optimizers:
    adam: Callable[..., optax.GradientTransformation] = partial(optax.adamw, weight_decay=1e-4)  # takes the schedule


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
    best: BestEpoch = BestEpoch(mode="max")
    schedule: Callable[..., optax.Schedule] = partial(warmup_cosine, peak=3e-3)  # called in worker_loop


@nnx.jit
def train_step(net: nnx.Module, optimizer: nnx.Optimizer, batch: Batch, label_smoothing: float) -> Outputs:
    def mean_loss(net: nnx.Module) -> tuple[jax.Array, Outputs]:
        logits, losses = eval_step(net, batch, label_smoothing)
        return losses.mean(where=batch["mask"]), (logits, losses)

    (_, outputs), gradients = nnx.value_and_grad(mean_loss, has_aux=True)(net)
    optimizer.update(net, gradients)
    return outputs


@nnx.jit
def eval_step(net: nnx.Module, batch: Batch, label_smoothing: float) -> Outputs:
    logits = net(batch["image"])
    return logits, cross_entropy(logits, batch["label"], label_smoothing)


def copy_of(net: nnx.Module) -> Any:
    return jax.tree.map(jnp.copy, nnx.state(net, nnx.Param))


class Experiment(JaxModule):
    cfg: TrainConfig
    datasets: Datasets
    models: Models
    optimizers: Optimizers
    losses: Losses
    metrics: Metrics
    tools: Tools

    def worker_loop(self, dataset_shards: DatasetShards) -> None:
        """Train; every worker calls this."""
        train, val, test = self.generate_loaders(dataset_shards=dataset_shards)
        schedule = self.tools.schedule(total_steps=train.updates * self.cfg.num_epochs)
        net, adam = self.models.net, self.optimizers.adam(schedule)
        self.optimizer = nnx.Optimizer(net, adam, wrt=nnx.Param)  # in checkpoints, because it is on self
        self.best_weights = copy_of(net)

        epoch = self.cfg.start_epoch
        while epoch < self.cfg.num_epochs and not self.tools.early_stopping.stopped:
            self.train(train, epoch)
            self.evaluate(val, epoch)
            self.tools.early_stopping.update(self.losses.cross_entropy.compute().item())  # of all workers
            if self.tools.best.update(self.metrics.accuracy.compute().item(), epoch):
                self.best_weights = copy_of(net)
            self.save_checkpoint(epoch=epoch)
            epoch += 1
        nnx.update(net, self.best_weights)
        self.evaluate(test, epoch - 1)

    def eval_loop(self, dataset_shards: DatasetShards) -> None:
        """Evaluate the models of a checkpoint; every worker calls this for `mlx train eval`."""
        _, val, test = self.generate_loaders(dataset_shards=dataset_shards)
        for loader in (val, test):
            self.evaluate(loader, epoch=self.cfg.start_epoch - 1)

    def predict(self, batch: Batch) -> Batch:
        """Answer a batch without labels; `make predict` and `mlx serve` call this."""
        probabilities = nnx.softmax(self.models.net(batch["image"]))
        return {"digit": probabilities.argmax(axis=1), "probabilities": probabilities}

    def train(self, loader: Loader, epoch: int) -> None:
        self.reset_all_metrics_and_losses()
        for batch_idx, batch in enumerate(loader):
            outputs = train_step(self.models.net, self.optimizer, batch, self.losses.cross_entropy.label_smoothing)
            self.record(batch, *outputs)
            self.save_metrics_and_losses(batch_idx=batch_idx, epoch=epoch)

    def evaluate(self, loader: Loader, epoch: int) -> None:
        with self.evaluation():  # resets metrics and losses; models in eval mode
            for batch_idx, batch in enumerate(loader):
                self.record(batch, *eval_step(self.models.net, batch, self.losses.cross_entropy.label_smoothing))
                self.save_metrics_and_losses(batch_idx=batch_idx, epoch=epoch)

    def record(self, batch: Batch, logits: jax.Array, losses: jax.Array) -> None:
        """Update metrics and losses with the rows of this worker, without padding, as tensors of torch."""
        rows, labels, values = self.local(batch, logits, batch["label"], losses)
        self.losses.cross_entropy.update(values)
        for metric in (self.metrics.accuracy, self.metrics.f1, self.metrics.confidence):
            metric.update(rows, labels)
