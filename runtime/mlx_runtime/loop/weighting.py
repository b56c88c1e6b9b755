"""Losses with weights, such as numbers of target tokens, whose total over all workers is not known in advance.

The gradient of an update is the mean over all elements that its losses count. Each worker multiplies a loss by its
weight divided by the mean weight of all workers, which takes one all-reduce of a number. In an update of several steps,
the weights of later losses are divided by the mean of the first one, and a second all-reduce, of the sum of all
weights, gives the divisor of the gradients.
"""

import math
import numbers
from collections.abc import Callable

import torch

from mlx_runtime.distributed.collectives import mean_of
from mlx_runtime.errors import MlxError

Weight = float | torch.Tensor


class WeightedLosses:
    """The weights of the losses in one update of several steps.

    A loss belongs to the optimizers for which `optimizer_step` is called before the next loss.
    """

    def __init__(self) -> None:
        self._unit: torch.Tensor | None = None  # mean of the first weight of this update
        self._losses: list[torch.Tensor | None] = []  # weights of the losses that belong together; None counts rows
        self._owners: set[str] = set()  # optimizers that these belong to
        self._totals: dict[str, torch.Tensor | None] = {}  # by optimizer, on this worker; None counts rows

    def factor(self, weight: torch.Tensor, *, alone: bool) -> torch.Tensor:
        """Return the factor of a loss. Every worker must call this; `alone` is True in an update of one step."""
        if alone:
            return weight / _positive(mean_of(weight))
        if self._unit is None:
            self._unit = _positive(mean_of(weight))
        return weight / self._unit

    def add(self, weight: torch.Tensor | None) -> None:
        """Note a loss of an update of several steps."""
        if self._owners:
            self._losses, self._owners = [], set()
        self._losses.append(weight)

    def assign(self, name: str) -> None:
        """Assign the losses since the last step of an optimizer to this optimizer.

        Raises:
            MlxError: they have different weights, so their gradients cannot be divided by one sum.
        """
        if not self._losses or name in self._owners:
            return
        self._owners.add(name)
        first, total = self._losses[0], self._totals.get(name)
        counts_rows = {item is None for item in (*self._losses, self._totals.get(name, first))}
        others = [item for item in self._losses[1:] if item is not None]
        if len(counts_rows) > 1 or any(first is None or not torch.equal(item, first) for item in others):
            raise MlxError(
                f"the losses that optimizer_step({name!r}) accumulates have different weights, or only some have one; "
                "pass the same weight= to all of them, or give each its own optimizer and call optimizer_step right "
                "after its self.backward"
            )
        self._totals[name] = None if first is None else first + (0 if total is None else total)

    def divisor(self, name: str) -> float | None:
        """Return the divisor of an optimizer's gradients. Every worker must call this when the optimizer steps."""
        total = self._totals.pop(name, None)
        return None if total is None or self._unit is None else float(_positive(mean_of(total)) / self._unit)


def checked_weight(weight: Weight, device: torch.device) -> tuple[torch.Tensor, bool]:
    """Return a weight as a tensor () float64, and True if it is known to be 0. Does not synchronize with a GPU.

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
    made = torch.as_tensor(weight, dtype=torch.float64, device=device).detach().reshape(())
    return made, value == 0


def without_gradient(loss: torch.Tensor) -> Callable[[], None]:
    """Make the gradients of a loss zero, even if it is NaN (an empty mean). Return a function that undoes this."""
    handles, seen, waiting = [], set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or not node.next_functions:
            continue
        seen.add(node)
        handles.append(node.register_hook(_zeros))
        waiting += [following for following, _ in node.next_functions]

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


def _zeros(inputs: tuple[torch.Tensor | None, ...], outputs: object) -> tuple[torch.Tensor | None, ...]:
    return tuple(None if item is None else torch.zeros_like(item) for item in inputs)


def _positive(value: torch.Tensor) -> torch.Tensor:
    """Return 1 for 0, to divide 0 by it."""
    return torch.where(value > 0, value, torch.ones_like(value))
