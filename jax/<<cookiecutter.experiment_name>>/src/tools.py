"""Tools. Edit: write plain classes, without a base class. Checkpoints include their attributes."""

import math
from typing import Literal

import optax

Mode = Literal["min", "max"]


class EarlyStopping:
    """Requests a stop after `patience` consecutive epochs without a better value.

    Args:
        patience: number of epochs to wait for a better value, at least 1.
        min_delta: minimum improvement over the best value.
        mode: `min` if lower values are better, `max` if higher values are better. NaN and infinity never are.
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


class BestEpoch:
    """Remembers the best epoch.

    Args:
        mode: `min` if lower values are better, `max` if higher values are better; an equal value is better, too.
    """

    def __init__(self, mode: Mode = "max"):
        self.mode = mode
        self.best = math.inf if mode == "min" else -math.inf
        self.epoch: int | None = None

    def update(self, value: float, epoch: int) -> bool:
        """Record the value of an epoch. Return True if it is the best so far."""
        better = math.isfinite(value) and (value <= self.best if self.mode == "min" else value >= self.best)
        if better:
            self.best, self.epoch = value, epoch
        return better


def warmup_cosine(total_steps: int, peak: float = 3e-3, warmup_steps: int = 20) -> optax.Schedule:
    """Warm up linearly to the peak of the learning rate, then decay to zero along a cosine."""
    warmup = min(warmup_steps, total_steps // 2)
    return optax.warmup_cosine_decay_schedule(0.0, peak, warmup, decay_steps=total_steps)
