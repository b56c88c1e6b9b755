"""A small experiment that can be proven, and the same with one fault."""

import os
import random
import signal
import time
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import Dataset

import mlx_runtime
from mlx_runtime import DUMMY_PARAMS, BaseModule, prepare_model
from mlx_runtime.losses import Mean

IMPORTED = random.random()  # of each interpreter


@dataclass
class TrainConfig(mlx_runtime.TrainConfig):
    name: str = "proofs"
    num_epochs: int = 5
    fault: str = ""


class Rows(Dataset):
    def __init__(self, rows: int = 200, batch_size: int = 8, remembers: bool = False, augments: bool = False):
        self.batch_size, self.remembers, self.read, self.augments = batch_size, remembers, 0, augments
        self.values = torch.randn(rows, 6, generator=torch.Generator().manual_seed(rows))

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        self.read += self.remembers
        x = self.values[index] * (1 + self.read)
        return {"x": x + torch.rand(()) if self.augments else x, "y": self.values[index].sum()}


class Net(nn.Module):
    def __init__(self, width: int = 8, counts: bool = False):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 1)
        )
        self.counts, self.calls = counts, 0

    def forward(self, x):
        self.calls += self.counts and self.training
        return self.layers(x)[:, 0] / (1 + self.calls)


class Noise:
    """Noise from a generator of its own."""

    def __init__(self, scale: float = 0.0):
        self.scale, self.source = scale, random.Random(1)

    def __call__(self, x):
        return x + self.scale * self.source.random() if self.scale else x


@dataclass
class Datasets:
    train: Rows = Rows()
    val: Rows = Rows(rows=40)


@dataclass
class Models:
    net: Net = Net()

    map_params_to_optimizers = {"net": "sgd"}


@dataclass
class Optimizers:
    sgd: torch.optim.SGD = torch.optim.SGD(DUMMY_PARAMS, lr=0.01, momentum=0.9)


@dataclass
class Losses:
    mse: Mean = Mean(nn.functional.mse_loss)


@dataclass
class Tools:
    noise: Noise = Noise()


class Experiment(BaseModule):
    cfg: TrainConfig
    datasets: Datasets
    models: Models
    optimizers: Optimizers
    losses: Losses
    tools: Tools

    def worker_loop(self, dataset_shards):
        self.models.net = prepare_model(self.models.net)
        train, val = self.generate_loaders(dataset_shards=dataset_shards)
        for epoch in range(self.cfg.start_epoch, self.cfg.num_epochs):
            self.models.net.train()
            self.reset_all_metrics_and_losses()
            for batch_idx, batch in enumerate(train):
                answers = self.models.net(self.tools.noise(batch["x"]))
                loss = self.losses.mse(answers, batch["y"])
                if self.cfg.fault == "none":
                    raise KeyError("none")
                if self.cfg.fault == "two" and torch.distributed.get_world_size() == 2:
                    raise KeyError("two")
                if self.cfg.fault == "sum":
                    loss = loss * len(answers) / 16
                if self.cfg.fault == "import":
                    loss = loss * IMPORTED
                if self.cfg.fault == "diverges":
                    loss = loss * float("nan")
                if self.cfg.fault == "die" and batch_idx == 6 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                    os.kill(os.getpid(), signal.SIGKILL)
                if self.cfg.fault == "operation":
                    place = torch.tensor([0, 0])  # the last of two values wins, or the first
                    factors = torch.tensor([1.0, 1.0 + time.time_ns() % 1000 / 1e6])
                    loss = loss * torch.zeros(1).put_(place, factors)[0]
                self.backward(loss)
                self.optimizer_step("sgd")
                if self.cfg.fault == "decay":
                    for weight in self.models.net.parameters():
                        weight.data *= 1 - 0.001 * torch.distributed.get_world_size()
                self.save_metrics_and_losses(batch_idx=batch_idx, epoch=epoch)
            with self.evaluation():
                for batch_idx, batch in enumerate(val):
                    answers = self.models.net(batch["x"])
                    self.losses.mse.update(answers, batch["y"])
                    self.save_metrics_and_losses(batch_idx=batch_idx, epoch=epoch)
            if self.cfg.fault == "metric":
                self.log({"answer": answers.mean()})
            self.save_checkpoint(epoch=epoch)
