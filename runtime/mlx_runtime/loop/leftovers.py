"""Gradients in parameters of several optimizers, as in a GAN: of a loss that passes through models of another one."""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn
from torch.optim import Optimizer

from mlx_runtime.errors import MlxError
from mlx_runtime.loop.context import params_of


class Leftovers:
    """Warns about gradients in parameters whose optimizer did not step after the loss."""

    def __init__(self, notice: Callable[[str], None]) -> None:
        self._notice = notice
        self.owners: set[str] = set()  # optimizers for which `step` was called since the last backward pass
        self._ever: set[str] = set()
        self._without: set[str] = set()  # optimizers without gradients just before that pass

    def check(self, optimizers: Mapping[str, Optimizer]) -> None:
        """Check the gradients before a backward pass."""
        owners, self.owners = self.owners, set()
        self._ever |= owners
        found = {name for name, item in optimizers.items() if any(param.grad is not None for param in params_of(item))}
        for name in sorted(self._without & found & self._ever - owners) if owners else ():
            last = ", ".join(sorted(owners))
            self._notice(
                f"the loss of {last} left gradients in parameters of {name}, too, which are added to its next update; "
                f'if they do not belong there: self.backward(loss, optimizer="{last}")'
            )
        self._without = set(optimizers) - found


def set_aside(
    optimizer: Optimizer, optimizers: Iterable[Optimizer], *, accumulates_shards: bool
) -> list[tuple[nn.Parameter, torch.Tensor | None]]:
    """Remove the gradients of all parameters except those of an optimizer. Return them, to be restored later."""
    if accumulates_shards:
        raise MlxError(
            "self.backward(loss, optimizer=...) cannot accumulate the gradients of sharded models; set "
            "cfg.accumulate_grad_batches=1 and cfg.elastic.keep_global_batch=false, or use cfg.strategy=ddp"
        )
    own = set(params_of(optimizer))
    others = dict.fromkeys(param for item in optimizers for param in params_of(item) if param not in own)
    kept = [(param, param.grad) for param in others]
    for param in others:
        param.grad = None
    return kept
