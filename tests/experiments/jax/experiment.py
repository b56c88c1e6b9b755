"""An experiment in JAX, with everything that must survive a kill."""

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
import optax
import torch
import torchmetrics
from flax import nnx
from torch.utils.data import Dataset

import mlx_runtime.jax
from mlx_runtime.jax import JaxModule


@dataclass
class TrainConfig(mlx_runtime.jax.TrainConfig):
    name: str = "jax"
    num_epochs: int = 3
    checkpoint_every_steps: int | None = 2
    mesh: dict[str, int] = field(default_factory=lambda: {"data": -1, "model": 1}, metadata={"resumable": True})
    noise: float = 0.1
    kills: int = field(default=0, metadata={"resumable": True})  # one in each of the first attempts
    pause_s: float = field(default=0.0, metadata={"resumable": True})  # per step
    fault: str = field(default="", metadata={"resumable": True})


class Rows(Dataset):
    def __init__(self, rows: int = 61, batch_size: int = 8, ragged: bool = False):
        self.batch_size = batch_size
        width = 6 + int(os.environ.get("RANK", 0)) * ragged
        self.values = torch.randn(rows, width, generator=torch.Generator().manual_seed(rows))

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        return {"row": index, "x": self.values[index], "name": str(index)}


class Net(nnx.Module):
    def __init__(self, width: int = 16, dropout: float = 0.2, half: bool = True, *, rngs: nnx.Rngs):
        shards = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"))
        self.first = nnx.Linear(6, width, use_bias=False, kernel_init=shards, rngs=rngs)
        self.norm = nnx.BatchNorm(width, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.last = nnx.Linear(width, 1, param_dtype=jnp.bfloat16 if half else jnp.float32, rngs=rngs)

    def __call__(self, x, mask=None):
        return self.last(self.dropout(nnx.relu(self.norm(self.first(x), mask=mask[:, None]))))[:, 0]


@dataclass
class Datasets:
    train: Rows = Rows()
    val: Rows = Rows(rows=23)


@dataclass
class Models:
    net: nnx.Module = Net()


@dataclass
class Optimizers:
    adam: Callable[..., optax.GradientTransformation] = partial(optax.adam, learning_rate=0.01)


@dataclass
class Losses:
    mse: torchmetrics.MeanSquaredError = torchmetrics.MeanSquaredError()


@dataclass
class Metrics:
    mae: torchmetrics.MeanAbsoluteError = torchmetrics.MeanAbsoluteError()
    row: torchmetrics.SumMetric = torchmetrics.SumMetric()


@nnx.jit
def train_step(net, optimizer, batch, noise):
    def loss_of(net):
        output = net(batch["x"] + noise, batch["mask"])
        losses = (output - batch["x"].sum(axis=1)) ** 2
        return losses.mean(where=batch["mask"]), output

    (loss, output), grads = nnx.value_and_grad(loss_of, has_aux=True)(net)
    optimizer.update(net, grads)
    return loss, output


@nnx.jit
def eval_step(net, batch):
    return net(batch["x"], batch["mask"])


@jax.jit
def averaged(average, new):
    return jax.tree.map(lambda one, other: 0.9 * one + 0.1 * other, average, new)


class Experiment(JaxModule):
    cfg: TrainConfig
    datasets: Datasets
    models: Models
    optimizers: Optimizers
    losses: Losses
    metrics: Metrics

    def worker_loop(self, dataset_shards):
        train, val = self.generate_loaders(dataset_shards=dataset_shards)
        self.optimizer = nnx.Optimizer(self.models.net, self.optimizers.adam(), wrt=nnx.Param)
        self.rngs = nnx.Rngs(noise=self.cfg.seed)
        self.average, self.steps = nnx.state(self.models.net, nnx.Param), 0
        for epoch in range(self.cfg.start_epoch, self.cfg.num_epochs):
            self.reset_all_metrics_and_losses()
            for batch_idx, batch in enumerate(train):
                self.step({name: value for name, value in batch.items() if name != "name"})
                self.save_metrics_and_losses(batch_idx=batch_idx, epoch=epoch)
            with self.evaluation():
                for batch_idx, batch in enumerate(val):
                    output = eval_step(self.models.net, {"x": batch["x"], "mask": batch["mask"]})
                    self.update(batch, output)
                    self.save_metrics_and_losses(batch_idx=batch_idx, epoch=epoch)
            self.save_checkpoint(epoch=epoch)

    def step(self, batch):
        time.sleep(self.cfg.pause_s)
        if self.cfg.fault == "not finite" and self.global_step == 3:
            batch["x"] = batch["x"].at[0].set(jnp.nan)
        if self.cfg.fault == "donated":
            jax.jit(lambda x: x + 1, donate_argnums=0)(batch["x"])
        noise = self.cfg.noise * self.rngs.noise.normal(batch["x"].shape)
        _, output = train_step(self.models.net, self.optimizer, batch, noise)
        self.average = averaged(self.average, nnx.state(self.models.net, nnx.Param))
        self.update(batch, output)
        self.steps += 1
        self.perhaps_die()

    def perhaps_die(self):
        """In a random step of each of the first attempts, kill a random worker soon, at a random moment."""
        attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
        chance = random.Random(attempt)
        rank, step, after_s = chance.randrange(jax.process_count()), chance.randint(1, 6), chance.uniform(0, 0.2)
        if attempt < self.cfg.kills and (rank, step) == (jax.process_index(), self.steps):
            threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()

    def update(self, batch, output):
        outputs, x, rows = self.local(batch, output, batch["x"], batch["row"])
        self.metrics.row.update(rows)
        self.losses.mse.update(outputs, x.sum(dim=1))
        self.metrics.mae.update(outputs, x.sum(dim=1))

    def predict(self, batch):
        return {"sum": self.models.net(batch["x"], jnp.ones(len(batch["x"]), bool))}
