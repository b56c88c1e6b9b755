"""Models in and out of the wrapper that synchronizes their gradients."""

from typing import Any

from torch.nn.parallel import DistributedDataParallel


def unwrap(model: Any) -> Any:
    """Return the model inside `prepare_model`'s DDP wrapper, so that state names carry no `module.` prefix."""
    return model.module if isinstance(model, DistributedDataParallel) else model
