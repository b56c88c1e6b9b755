"""The private API of torch that torch_private.py uses. A version of torch that changes it fails here, not in a run."""

import inspect
import os

import pytest
import torch

from mlx_runtime.distributed import torch_private

pytestmark = pytest.mark.pure


def test_a_scaler_finds_infinite_gradients_by_this_name() -> None:
    assert list(inspect.signature(torch.amp.GradScaler._found_inf_per_device).parameters) == ["self", "optimizer"]


@pytest.mark.process
def test_a_process_reports_that_forks_of_it_cannot_use_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch_private.cuda_survives_fork()
    here = os.getpid()
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: os.getpid() != here)
    assert not torch_private.cuda_survives_fork()


def test_where_a_process_of_a_data_loader_looks_for_its_number() -> None:
    assert "return _worker_info" in inspect.getsource(torch.utils.data.get_worker_info)
    assert torch.utils.data.get_worker_info.__module__ == "torch.utils.data._utils.worker"
