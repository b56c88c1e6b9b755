"""Updates from the gradients of several steps, without a word of user code."""

import functools
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


class Accumulation:
    """Lets optimizers and torch's schedulers step only at the last of several steps, with the mean of their gradients.

    A step that is not the last adds the gradients to those of the steps before it, so that `zero_grad`, and clipping of
    this step's gradients, work as ever.

    Attributes:
        first, last: whether the present step is the first, the last of its update.
        steps: how many make the present update.
        in_place: whether the loop adds the gradients up by itself, with `BaseModule.backward`, so that optimizers step
            as they are.
    """

    def __init__(self) -> None:
        self.first = self.last = True
        self.in_place = False
        self.steps = 1
        self._sums: dict[torch.Tensor, torch.Tensor] = {}
        self._patched: set[int] = set()

    def begin(self) -> None:
        """A pass begins: what one before it, left in the middle of an update, has added up is forgotten."""
        self.first = self.last = True
        self._sums.clear()

    def over(self, number: int, of: int, each: int) -> None:
        """A step begins.

        Args:
            number: of the step in its pass, from 1.
            of: steps in the pass.
            each: steps per update; the last update of a pass may have fewer.
        """
        self.first, self.last = number % each == 1 or each == 1, number % each == 0 or number == of
        self.steps = min(each, of - (number - 1) // each * each)

    def patch(self, members: Iterable[Any]) -> None:
        """Make optimizers and schedulers obey; those that do already are left alone."""
        for member in members:
            if id(member) in self._patched:
                continue
            if isinstance(member, Optimizer):
                member.step = types.MethodType(self._step(member.step), member)  # type: ignore[method-assign]
            elif isinstance(member, LRScheduler):
                member.step = types.MethodType(self._skipping(member.step), member)  # type: ignore[method-assign]
            else:
                continue
            self._patched.add(id(member))

    def _step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)  # torch's schedulers leave a mark on it, and look for it
        def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if self.in_place:
                return original(*args, **kwargs)
            for param in [item for group in optimizer.param_groups for item in group["params"]]:
                parts = [item for item in (self._sums.pop(param, None), param.grad) if item is not None]
                if parts and not self.last:
                    self._sums[param] = sum(parts[1:], parts[0].clone())
                elif parts and self.steps > 1:
                    param.grad = sum(parts[1:], parts[0]) / self.steps
            return original(*args, **kwargs) if self.last else None

        return step

    def _skipping(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def step(_: LRScheduler, *args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs) if self.last else None

        return step
