"""Losses with weights, such as numbers of target tokens, whose total over all workers is not known in advance.

The gradient of an update is the mean over all elements that its losses count. Each worker multiplies a loss by its
weight divided by the mean weight of all workers, which takes one all-reduce of a number. In an update of several steps,
the weights of later losses are divided by the mean of the first one, and a second all-reduce, of the sum of the weights
of its steps, gives the divisor of the gradients.
"""

import math
import numbers
from functools import cached_property

import torch

from mlx_runtime.distributed.collectives import mean_of
from mlx_runtime.errors import MlxError

Weight = float | torch.Tensor


class WeightedLosses:
    """The weights of the losses in one update of several steps."""

    def __init__(self) -> None:
        self._unit: torch.Tensor | None = None  # mean of the first weight of this update
        self._of_steps: dict[int, torch.Tensor | None] = {}  # weight of the losses in each step; None counts rows

    def factor(self, weight: torch.Tensor, *, alone: bool) -> torch.Tensor:
        """Return the factor of a loss. Every worker must call this; `alone` is True in an update of one step."""
        if alone:
            return weight / _positive(mean_of(weight))
        if self._unit is None:
            self._unit = _positive(mean_of(weight))
        return weight / self._unit

    def add(self, weight: torch.Tensor | None, step: int) -> None:
        """Note a loss in a step of an update of several steps.

        Raises:
            MlxError: the losses of the step have different weights, so the gradients cannot be divided by one sum.
        """
        first = self._of_steps.setdefault(step, weight)
        counts_rows = {item is None for item in (weight, *self._of_steps.values())}
        if len(counts_rows) > 1 or not (weight is first or torch.equal(weight, first)):  # type: ignore[arg-type]
            raise MlxError(
                "the losses of an update of several steps have different weights, or only some have one; pass the same "
                "weight= to all losses of a step, or do not accumulate gradients"
            )

    @cached_property
    def divisor(self) -> float | None:
        """The divisor of the gradients; None if losses count rows. Every worker must read this at the last step."""
        if self._unit is None:
            return None
        weights = [item for item in self._of_steps.values() if item is not None]
        return float(_positive(mean_of(torch.stack(weights).sum())) / self._unit)


def checked_weight(weight: Weight, device: torch.device) -> torch.Tensor:
    """Return a weight as a tensor () float64. Does not synchronize with a GPU.

    Raises:
        MlxError: it is not a number, or less than 0.
    """
    if isinstance(weight, torch.Tensor):
        known = weight.numel() == 1 and weight.device.type == "cpu"
        valid, value = weight.numel() == 1, weight.item() if known else None
    else:
        valid, value = isinstance(weight, numbers.Real), weight
    if not valid or (value is not None and not (math.isfinite(value) and value >= 0)):
        shown = f"a tensor {tuple(weight.shape)}" if isinstance(weight, torch.Tensor) and value is None else weight
        raise MlxError(
            f"self.backward(loss, weight={shown}): the weight is a number, 0 or more, like the targets counted"
        )
    return torch.as_tensor(weight, dtype=torch.float64, device=device).detach().reshape(())


def _positive(value: torch.Tensor) -> torch.Tensor:
    """Return 1 for 0, to divide 0 by it."""
    return torch.where(value > 0, value, torch.ones_like(value))
