"""A small GPT that learns to sort digits, cut into stages: with `cfg.strategy=pipeline`, each worker holds some blocks.

It reads six digits, and then writes them in order. Copy this file over `src/experiment.py`.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import AdamW
from torch.utils.data import Dataset
from torchmetrics import MeanMetric

import mlx_runtime
from mlx_runtime import DUMMY_PARAMS, BaseModule, prepare_model
from mlx_runtime.datasets import DatasetShards, Loader

IGNORED = -100
"""Target of positions without one, as in `F.cross_entropy`."""


@dataclass
class TrainConfig(mlx_runtime.TrainConfig):
    name: str = "sorter"
    num_epochs: int = 8
    start_workers: int = 2
    strategy: Literal["pipeline", "ddp", "fsdp"] = "pipeline"
    gradient_clip: float | None = 1.0
    monitor: str | None = "val/sorted"
    mode: Literal["max", "min"] = "max"


class Sequences(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Digits followed by the same digits in order, and the next digit of each position where they are in order.

    Both are (2 * length - 1,) int64. Sequences of the validation set do not occur in the training set.
    """

    def __init__(
        self,
        split: Literal["train", "val"] = "train",
        length: int = 6,
        digits: int = 4,
        rows: int = 4096,
        batch_size: int = 64,
    ):
        self.length, self.batch_size = length, batch_size
        drawn = torch.randint(digits, (2 * rows, length), generator=torch.Generator().manual_seed(0))
        code = (drawn * digits ** torch.arange(length)).sum(1)
        held_out = code % 4 == 0
        self.rows = drawn[held_out if split == "val" else ~held_out][: rows // 4 if split == "val" else rows]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        row = self.rows[index]
        whole = torch.cat([row, row.sort().values])
        target = whole[1:].clone()
        target[: self.length - 1] = IGNORED
        return whole[:-1], target

    @staticmethod
    def ray_map_batches(batch: dict[str, list[tuple[torch.Tensor, torch.Tensor]]]) -> dict[str, torch.Tensor]:
        """Stack samples into inputs and targets, both (n, 2 * length - 1) int64."""
        inputs, targets = zip(*batch["item"], strict=True)
        return {"input": torch.stack(inputs), "target": torch.stack(targets)}


class Block(nn.Module):
    """Causal self-attention and an MLP with residual connections: (n, positions, width) to the same shape."""

    def __init__(self, width: int = 48, heads: int = 3):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.attention(self.norms[0](x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*parts.unbind(), is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Gpt(nn.Module):
    """Digits (n, positions) int64 to logits (n, positions, digits)."""

    def __init__(self, digits: int = 4, layers: int = 3, width: int = 48, heads: int = 3, longest: int = 32):
        super().__init__()
        self.digits, self.positions = nn.Embedding(digits, width), nn.Embedding(longest, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, digits)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        x = self.digits(codes) + self.positions(torch.arange(codes.shape[1], device=codes.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@dataclass
class Datasets:
    train: Sequences = Sequences()
    val: Sequences = Sequences(split="val")


@dataclass
class Models:
    net: Gpt = Gpt()

    map_params_to_optimizers = {"net": "adamw"}


@dataclass
class Optimizers:
    adamw: AdamW = AdamW(DUMMY_PARAMS, lr=3e-3)


@dataclass
class Metrics:
    loss: MeanMetric = MeanMetric()
    sorted: MeanMetric = MeanMetric()


class Experiment(BaseModule):
    cfg: TrainConfig
    datasets: Datasets
    models: Models
    optimizers: Optimizers
    metrics: Metrics

    def worker_loop(self, dataset_shards: DatasetShards) -> None:
        self.models.net = prepare_model(self.models.net)  # wraps it in DDP if cfg.strategy=ddp
        train, val = self.generate_loaders(dataset_shards=dataset_shards)
        for epoch in range(self.cfg.start_epoch, self.cfg.num_epochs):
            self.one_pass(train, epoch, training=True)
            with torch.no_grad():
                self.one_pass(val, epoch, training=False)
            self.save_checkpoint(epoch=epoch)

    def eval_loop(self, dataset_shards: DatasetShards) -> None:
        self.models.net = prepare_model(self.models.net)
        _, val = self.generate_loaders(dataset_shards=dataset_shards)
        self.one_pass(val, self.cfg.start_epoch - 1, training=False)

    def one_pass(self, loader: Loader, epoch: int, *, training: bool) -> None:
        self.models.net.train(training)
        self.reset_all_metrics_and_losses()
        for batch_idx, batch in enumerate(loader):
            loss = self.loss(batch)
            if training:
                self.backward(loss)
                self.optimizer_step()
            self.save_metrics(batch_idx=batch_idx, epoch=epoch)

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits, target = self.models.net(batch["input"]), batch["target"]
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten())
        right = ((logits.argmax(-1) == target) | (target == IGNORED)).all(1)
        self.metrics.loss.update(loss.detach(), weight=len(target))
        self.metrics.sorted.update(right.float().mean(), weight=len(target))
        return loss
