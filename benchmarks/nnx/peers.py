"""The same loop in plain JAX: peers.py LAYERS WIDTH OUT."""

import sys
from pathlib import Path

import jax
import numpy as np
import optax
import torch
from flax import nnx
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from src.workload import BATCH, LEARNING_RATE, Clock, Gpt, Text, step


def main(layers: int, width: int, out: Path) -> None:
    net, metric, clock = Gpt(layers, width, rngs=nnx.Rngs(0)), MeanMetric(), Clock()
    optimizer = nnx.Optimizer(net, optax.adam(LEARNING_RATE), wrt=nnx.Param)
    for codes in DataLoader(Text(), BATCH, shuffle=True):
        batch = {"codes": jax.device_put(codes.numpy().astype(np.int32))}
        metric.update(torch.from_numpy(np.array(step(net, optimizer, batch))))
        clock.tick()
    metric.compute()
    clock.write(out)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
