"""The private API of torch that private_torch.py uses. A version of torch that changes it fails here, not in a run."""

import inspect

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

pytestmark = pytest.mark.pure


def test_where_gradients_are_kept_until_they_are_reduced() -> None:
    assert "_fsdp_param_groups" in inspect.getsource(FSDPModule.set_requires_gradient_sync)
    kept = inspect.getsource(FSDPParam.to_accumulated_grad_if_needed)
    assert "self._unsharded_param.grad = None" in kept
    assert "self.unsharded_accumulated_grad = " in kept
    assert "fsdp_param.unsharded_accumulated_grad" in inspect.getsource(_fsdp_param_group.FSDPParamGroup.post_backward)


def test_resetting_an_iteration_keeps_them() -> None:
    """Once it drops them, as its documentation says, `drop_unreduced_gradients` is no longer needed."""
    group = inspect.getsource(_fsdp_param_group.FSDPParamGroup._reset_iter_state)
    assert "unsharded_accumulated_grad" not in group
    assert ".grad = None" not in group


def test_a_scaler_unscales_the_gradients_of_an_optimizer_by_this_name() -> None:
    names = list(inspect.signature(torch.amp.GradScaler._unscale_grads_).parameters)
    assert names == ["self", "optimizer", "inv_scale", "found_inf", "allow_fp16"]
    assert "self._unscale_grads_(" in inspect.getsource(torch.amp.GradScaler.unscale_)
    assert "optimizer.param_groups" in inspect.getsource(torch.amp.GradScaler._unscale_grads_)
