"""The datasets and the model of all contenders, and their timing."""

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

BATCH_SIZES = (32, 256, 1024)
MODELS = ("none", "mlp")
DATA = ("tensors", "images")

Sample = tuple[torch.Tensor, torch.Tensor]


class Tensors(Dataset[Sample]):
    """Rows of 32 float32 and a label."""

    def __init__(self, rows: int = 50_000, batch_size: int = 32):
        self.batch_size = batch_size
        chance = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(rows, 32, generator=chance)
        self.labels = torch.randint(10, (rows,), generator=chance)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Sample:
        return self.inputs[index], self.labels[index]

    @staticmethod
    def ray_map_batches(batch: dict[str, list[Sample]]) -> dict[str, torch.Tensor]:
        inputs, labels = zip(*batch["item"], strict=True)
        return {"input": torch.stack(inputs), "label": torch.stack(labels)}


class Images(Tensors):
    """Images of 3 x 32 x 32 bytes and a label."""

    def __init__(self, rows: int = 20_000, batch_size: int = 32):
        super().__init__(rows, batch_size)
        chance = torch.Generator().manual_seed(1)
        self.inputs = torch.randint(256, (rows, 3, 32, 32), generator=chance, dtype=torch.uint8)


def make_dataset(data: str) -> Tensors:
    return {"tensors": Tensors, "images": Images}[data]()


class Mlp(nn.Module):
    """A network that is so small that reading the data matters."""

    def __init__(self, data: str):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32 if data == "tensors" else 3072, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        inputs = inputs.float().flatten(1)
        return self.layers(inputs)

    def loss(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self(inputs), labels)


def cases() -> Iterator[tuple[str, str, int]]:
    for data in DATA:
        for model in MODELS:
            for batch_size in BATCH_SIZES:
                yield data, model, batch_size


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, labels: torch.Tensor) -> None:
    nn.functional.cross_entropy(model(inputs), labels).backward()
    optimizer.step()
    optimizer.zero_grad()


def measured(batches: Callable[[int], Iterable[Any]], step: Callable[[Any], None]) -> float:
    """Return the rows per second of all workers, by the time of the slowest, over passes of about a second in total.

    Args:
        batches: called with the number of each pass.
        step: called with each batch.
    """
    seconds, _ = timed(batches, step, range(1))  # warm-up, and the time of one pass
    passes = max(1, min(100, math.ceil(1 / seconds)))
    seconds, rows = timed(batches, step, range(1, 1 + passes))
    return rows / seconds


def timed(batches: Callable[[int], Iterable[Any]], step: Callable[[Any], None], passes: range) -> tuple[float, int]:
    dist.barrier()
    started = time.perf_counter()
    rows = 0
    for number in passes:
        for batch in batches(number):
            rows += len(batch["label"] if isinstance(batch, dict) else batch[1])
            step(batch)
    return over_all_workers(time.perf_counter() - started, rows)


def over_all_workers(seconds: float, rows: int) -> tuple[float, int]:
    """Return the maximum of the seconds, and the sum of the rows."""
    slowest, total = torch.tensor([seconds]), torch.tensor([rows])
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    dist.all_reduce(total)
    return float(slowest), int(total)


def memory_mb() -> dict[str, float]:
    """Return the memory of this process: what only it has, its share of what several have, and all that is resident.

    Forked workers have most pages of their driver in common, until they write to them.
    """
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    sizes = {line.split(":")[0]: int(line.split()[1]) / 1024 for line in lines}
    own = sizes["Private_Clean"] + sizes["Private_Dirty"]
    return {"own": own, "proportional": sizes["Pss"], "resident": sizes["Rss"]}


def write(path: Path, rates: dict[str, float]) -> None:
    """Store the measurements; only rank 0 writes."""
    if dist.get_rank() == 0:
        path.write_text(json.dumps({"samples_per_s": rates, "memory_mb": memory_mb()}))
