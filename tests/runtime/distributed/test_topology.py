"""The position of a worker in the group."""

import pytest
import torch
from torch import nn

import mlx_runtime
from mlx_runtime.distributed.topology import Topology, device_here
from mlx_runtime.errors import MlxError

pytestmark = pytest.mark.pure

CPU = torch.device("cpu")


def test_a_model_that_is_not_trained_is_only_moved() -> None:
    """As for a momentum encoder, which has no gradients to synchronize."""
    model = nn.Linear(2, 1).requires_grad_(False)
    with Topology(1, 2, torch.device("meta")).entered():
        assert mlx_runtime.prepare_model(model) is model
        assert model.weight.device == torch.device("meta")
    with pytest.raises(MlxError, match=r"prepare_model\(\) works on workers: in worker_loop, eval_loop, or a function"):
        mlx_runtime.prepare_model(model)
    assert mlx_runtime.get_device() == device_here()
