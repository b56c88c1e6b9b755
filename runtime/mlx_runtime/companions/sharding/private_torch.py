"""Uses of the private API of FSDP2 and gradient scalers. `test_sharding.py` fails when torch changes it."""

from types import SimpleNamespace
from typing import Any

import torch

from mlx_runtime.distributed.wrapping import by_mesh


def drop_unreduced_gradients(model: Any) -> None:
    """Drop the gradients that a sharded model has accumulated without reducing them.

    `FSDPModule.reset_iter_state` should drop them, but does not.
    """
    from torch.distributed.fsdp import FSDPModule  # here, because it takes seconds

    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                for param in group.fsdp_params:
                    param.unsharded_accumulated_grad = None
                    if hasattr(param, "_unsharded_param"):  # after the first forward pass
                        param._unsharded_param.grad = None


class ShardedGradScaler(torch.amp.GradScaler):
    """A gradient scaler for optimizers that may have both sharded and unsharded parameters.

    If the gradient of a shard overflows, all workers skip the step.
    """

    def _unscale_grads_(self, optimizer: Any, inv_scale: Any, found_inf: torch.Tensor, allow_fp16: bool) -> Any:
        params: list[torch.Tensor] = [param for group in optimizer.param_groups for param in group["params"]]
        found: dict[torch.device, torch.Tensor] = {}
        for part in by_mesh(params):
            alike: Any = SimpleNamespace(param_groups=[{"params": part}])
            overflowed = super()._unscale_grads_(alike, inv_scale, found_inf.clone(), allow_fp16)
            for device, value in overflowed.items():
                found[device] = torch.maximum(found[device], value) if device in found else value
        return found
