"""Gradients that are not finite."""

import math

import pytest
import torch
from torch import nn

from mlx_runtime.errors import MlxError
from mlx_runtime.loop.gradients import check_finite

pytestmark = pytest.mark.pure


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_ends_the_run_at_once(value: float) -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    check_finite({"net": net}, net.parameters(), 0)  # an optimizer may step without any gradients
    net(torch.ones(4, 2)).sum().backward()
    check_finite({"net": net}, net.parameters(), 1)
    net[0].bias.grad[0] = value
    net[2].bias.grad[0] = value
    message = r"^the gradient of net.0.bias \(and 1 more\) is not finite at step 2 \(cfg.debug.stop_on_nan\)"
    with pytest.raises(MlxError, match=message):
        check_finite({"net": net}, net.parameters(), 2)
