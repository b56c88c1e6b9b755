"""What all contenders do in a step of about 2 ms: a small network, four metrics and two losses that see each batch."""

import json
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torchmetrics
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score, MulticlassPrecision

STEPS, BATCH, FEATURES, CLASSES = 200, 32, 64, 10
EPOCHS = 17
"""The first warms up; after it, epochs with logging and without take turns."""

EVERY = 50
"""Steps between two records; the default of mlx and of Lightning."""


class Rows(Dataset):
    def __init__(self, rows: int = 2 * BATCH * STEPS, batch_size: int = BATCH):
        self.batch_size = batch_size
        random = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(rows, FEATURES, generator=random)
        self.labels = torch.randint(CLASSES, (rows,), generator=random)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.inputs[index], self.labels[index]

    @staticmethod
    def ray_map_batches(batch):
        inputs, labels = zip(*batch["item"], strict=True)
        return {"input": torch.stack(inputs), "label": torch.stack(labels)}


class Net(nn.Module):
    def __init__(self, width: int = 192):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(FEATURES, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, CLASSES)
        )

    def forward(self, x):
        return self.layers(x)


def make_metrics() -> dict[str, torchmetrics.Metric]:
    return {
        "accuracy": MulticlassAccuracy(CLASSES, validate_args=False),
        "f1": MulticlassF1Score(CLASSES, validate_args=False),
        "precision": MulticlassPrecision(CLASSES, validate_args=False),
        "confidence": MeanMetric(nan_strategy="ignore"),
        "cross_entropy": MeanMetric(nan_strategy="ignore"),
        "margin": MeanMetric(nan_strategy="ignore"),
    }


def forward(network: nn.Module, metrics: dict[str, torchmetrics.Metric], inputs, labels) -> torch.Tensor:
    """The loss of a batch, after all metrics have seen it."""
    logits = network(inputs)
    loss = F.cross_entropy(logits, labels)
    seen = logits.detach()
    for name in ("accuracy", "f1", "precision"):
        metrics[name].update(seen, labels)
    best = seen.topk(2).values
    metrics["confidence"].update(best[:, 0])
    metrics["margin"].update(best[:, 0] - best[:, 1])
    metrics["cross_entropy"].update(loss.detach())
    return loss


class Clock:
    """Seconds per step of epochs with logging and without."""

    def __init__(self) -> None:
        self.seconds: dict[bool, list[float]] = {True: [], False: []}
        self._started = 0.0

    def start(self) -> None:
        dist.barrier()
        self._started = time.perf_counter()

    def stop(self, epoch: int) -> None:
        dist.barrier()
        if epoch:
            self.seconds[logs(epoch)].append((time.perf_counter() - self._started) / STEPS)

    def write(self, out: Path) -> None:
        if dist.get_rank() == 0:
            names = {True: "on", False: "off"}
            out.write_text(json.dumps({names[on]: statistics.median(found) for on, found in self.seconds.items()}))


def logs(epoch: int) -> bool:
    return epoch % 2 == 1
