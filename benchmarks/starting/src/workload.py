"""The dataset and the model of all contenders, and the note of the end of the first step."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from torchmetrics import Metric

ROWS, BATCH, CLASSES, LEARNING_RATE = 2048, 32, 10, 1e-3

Sample = tuple[torch.Tensor, torch.Tensor]


class Images(Dataset[Sample]):
    """Images (1, 8, 8) float32 and a label."""

    def __init__(self, rows: int = ROWS, batch_size: int = BATCH):
        self.batch_size = batch_size
        random = torch.Generator().manual_seed(0)
        self.images = torch.randn(rows, 1, 8, 8, generator=random)
        self.labels = torch.randint(CLASSES, (rows,), generator=random)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Sample:
        return self.images[index], self.labels[index]

    @staticmethod
    def ray_map_batches(batch: dict[str, list[Sample]]) -> dict[str, torch.Tensor]:
        images, labels = zip(*batch["item"], strict=True)
        return {"image": torch.stack(images), "label": torch.stack(labels)}


class Net(nn.Module):
    """(n, 1, 8, 8) float32 → logits (n, 10)."""

    def __init__(self, channels: int = 32):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, channels, 3, padding="same"),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(channels * 4 * 4, CLASSES),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images)


class CrossEntropy(Metric):
    """Cross-entropy of a batch, for `.backward()`, and its mean over the epoch."""

    full_state_update = False

    total: torch.Tensor
    rows: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("rows", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        self.total = self.total + F.cross_entropy(logits, labels, reduction="sum")
        self.rows = self.rows + len(labels)

    def compute(self) -> torch.Tensor:
        return self.total / self.rows


def stepped(out: Path) -> None:
    """Write the time of the first step and the pid to a file. Call after each step; only rank 0 writes."""
    if not (dist.is_initialized() and dist.get_rank()) and not out.exists():
        with out.open("a") as file:
            file.write(f"{time.time()} {os.getpid()}\n")
