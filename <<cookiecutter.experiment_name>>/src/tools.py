"""Tools. Edit: plain classes, nothing to inherit. Their attributes are part of every checkpoint."""

import math
from typing import Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

Mode = Literal["min", "max"]


class EarlyStopping:
    """Counts epochs without a better value, until they are `patience` in a row.

    Args:
        patience: epochs to wait for a better value, at least 1.
        min_delta: how much better than the best a value must be to count.
        mode: whether the lower (`min`) or the higher (`max`) value is better; NaN never is.

    Raises:
        ValueError: the patience is less than 1.
    """

    def __init__(self, patience: int = 5, min_delta: float = 0.0, mode: Mode = "min"):
        if patience < 1:
            raise ValueError(f"patience is {patience}; the least is 1")
        self.patience = patience
        self.min_delta = min_delta
        self.mode = mode
        self.best = math.inf if mode == "min" else -math.inf
        self.waited = 0

    def update(self, value: float) -> None:
        """Take note of an epoch's value."""
        gain = self.best - value if self.mode == "min" else value - self.best
        if gain > self.min_delta:
            self.best, self.waited = value, 0
        else:
            self.waited += 1

    @property
    def stopped(self) -> bool:
        """Whether to train no further, also after a restart."""
        return self.waited >= self.patience


class BestWeights:
    """Keeps a copy of the weights of the best epoch, on the CPU; checkpoints grow by as much.

    Args:
        mode: whether the lower (`min`) or the higher (`max`) value is better; NaN never is. Of equals the later is.
    """

    def __init__(self, mode: Mode = "max"):
        self.mode = mode
        self.best = math.inf if mode == "min" else -math.inf
        self.epoch: int | None = None
        self.weights: dict[str, torch.Tensor] = {}

    def update(self, value: float, epoch: int, model: nn.Module) -> None:
        """Take note of an epoch's value, and of the weights if it is the best so far."""
        if value <= self.best if self.mode == "min" else value >= self.best:
            self.best, self.epoch = value, epoch
            self.weights = {name: item.to("cpu", copy=True) for name, item in unwrapped(model).state_dict().items()}

    def restore(self, model: nn.Module) -> None:
        """Give a model the best weights; without any epoch so far it stays as it is."""
        if self.weights:
            unwrapped(model).load_state_dict(self.weights)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model without DDP around it, so that names of weights are the same for any number of workers."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def warmup_cosine(optimizer: Optimizer, total_steps: int, warmup_steps: int = 20) -> LambdaLR:
    """Learning rate: up in a line to the optimizer's own, then down a cosine to zero.

    Unlike torch's OneCycleLR it peaks at what the optimizer says, and goes on when a run is given more epochs.

    Args:
        total_steps: of all epochs.
        warmup_steps: steps until the optimizer's own rate is reached.
    """

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        done = (step - warmup_steps) / max(1, total_steps - warmup_steps)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    return LambdaLR(optimizer, factor)
