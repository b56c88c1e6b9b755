"""Epochs that begin with a checkpoint, alternating with epochs that do not."""

import json
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import mlx_runtime
from mlx_runtime import DUMMY_PARAMS, BaseModule, prepare_model


@dataclass
class TrainConfig(mlx_runtime.TrainConfig):
    name: str = "checkpoints"
    num_epochs: int = 8
    keep_checkpoints: int = 1
    out: Path = Path("measured.json")


class Rows(Dataset):
    def __init__(self, rows: int = 10240, batch_size: int = 32):
        self.batch_size = batch_size
        self.values = torch.randn(rows, 256, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        return self.values[index]

    @staticmethod
    def ray_map_batches(batch):
        return {"x": torch.stack(batch["item"])}


class Net(nn.Module):
    def __init__(self, width: int = 1024, layers: int = 8):
        super().__init__()
        inner = [layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.ReLU())]
        self.layers = nn.Sequential(nn.Linear(256, width), *inner, nn.Linear(width, 256))

    def forward(self, x):
        return self.layers(x)


@dataclass
class Datasets:
    train: Rows = Rows()


@dataclass
class Models:
    net: Net = Net()

    map_params_to_optimizers = {"net": "adam"}


@dataclass
class Optimizers:
    adam: torch.optim.Adam = torch.optim.Adam(DUMMY_PARAMS)


class Experiment(BaseModule):
    cfg: TrainConfig
    datasets: Datasets
    models: Models
    optimizers: Optimizers

    def worker_loop(self, dataset_shards) -> None:
        self.models.net = prepare_model(self.models.net)
        (train,) = self.generate_loaders(dataset_shards=dataset_shards)
        seconds, blocked = {True: [], False: []}, []
        self.pass_over(train)  # warm-up
        for epoch in range(self.cfg.num_epochs):
            saved = epoch % 2 == 0
            started = time.perf_counter()
            if saved:
                self.save_checkpoint(epoch=epoch)
                blocked.append(time.perf_counter() - started)
            self.pass_over(train)
            seconds[saved].append(time.perf_counter() - started)
        if dist.get_rank() == 0:
            size = sum(item.numel() for item in self.models.net.parameters())
            found = {"with": seconds[True], "without": seconds[False], "blocked": blocked, "parameters": size}
            self.cfg.out.write_text(json.dumps(found))

    def pass_over(self, train) -> None:
        for batch in train:
            loss = F.mse_loss(self.models.net(batch["x"]), batch["x"])
            loss.backward()
            self.optimizers.adam.step()
            self.optimizers.adam.zero_grad()
