"""The step of all contenders, about 2 ms: a small network, with four metrics and two losses updated by each batch."""

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
"""Number of epochs: a warm-up, then epochs with and without logging, alternating."""

EVERY = 50
"""Steps between two records; the default of both mlx and Lightning."""


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
    """Update all metrics with a batch, and return its loss."""
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
    """Seconds per step in epochs with and without logging.

    Attributes:
        seconds: seconds of each epoch; the key is True for epochs with logging.
        inside: seconds per step in the calls that log, in epochs with logging; 0 if they are not timed.
    """

    def __init__(self) -> None:
        self.seconds: dict[bool, list[float]] = {True: [], False: []}
        self.inside: list[float] = []
        self._started = self._inside = 0.0

    def start(self) -> None:
        dist.barrier()
        self._inside = 0.0
        self._started = time.perf_counter()

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a wrapper of a function, whose time counts as `inside`."""

        def timing(*arguments: Any, **named: Any) -> Any:
            begun = time.perf_counter()
            try:
                return call(*arguments, **named)
            finally:
                self._inside += time.perf_counter() - begun

        return timing

    def stop(self, epoch: int) -> None:
        dist.barrier()
        if epoch:
            self.seconds[logs(epoch)].append((time.perf_counter() - self._started) / STEPS)
            if logs(epoch):
                self.inside.append(self._inside / STEPS)

    def write(self, out: Path) -> None:
        if dist.get_rank() == 0:
            found = {"on": self.seconds[True], "off": self.seconds[False], "inside": self.inside}
            out.write_text(json.dumps({name: statistics.median(seconds) for name, seconds in found.items()}))


def logs(epoch: int) -> bool:
    return epoch % 2 == 1
