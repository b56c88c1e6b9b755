"""The private API of torch that torch_private.py uses. A version of torch that changes it fails here, not in a run."""

import inspect
import os
import re
from typing import Any

import pytest
import torch
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from mlx_runtime.distributed import torch_private

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
    assert list(inspect.signature(torch.amp.GradScaler._found_inf_per_device).parameters) == ["self", "optimizer"]
    assert "optimizer.param_groups" in inspect.getsource(torch.amp.GradScaler._unscale_grads_)


@pytest.mark.process
def test_a_process_reports_that_forks_of_it_cannot_use_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch_private.cuda_survives_fork()
    here = os.getpid()
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: os.getpid() != here)
    assert not torch_private.cuda_survives_fork()


def test_every_group_is_created_by_this_name() -> None:
    """`keep_groups_private` replaces it; the rank and the size are those within the group."""
    creator: Any = getattr(distributed_c10d, "_create_gloo_process_group", None)  # since torch 2.14
    created = inspect.getsource(creator or distributed_c10d._new_process_group_helper)
    created = "".join(re.sub("#.*|opts\\.|backend_prefix_(?=store)", "", created).split())
    reconfigure = "enable_reconfigure=enable_reconfigure," if creator else ""
    assert f"backend_class=ProcessGroupGloo(store,group_rank,group_size,timeout=timeout,{reconfigure})" in created
    assert "enable_reconfigure" not in inspect.signature(distributed_c10d.new_group).parameters
    for name in ("init_process_group", "_new_group_with_tag"):
        assert "_new_process_group_helper(" in inspect.getsource(getattr(distributed_c10d, name))


def test_where_a_process_of_a_data_loader_looks_for_its_number() -> None:
    assert "return _worker_info" in inspect.getsource(torch.utils.data.get_worker_info)
    assert torch.utils.data.get_worker_info.__module__ == "torch.utils.data._utils.worker"
