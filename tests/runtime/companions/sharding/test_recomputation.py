"""Recomputation of the `forward` of modules."""

import copy

import pytest
import torch
from torch import nn

from mlx_runtime.companions.sharding.blocks import recompute
from mlx_runtime.loop.forward import compile_forward

pytestmark = pytest.mark.pure


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_recomputation_changes_no_number(backend: str | None) -> None:
    """Neither gradients nor running statistics, which a second pass would update again."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.BatchNorm1d(4), nn.Linear(4, 2))
    plain[3].eval()
    again, batch = copy.deepcopy(plain), torch.randn(5, 3)
    recompute(again)
    if backend is not None:
        compile_forward(again, backend)
    for model in (plain, again):
        torch.manual_seed(1)
        model(batch).square().sum().backward()
    torch.testing.assert_close(again.state_dict(), plain.state_dict(), rtol=0, atol=0)
    for one, other in zip(again.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=0)
    assert again[1].momentum == 0.1
