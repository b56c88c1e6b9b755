"""Tools. Edit: write plain classes, without a base class. Checkpoints include their attributes."""

import math
from typing import Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

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
    """Keeps a copy of the weights of the best epoch on the CPU. Checkpoints include this copy.

    Args:
        mode: `min` if lower values are better, `max` if higher values are better. NaN and infinity never are; an
            equal value is.
    """

    def __init__(self, mode: Mode = "max"):
        self.mode = mode
        self.best = math.inf if mode == "min" else -math.inf
        self.epoch: int | None = None
        self.weights: dict[str, torch.Tensor] = {}

    def update(self, value: float, epoch: int, model: nn.Module) -> None:
        """Record the value of an epoch, and copy the weights if it is the best so far."""
        if math.isfinite(value) and (value <= self.best if self.mode == "min" else value >= self.best):
            self.best, self.epoch = value, epoch
            self.weights = {name: item.to("cpu", copy=True) for name, item in unwrapped(model).state_dict().items()}

    def restore(self, model: nn.Module) -> None:
        """Load the best weights into a model. Does nothing before the first epoch."""
        if self.weights:
            unwrapped(model).load_state_dict(self.weights)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model without its DDP wrapper, so that weight names do not depend on the number of workers."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def warmup_cosine(optimizer: Optimizer, total_steps: int, warmup_steps: int = 20) -> LambdaLR:
    """Warm up linearly to the learning rate of the optimizer, then decay to zero along a cosine.

    Unlike torch's OneCycleLR, it peaks at the optimizer's own learning rate, and a resumed run can train for more
    epochs.

    Args:
        total_steps: number of steps in all epochs.
        warmup_steps: number of steps until the peak.
    """

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        done = (step - warmup_steps) / max(1, total_steps - warmup_steps)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    return LambdaLR(optimizer, factor)
