"""Gradient norms by layer, and detection of NaN and infinity.

A layer is a module that owns parameters, named after its model and its path in that model, like `net.layers.0`.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from mlx_runtime.distributed.wrapping import total_norm
from mlx_runtime.errors import MlxError


class GradientMonitor:
    """Inspects gradients just before an optimizer steps.

    Args:
        every: global steps between two records of the norms of all layers; 0 means never.
        stop_on_nan: check every step, and raise at the first gradient that is not finite.
        report: called with norms by name; None on workers that neither record them nor hold shards.
    """

    def __init__(
        self,
        every: int = 0,
        stop_on_nan: bool = False,
        report: Callable[[dict[str, float]], None] | None = None,
    ) -> None:
        self._every, self._stop_on_nan, self._report = every, stop_on_nan, report

    def wants(self, step: int) -> bool:
        """Return True if gradients are inspected at a global step."""
        return self._stop_on_nan or self._records(step)

    def _records(self, step: int) -> bool:
        return self._report is not None and self._every > 0 and step % self._every == 0

    def inspect(self, models: Mapping[str, Any], params: Iterable[nn.Parameter], step: int) -> None:
        """Inspect the gradients of an optimizer that is about to step, at a global step that `wants` names.

        With `stop_on_nan`, all must be finite.
        """
        params = [param for param in params if param.grad is not None]
        gradients: Any = [param.grad for param in params]
        if not params or (not self._records(step) and total_norm(gradients).isfinite()):
            return
        layers = _layers(models, {id(param) for param in params})
        gradient = _norms_of({name: [param.grad for param in layer] for name, layer in layers.items()})
        broken = [name for name, norm in gradient.items() if not math.isfinite(norm)]
        if broken and self._stop_on_nan:
            more = f" (and {len(broken) - 1} more layers)" if len(broken) > 1 else ""
            text = f"the gradient of {broken[0]}{more} is not finite at step {step}"
            raise MlxError(f"{text} (cfg.debug.stop_on_nan)")
        if self._records(step) and self._report is not None:
            weight = _norms_of({name: [param.detach() for param in layer] for name, layer in layers.items()})
            named = {f"gradient_norm/{name}": norm for name, norm in gradient.items()}
            self._report(named | {f"weight_norm/{name}": norm for name, norm in weight.items()})


def _norms_of(tensors: Mapping[str, list[Any]]) -> dict[str, float]:
    """Return the 2-norm of each list of tensors, in one transfer from the device."""
    norms = torch.stack([total_norm(items).float() for items in tensors.values()])
    return dict(zip(tensors, norms.tolist(), strict=True))


def _layers(models: Mapping[str, Any], wanted: set[int]) -> dict[str, list[nn.Parameter]]:
    """Return the parameters of each layer by its name, limited to those whose `id` is wanted."""
    layers: dict[str, list[nn.Parameter]] = {}
    for title, model in models.items():
        for path, module in model.named_modules() if isinstance(model, nn.Module) else ():
            params = [param for param in module.parameters(recurse=False) if id(param) in wanted]
            if params:
                layers[f"{title}.{path}" if path else title] = params
    return layers
