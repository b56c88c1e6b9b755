"""The position of a worker in the group."""

import pytest
import torch
from torch import nn

import mlx_runtime
from mlx_runtime.distributed.topology import Topology, device_here
from mlx_runtime.errors import MlxError

pytestmark = pytest.mark.pure

CPU = torch.device("cpu")


def test_each_worker_is_a_replica() -> None:
    workers = [Topology(rank, 3, CPU) for rank in range(3)]
    assert [(item.data_parallel_rank, item.data_parallel_size) for item in workers] == [(0, 3), (1, 3), (2, 3)]
    assert [item.writes for item in workers] == [True, False, False]


def test_consecutive_ranks_hold_a_replica_together() -> None:
    workers = [Topology(rank, 4, CPU, model_parallel_size=2) for rank in range(4)]
    assert [(item.data_parallel_rank, item.data_parallel_size) for item in workers] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert [item.writes for item in workers] == [True, False, False, False]


def test_a_model_that_is_not_trained_is_only_moved() -> None:
    """As for a momentum encoder, which has no gradients to synchronize."""
    model = nn.Linear(2, 1).requires_grad_(False)
    with Topology(1, 2, torch.device("meta")).entered():
        assert mlx_runtime.prepare_model(model) is model
        assert model.weight.device == torch.device("meta")
    with pytest.raises(MlxError, match=r"prepare_model\(\) works on workers: in worker_loop, eval_loop, or a function"):
        mlx_runtime.prepare_model(model)
    assert mlx_runtime.get_device() == device_here()
