"""The loop of `workload` under mlx."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import optax
from flax import nnx
from torchmetrics import MeanMetric

import mlx_runtime.jax
from src.workload import LEARNING_RATE, Clock, Gpt, Text, step


@dataclass
class TrainConfig(mlx_runtime.jax.TrainConfig):
    name: str = "nnx"
    num_epochs: int = 1
    out: Path = Path("measured.json")


@dataclass
class Datasets:
    train: Text = Text()


@dataclass
class Models:
    net: Gpt = Gpt(rngs=nnx.Rngs())


@dataclass
class Optimizers:
    adam: Callable[..., optax.GradientTransformation] = partial(optax.adam, learning_rate=LEARNING_RATE)


@dataclass
class Losses:
    loss: MeanMetric = MeanMetric()


class Experiment(mlx_runtime.jax.JaxModule):
    cfg: TrainConfig
    datasets: Datasets
    models: Models
    optimizers: Optimizers
    losses: Losses

    def worker_loop(self, dataset_shards) -> None:
        (train,), clock = self.generate_loaders(dataset_shards=dataset_shards), Clock()
        self.optimizer = nnx.Optimizer(self.models.net, self.optimizers.adam(), wrt=nnx.Param)
        for epoch in range(self.cfg.start_epoch, self.cfg.num_epochs):
            for batch_idx, batch in enumerate(train):
                self.losses.loss.update(*self.local(batch, step(self.models.net, self.optimizer, batch)))
                self.save_metrics_and_losses(batch_idx=batch_idx, epoch=epoch)
                clock.tick()
            self.save_checkpoint(epoch=epoch)
        clock.write(self.cfg.out)
