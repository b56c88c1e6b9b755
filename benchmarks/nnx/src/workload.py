"""The workload of all contenders: a transformer in Flax NNX that learns the characters of random texts."""

import json
import os
import resource
import statistics
import time
from itertools import pairwise
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import torch
from flax import nnx
from torch.utils.data import Dataset

CHARACTERS, CONTEXT, BATCH, LEARNING_RATE = 29, 64, 12, 1e-3
STEPS, WARM = 220, 20  # WARM steps come before the measurement

Batch = dict[str, jax.Array]


class Text(Dataset[torch.Tensor]):
    """Windows of a text: characters (65,) int64."""

    def __init__(self, rows: int = STEPS * BATCH, batch_size: int = BATCH):
        self.batch_size = batch_size
        self.codes = torch.randint(CHARACTERS, (rows, CONTEXT + 1), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.codes[index]

    @staticmethod
    def ray_map_batches(batch: dict[str, list[torch.Tensor]]) -> dict[str, torch.Tensor]:
        return {"codes": torch.stack(batch["item"])}


class Block(nnx.Module):
    """Causal self-attention and an MLP with residual connections: (n, context, width) → the same shape."""

    def __init__(self, width: int, heads: int = 4, *, rngs: nnx.Rngs):
        self.norms = nnx.List([nnx.LayerNorm(width, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        first, last = nnx.Linear(width, 4 * width, rngs=rngs), nnx.Linear(4 * width, width, rngs=rngs)
        self.mlp = nnx.Sequential(first, nnx.gelu, last)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norms[0](x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.mlp(self.norms[1](x))


class Gpt(nnx.Module):
    """Characters (n, context) → logits (n, context, characters)."""

    def __init__(self, layers: int = 5, width: int = 128, *, rngs: nnx.Rngs):
        self.characters = nnx.Embed(CHARACTERS, width, rngs=rngs)
        self.positions = nnx.Embed(CONTEXT, width, rngs=rngs)
        self.blocks = nnx.Sequential(*(Block(width, rngs=rngs) for _ in range(layers)))
        self.head = nnx.Linear(width, CHARACTERS, rngs=rngs)

    def __call__(self, codes: jax.Array) -> jax.Array:
        return self.head(self.blocks(self.characters(codes) + self.positions(jnp.arange(codes.shape[1]))))


@nnx.jit
def step(net: Gpt, optimizer: nnx.Optimizer, batch: Batch) -> jax.Array:
    """Update the network. Return the loss of each row, (n,)."""

    def mean_loss(net: Gpt) -> tuple[jax.Array, jax.Array]:
        codes = batch["codes"]
        losses = optax.softmax_cross_entropy_with_integer_labels(net(codes[:, :-1]), codes[:, 1:]).mean(axis=1)
        return losses.mean(where=batch.get("mask")), losses

    (_, losses), gradients = nnx.value_and_grad(mean_loss, has_aux=True)(net)
    optimizer.update(net, gradients)
    return losses


class Clock:
    """Times from the start of the process, which the environment variable STARTED has."""

    def __init__(self) -> None:
        self._ticks: list[float] = []

    def tick(self) -> None:
        """Record the end of a step."""
        self._ticks.append(time.time())

    def write(self, out: Path) -> None:
        """Store seconds to the first step, samples per second by the median step and over all steps, and peak MB."""
        seconds = [after - before for before, after in pairwise(self._ticks[WARM - 1 :])]
        found = {
            "first": self._ticks[0] - float(os.environ["STARTED"]),
            "median": BATCH / statistics.median(seconds),
            "all": BATCH / statistics.mean(seconds),
            "mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }
        out.write_text(json.dumps(found))
