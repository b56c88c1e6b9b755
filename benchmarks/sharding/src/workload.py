"""The workload of all contenders: a GPT that is trained on generated tokens, and the measurements of it."""

import json
import os
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
import torch._dynamo  # imported here, so that it counts as part of the imports for every contender
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

VOCABULARY, CONTEXT, LEARNING_RATE = 1024, 64, 1e-4
WARM = 3
"""Number of steps before those whose time is measured."""

CHECKPOINTS = 2
"""Number of checkpoints. Only the last is measured: the first takes longer, because it imports and allocates."""

Sample = tuple[torch.Tensor, torch.Tensor]

baseline: dict[int, float] = {}
"""MB of private memory before this process, by its id, built its first model."""


class Tokens(Dataset[Sample]):
    """Generated tokens (64,) int64, and the next token for each of them."""

    def __init__(self, rows: int = 64, batch_size: int = 4):
        self.rows, self.batch_size = rows, batch_size

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> Sample:
        tokens = torch.randint(VOCABULARY, (CONTEXT + 1,), generator=torch.Generator().manual_seed(index))
        return tokens[:-1], tokens[1:]

    @staticmethod
    def ray_map_batches(batch: dict[str, list[Sample]]) -> dict[str, torch.Tensor]:
        inputs, targets = zip(*batch["item"], strict=True)
        return {"input": torch.stack(inputs), "target": torch.stack(targets)}


class Block(nn.Module):
    """Causal self-attention and an MLP with residual connections: (n, context, width) → the same shape."""

    def __init__(self, width: int = 64, heads: int = 4):
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
    """Tokens (n, context) int64 and the next ones → their mean loss. Stages of a pipeline need not exchange logits."""

    def __init__(self, layers: int = 2, width: int = 64, heads: int = 4):
        baseline.setdefault(os.getpid(), memory_mb()["RssAnon"])
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())

    def init_weights(self) -> None:
        """Initialize weights that may be shards of the whole ones."""
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
                if getattr(module, "bias", None) is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.LayerNorm):
                module.reset_parameters()


def step(network: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor, targets: torch.Tensor) -> None:
    network(tokens, targets).backward()
    optimizer.step()
    optimizer.zero_grad()


def memory_mb() -> dict[str, float]:
    """Return what the kernel knows of this process's memory: its present parts, and `VmHWM`, the peak of their sum."""
    lines = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
    return {line[0].rstrip(":"): int(line[1]) / 1024 for line in lines if line[0].startswith(("Rss", "VmHWM"))}


def peak_mb() -> float:
    """Return the peak of private memory so far, beyond that before the model.

    Mapped files, which is code of libraries above all, stay mapped once they are read, so what they occupy now is
    what they occupied at the peak. Workers that are forked share them, and the memory that imports occupy.
    """
    now = memory_mb()
    return now["VmHWM"] - now["RssFile"] - now["RssShmem"] - baseline[os.getpid()]


class Record:
    """What a contender measures in one run. Every worker makes the same calls."""

    def __init__(self) -> None:
        self._ticks: list[list[float]] = [[]]
        self._seconds: dict[str, float] = {}
        self._peaks: dict[str, float] = {}

    def tick(self) -> None:
        """Record the end of a step."""
        self._ticks[-1].append(time.perf_counter())

    def wait(self, marker: Path) -> None:
        """Create a file, and wait until the benchmark has removed it. Steps after it are measured separately."""
        dist.barrier()
        if dist.get_rank() == 0:
            marker.touch()
        while marker.exists():
            time.sleep(0.01)
        dist.barrier()
        self._ticks.append([time.perf_counter()])

    def trained(self) -> None:
        """Record the end of all steps."""
        self._peaks["training"] = peak_mb()

    def checkpoints(self, save: Callable[[int], Callable[[], object]], restore: Callable[[], object]) -> None:
        """Measure the last of some checkpoints, and how long it takes to restore it.

        Args:
            save: begins to save one, of which it gets the number, and returns what waits for its end.
            restore: restores the last one.
        """
        for number in range(CHECKPOINTS):
            dist.barrier()
            started = time.perf_counter()
            wait = save(number)
            self._seconds["blocked"] = time.perf_counter() - started
            wait()
            dist.barrier()
            self._seconds["written"] = time.perf_counter() - started
        self._peaks["saving"] = peak_mb()
        started = time.perf_counter()
        restore()
        dist.barrier()
        self._seconds["restored"] = time.perf_counter() - started
        self._peaks["restoring"] = peak_mb()

    def write(self, out: Path) -> None:
        """Store the seconds of steps of rank 0, and the worst of all workers in everything else. Only rank 0 writes."""
        own, workers = (self._seconds, self._peaks), [None] * dist.get_world_size()
        dist.all_gather_object(workers, own)
        seconds, peaks = ({key: max(item[part][key] for item in workers) for key in own[part]} for part in range(2))
        steps = [[after - before for before, after in pairwise(part)] for part in self._ticks]
        if warm := steps[0][WARM - 1 :]:
            seconds["step"] = statistics.median(warm)
        if dist.get_rank() == 0:
            each = [item[1] for item in workers]
            out.write_text(json.dumps({"seconds": seconds, "peak_mb": peaks, "peaks_mb": each, "steps": steps}))
