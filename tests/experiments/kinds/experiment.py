"""Datasets of every kind, read by the same loop, which writes down the rows."""

import json
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import ray.data
import torch
import torch.distributed as dist
import torchmetrics
from torch import nn
from torch.utils.data import Dataset, IterableDataset

import mlx_runtime
from mlx_runtime import DUMMY_PARAMS, BaseModule, prepare_model


@dataclass
class TrainConfig(mlx_runtime.TrainConfig):
    name: str = "kinds"
    num_epochs: int = 2
    out: Path = Path("seen")
    only: str | None = None


class Rows(Dataset):
    def __init__(self, rows: int = 53, batch_size: int = 4, slow_s: float = 0.0, broken: int = -1):
        self.batch_size, self.rows, self.slow_s, self.broken = batch_size, rows, slow_s, broken

    def __len__(self):
        return self.rows

    def __getitem__(self, index):
        time.sleep(self.slow_s)
        if index == self.broken:
            raise OSError("bad sector")
        return torch.tensor(float(index))

    @staticmethod
    def ray_map_batches(batch):
        return {"row": torch.stack(batch["item"])}


class Numbers(IterableDataset):
    def __init__(self, rows: int = 37, batch_size: int = 4):
        self.batch_size, self.rows = batch_size, rows

    def __len__(self):
        return self.rows

    def __iter__(self):
        return iter(torch.randperm(self.rows).float())

    @staticmethod
    def ray_map_batches(batch):
        return {"row": torch.stack(batch["item"])}


class Table:
    """A ray.data.Dataset with `width` additional numbers per row."""

    def __init__(self, rows: int = 1001, batch_size: int = 64, blocks: int = 7, width: int = 1, broken: bool = False):
        self.rows, self.batch_size, self.blocks, self.width, self.broken = rows, batch_size, blocks, width, broken

    def to_ray(self):
        width, broken = self.width, self.broken

        def made(batch):
            if broken:
                raise ValueError("no such column")
            rows = batch["id"].astype(np.float32)
            return {"row": rows, "more": np.repeat(rows[:, None], width, axis=1)}

        return ray.data.range(self.rows, override_num_blocks=self.blocks).map_batches(made)


@dataclass
class Datasets:
    train: Rows = Rows()
    numbers: Numbers = Numbers()
    table: Table = Table()
    val: Table = Table(rows=130, batch_size=16)
    test: Rows = Rows(rows=31)


@dataclass
class Models:
    net: nn.Linear = nn.Linear(1, 1)

    map_params_to_optimizers = {"net": "sgd"}


@dataclass
class Optimizers:
    sgd: torch.optim.SGD = torch.optim.SGD(DUMMY_PARAMS, lr=0.0)


@dataclass
class Losses:
    mse: torchmetrics.MeanSquaredError = torchmetrics.MeanSquaredError()


@dataclass
class Metrics:
    mean: torchmetrics.MeanMetric = torchmetrics.MeanMetric()


class Experiment(BaseModule):
    cfg: TrainConfig
    datasets: Datasets
    models: Models
    optimizers: Optimizers
    losses: Losses
    metrics: Metrics

    def worker_loop(self, dataset_shards):
        self.models.net = prepare_model(self.models.net)
        loaders = self.generate_loaders(dataset_shards=dataset_shards)
        seen = {"memory_mb": []}
        for loader in loaders:
            if self.cfg.only not in (None, loader.shard.name):
                continue
            seen[loader.shard.name] = [
                self.read(loader, epoch, seen["memory_mb"]) for epoch in range(self.cfg.num_epochs)
            ]
        self.save_checkpoint(epoch=0)
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.cfg.out.mkdir(exist_ok=True)
        (self.cfg.out / f"rank_{rank}.json").write_text(json.dumps(seen))

    def read(self, loader, epoch, memory_mb):
        self.reset_all_metrics_and_losses()
        batches = []
        for batch_idx, batch in enumerate(loader):
            rows = batch["row"]
            batches.append(rows.tolist())
            self.losses.mse(self.models.net(rows[:, None])[:, 0], rows).backward()
            self.metrics.mean.update(rows)
            self.save_metrics_and_losses(batch_idx=batch_idx, epoch=epoch)
            memory_mb.append(own_memory_mb())
        return batches


def own_memory_mb() -> float:
    """Return the private memory of this process, without mapped files and the object store."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) / 1024
