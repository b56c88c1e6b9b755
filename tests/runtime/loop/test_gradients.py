"""Norms of gradients by layer, and gradients that are not finite."""

import math

import pytest
import torch
from torch import nn

from mlx_runtime.distributed.wrapping import total_norm
from mlx_runtime.errors import MlxError
from mlx_runtime.loop.gradients import GradientMonitor

pytestmark = pytest.mark.pure


def model() -> nn.Sequential:
    net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    net(torch.ones(4, 2)).sum().backward()
    return net


def norm(*tensors: torch.Tensor) -> float:
    return math.sqrt(sum(float(item.square().sum()) for item in tensors))


def test_norms_by_layer_every_so_many_steps() -> None:
    seen: list[dict[str, float]] = []
    net, other = model(), nn.Linear(1, 1)
    monitor = GradientMonitor(every=3, report=seen.append)
    for step in range(1, 7):
        monitor.inspect({"net": net, "other": other}, net.parameters(), step)
    assert len(seen) == 2
    assert list(seen[0]) == ["gradient_norm/net.0", "gradient_norm/net.2", "weight_norm/net.0", "weight_norm/net.2"]
    first = net[0]
    assert seen[0]["gradient_norm/net.0"] == pytest.approx(norm(first.weight.grad, first.bias.grad))
    assert seen[0]["weight_norm/net.0"] == pytest.approx(norm(first.weight, first.bias))


def test_the_norm_of_no_gradients() -> None:
    """An optimizer may step without any, and its gradients are clipped."""
    assert total_norm([]) == 0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_ends_the_run_at_once(value: float) -> None:
    net = model()
    monitor = GradientMonitor(stop_on_nan=True)
    monitor.inspect({"net": net}, net.parameters(), 1)
    net[0].bias.grad[0] = value
    net[2].bias.grad[0] = value
    message = r"the gradient of net.0 \(and 1 more layers\) is not finite at step 2 \(cfg.debug.stop_on_nan\)"
    with pytest.raises(MlxError, match=message):
        monitor.inspect({"net": net}, net.parameters(), 2)
