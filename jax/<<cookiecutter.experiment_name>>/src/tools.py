"""Tools. Edit: write plain classes, without a base class. Checkpoints include their attributes."""

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

Mode = Literal["min", "max"]


class EarlyStopping:
    """Requests a stop after `patience` consecutive epochs without a better value.

    Args:
        patience: number of epochs to wait for a better value, at least 1.
        min_delta: minimum improvement over the best value.
        mode: `min` if lower values are better, `max` if higher values are better. NaN and infinity never are.

    Raises:
        ValueError: `patience` is less than 1.
    """

    def __init__(self, patience: int = 5, min_delta: float = 0.0, mode: Mode = "min"):
        if patience < 1:
            raise ValueError(f"patience is {patience}; the minimum is 1")
        self.patience = patience
        self.min_delta = min_delta
        self.mode = mode
        self.best = math.inf if mode == "min" else -math.inf
        self.waited = 0

    def update(self, value: float) -> None:
        """Record the value of an epoch."""
        gain = self.best - value if self.mode == "min" else value - self.best
        if math.isfinite(value) and gain > self.min_delta:
            self.best, self.waited = value, 0
        else:
            self.waited += 1

    @property
    def stopped(self) -> bool:
        """True if training should stop, also after a restart."""
        return self.waited >= self.patience


class BestWeights:
    """Keeps a copy of the parameters of the best epoch. Checkpoints include this copy.

    Args:
        mode: `min` if lower values are better, `max` if higher values are better. NaN and infinity never are; an
            equal value is.
    """

    def __init__(self, mode: Mode = "max"):
        self.mode = mode
        self.best = math.inf if mode == "min" else -math.inf
        self.epoch: int | None = None
        self.weights: dict[str, Any] = {}

    def update(self, value: float, epoch: int, model: nnx.Module) -> None:
        """Record the value of an epoch, and copy the parameters if it is the best so far."""
        if math.isfinite(value) and (value <= self.best if self.mode == "min" else value >= self.best):
            self.best, self.epoch = value, epoch
            self.weights = jax.tree.map(jnp.copy, nnx.to_pure_dict(nnx.state(model, nnx.Param)))

    def restore(self, model: nnx.Module) -> None:
        """Load the best parameters into a model. Does nothing before the first epoch."""
        if self.weights:
            nnx.update(model, self.weights)
