"""Everything that must survive a kill, and a diary of the rows that each worker has read."""

import json
import os
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.data
import torch
import torch.distributed as dist
import torchmetrics
from ray.train.torch import prepare_model
from torch import nn
from torch.utils.data import Dataset

import mlx_runtime
from mlx_runtime import DUMMY_PARAMS, BaseModule
from mlx_runtime.errors import WorkerLostError


@dataclass
class TrainConfig(mlx_runtime.TrainConfig):
    name: str = "faults"
    num_epochs: int = 3
    log_every_steps: int = 2
    pause_s: float = field(default=0.0, metadata={"resumable": True})  # seconds per step, until `hurry` exists in `out`
    pause_from: int = field(default=0, metadata={"resumable": True})  # first step with a pause
    fault: str | None = field(default=None, metadata={"resumable": True})
    late: str = field(default="", metadata={"resumable": True})  # the error to cause before the first pass
    out: Path = field(default=Path("diary"), metadata={"resumable": True})


class Rows(Dataset):
    def __init__(self, rows: int = 61, batch_size: int = 4):
        self.batch_size = batch_size
        self.values = torch.randn(rows, 6, generator=torch.Generator().manual_seed(rows))

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        return torch.tensor(index), self.values[index]

    @staticmethod
    def ray_map_batches(batch):
        rows, values = zip(*batch["item"], strict=True)
        return {"row": torch.stack(rows), "x": torch.stack(values)}


class Table:
    """Similar rows, as a stream of Ray Data."""

    def __init__(self, rows: int = 61, batch_size: int = 4):
        self.rows, self.batch_size = rows, batch_size

    def __len__(self):
        return self.rows

    def to_ray(self):
        def values(block):
            time.sleep(0.2)
            return {"row": block["id"], "x": np.sin(block["id"][:, None] + np.arange(6)).astype(np.float32)}

        return ray.data.range(self.rows, override_num_blocks=8).map_batches(values)


class Norm(nn.BatchNorm1d):
    def forward(self, x):
        if len(x) > 1:
            return super().forward(x)
        return nn.functional.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias)  # no variance


class Net(nn.Module):
    def __init__(self, width: int = 16, ballast: int = 0, frozen: int = 0):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, width), Norm(width), nn.Dropout(0.3), nn.Linear(width, 1))
        self.ballast = nn.Buffer(torch.zeros(ballast))  # makes writing checkpoints slow
        if frozen:
            self.frozen = nn.Parameter(torch.zeros(frozen), requires_grad=False)  # the same for each shard

    def forward(self, x):
        return self.layers(x)[:, 0]


class Noise:
    """Draws from every random generator, and counts."""

    def __init__(self, scale: float = 0.1):
        self.scale = scale
        self.draws = 0

    def __call__(self, x):
        self.draws += 1
        return x + self.scale * (torch.randn_like(x) + random.random() + np.random.rand())


class Median(torchmetrics.Metric):
    """Keeps every value."""

    full_state_update = False

    def __init__(self):
        super().__init__()
        self.add_state("values", [], dist_reduce_fx="cat")

    def update(self, values):
        self.values.append(values)

    def compute(self):
        return torchmetrics.utilities.dim_zero_cat(self.values).median()


@dataclass
class Datasets:
    train: Any = Rows()
    val: Rows = Rows(rows=23)


@dataclass
class Models:
    net: Net = Net()

    map_params_to_optimizers = {"net": "adam"}


@dataclass
class Optimizers:
    adam: torch.optim.Adam = torch.optim.Adam(DUMMY_PARAMS, lr=0.01)


@dataclass
class Losses:
    mse: torchmetrics.MeanSquaredError = torchmetrics.MeanSquaredError()


@dataclass
class Metrics:
    mean: torchmetrics.MeanMetric = torchmetrics.MeanMetric()
    median: Median = Median()
    both: torchmetrics.MetricCollection = torchmetrics.MetricCollection(
        [torchmetrics.MeanAbsoluteError(), torchmetrics.MeanSquaredError()]
    )


@dataclass
class Tools:
    noise: Noise = Noise()


class Experiment(BaseModule):
    cfg: TrainConfig
    datasets: Datasets
    models: Models
    optimizers: Optimizers
    losses: Losses
    metrics: Metrics
    tools: Tools

    def worker_loop(self, dataset_shards):
        random.random(), np.random.rand(), torch.rand(1)  # random numbers drawn before the first pass do not matter
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.note(
            start=self.global_step,
            pid=os.getpid(),
            node=ray.get_runtime_context().get_node_id() if ray.is_initialized() else "",
        )
        self.models.net = prepare_model(self.models.net)
        if dist.is_initialized():
            dist.barrier()  # no row is noted before all workers have started
        if self.cfg.late:
            self.go_wrong(self.cfg.late)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizers.adam, lambda step: 0.98**step)
        for epoch in range(self.cfg.start_epoch, self.cfg.num_epochs):
            train, val = self.generate_loaders(dataset_shards=dataset_shards)
            self.models.net.train()
            self.reset_all_metrics_and_losses()
            for batch_idx, batch in enumerate(train):
                self.step(batch, epoch)
                self.save_metrics_and_losses(batch_idx=batch_idx, epoch=epoch)
            self.models.net.eval()
            self.reset_all_metrics_and_losses()
            for batch_idx, batch in enumerate(val):
                with torch.no_grad():
                    self.losses.mse.update(self.models.net(batch["x"]), batch["x"].sum(dim=1))
                self.save_losses(batch_idx=batch_idx, epoch=epoch)
            self.save_checkpoint(epoch=epoch)

    def step(self, batch, epoch):
        self.note(step=self.global_step, epoch=epoch, rows=batch["row"].tolist())
        if self.global_step >= self.cfg.pause_from:
            self.pause()
        output = self.models.net(self.tools.noise(batch["x"]))
        target = batch["x"].sum(dim=1)
        loss = self.losses.mse(output, target)
        if self.cfg.elastic.keep_global_batch:
            self.backward(loss)
            if self.optimizer_step():
                self.schedule.step()
        else:
            loss.backward()
            self.optimizers.adam.step()
            self.optimizers.adam.zero_grad()
            self.schedule.step()
        self.metrics.mean.update(output.detach())
        self.metrics.median.update(output.detach() - target)
        self.metrics.both.update(output.detach(), target)
        if self.cfg.fault == "hang" and self.rank == 1 and self.global_step == 6:
            time.sleep(1000)

    def pause(self):
        until = time.monotonic() + self.cfg.pause_s
        while (left_s := until - time.monotonic()) > 0 and not (self.cfg.out / "hurry").exists():
            time.sleep(min(left_s, 0.05))

    @staticmethod
    def go_wrong(how):
        raise {"raise": ValueError("on purpose"), "lost": WorkerLostError("gone")}[how]

    def note(self, **fields):
        self.cfg.out.mkdir(exist_ok=True)
        with (self.cfg.out / f"rank_{self.rank}.jsonl").open("a") as file:
            file.write(json.dumps(fields | {"at": time.time()}) + "\n")
