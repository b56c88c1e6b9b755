"""`cfg.debug.stop_on_nan`: detection of NaN and infinity in gradients."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from mlx_runtime.distributed.wrapping import total_norm
from mlx_runtime.errors import MlxError


def check_finite(models: Mapping[str, Any], params: Iterable[nn.Parameter], step: int) -> None:
    """Check the gradients of an optimizer that is about to step. Every worker must call this.

    Raises:
        MlxError: one is not finite; names its parameter, like `net.layers.0.weight`.
    """
    with_gradient = {id(param): param for param in params if param.grad is not None}
    if total_norm([param.grad for param in with_gradient.values() if param.grad is not None]).isfinite():
        return
    broken = [
        f"{title}.{path}"
        for title, model in models.items()
        for path, param in (model.named_parameters() if isinstance(model, nn.Module) else ())
        if id(param) in with_gradient and param.grad is not None and not total_norm([param.grad]).isfinite()
    ]
    if broken:
        more = f" (and {len(broken) - 1} more)" if len(broken) > 1 else ""
        raise MlxError(f"the gradient of {broken[0]}{more} is not finite at step {step} (cfg.debug.stop_on_nan)")
