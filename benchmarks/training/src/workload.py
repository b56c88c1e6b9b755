"""The workload of all contenders: a transformer of 1 M parameters that learns the characters of a generated text."""

import json
import statistics
import time
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

CHARACTERS = "abcdefghijklmnopqrstuvwxyz .\n"
CONTEXT, BATCH, LEARNING_RATE = 64, 12, 1e-3
ROWS = 240 * BATCH
WARM = 20
"""Number of steps before the measurement."""

Sample = tuple[torch.Tensor, torch.Tensor]


def written(length: int) -> str:
    """Return a text of sentences with made-up words, some frequent and some rare, as in a language."""
    random = torch.Generator().manual_seed(0)
    draw = lambda high, count: torch.randint(high, (count,), generator=random).tolist()
    words = ["".join(CHARACTERS[letter] for letter in draw(26, 2 + size)) for size in draw(7, 500)]
    chances = 1 / torch.arange(1.0, 501)
    drawn = torch.multinomial(chances, length // 2, replacement=True, generator=random).tolist()
    ends = [".\n" if end == 0 else " " for end in draw(10, len(drawn))]
    return "".join(words[word] + end for word, end in zip(drawn, ends, strict=True))[:length]


class Text(Dataset[Sample]):
    """Windows of a text: characters (64,) int64, and the next character for each of them."""

    def __init__(self, rows: int = ROWS, batch_size: int = BATCH):
        self.batch_size = batch_size
        self.rows = rows
        self.codes = torch.tensor([CHARACTERS.index(character) for character in written(rows * 16 + CONTEXT + 1)])

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> Sample:
        window = self.codes[index * 16 : index * 16 + CONTEXT + 1]
        return window[:-1], window[1:]

    @staticmethod
    def ray_map_batches(batch: dict[str, list[Sample]]) -> dict[str, torch.Tensor]:
        inputs, targets = zip(*batch["item"], strict=True)
        return {"input": torch.stack(inputs), "target": torch.stack(targets)}


class Block(nn.Module):
    """Causal self-attention and an MLP with residual connections: (n, context, width) → the same shape."""

    def __init__(self, width: int = 128, heads: int = 4):
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
    """Characters (n, context) int64 → logits (n, context, characters)."""

    def __init__(self, layers: int = 5, width: int = 128, heads: int = 4):
        super().__init__()
        self.characters, self.positions = nn.Embedding(len(CHARACTERS), width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, len(CHARACTERS)))

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        x = self.characters(codes) + self.positions.weight[: codes.shape[1]]
        return self.head(self.blocks(x))


def step(network: nn.Module, optimizer: torch.optim.Optimizer, codes: torch.Tensor, targets: torch.Tensor) -> None:
    F.cross_entropy(network(codes).flatten(0, 1), targets.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()


class Clock:
    """Seconds of each step after the warm-up, including the time between steps."""

    def __init__(self) -> None:
        self._ticks: list[float] = []

    def tick(self) -> None:
        """Record the end of a step."""
        self._ticks.append(time.perf_counter())

    def write(self, out: Path) -> None:
        """Store the samples per second of all workers, by the median step and over all steps. Only rank 0 writes."""
        world = dist.get_world_size() if dist.is_initialized() else 1
        if world == 1 or dist.get_rank() == 0:
            ticks = self._ticks[WARM - 1 :]
            seconds = [after - before for before, after in pairwise(ticks)]
            rates = {"median": statistics.median(seconds), "all": statistics.mean(seconds)}
            out.write_text(json.dumps({name: world * BATCH / value for name, value in rates.items()}))
