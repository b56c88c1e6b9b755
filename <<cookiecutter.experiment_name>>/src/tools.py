"""Tools. Edit: plain classes, nothing to inherit. Their attributes are part of every checkpoint."""

import math

from torch.optim import Optimizer


class EarlyStopping:
    """True once a value has not improved for `patience` calls in a row.

    Args:
        patience: calls to wait for an improvement.
        min_delta: how much smaller than the best a value must be to count.
    """

    def __init__(self, patience: int = 5, min_delta: float = 0.0):
        self.patience = patience
        self.min_delta = min_delta
        self.best = math.inf
        self.waited = 0

    def __call__(self, value: float) -> bool:
        if value < self.best - self.min_delta:
            self.best, self.waited = value, 0
        else:
            self.waited += 1
        return self.waited >= self.patience


class WarmupCosine:
    """Learning rate: up in a line for `warmup_steps`, then down a cosine to zero at `total_steps`.

    Args:
        warmup_steps: steps until the optimizer's own rate is reached.
        total_steps: steps in all; the experiment sets it from the data.
    """

    def __init__(self, warmup_steps: int = 20, total_steps: int = 600):
        self.warmup_steps = warmup_steps
        self.total_steps = total_steps
        self.steps = 0

    def step(self, optimizer: Optimizer) -> None:
        """Set the rate for the next step."""
        self.steps += 1
        if self.steps < self.warmup_steps:
            factor = self.steps / self.warmup_steps
        else:
            done = (self.steps - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps)
            factor = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
            group["lr"] = group["initial_lr"] * factor
