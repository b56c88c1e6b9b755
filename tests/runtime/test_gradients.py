"""Norms of gradients by layer, and one that is not finite."""

import math
import sys

import pytest
import torch
from torch import nn

from mlx_runtime.errors import MlxError
from mlx_runtime.gradients import Gradients

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
    watch = Gradients(every=3, report=seen.append)
    for step in range(1, 7):
        watch.look({"net": net, "other": other}, net.parameters(), step)
    assert len(seen) == 2
    assert list(seen[0]) == ["gradient_norm/net.0", "gradient_norm/net.2", "weight_norm/net.0", "weight_norm/net.2"]
    first = net[0]
    assert seen[0]["gradient_norm/net.0"] == pytest.approx(norm(first.weight.grad, first.bias.grad))
    assert seen[0]["weight_norm/net.0"] == pytest.approx(norm(first.weight, first.bias))


def test_a_picture_of_what_was_seen_since_the_last() -> None:
    net = model()
    watch = Gradients(every=1, report=lambda values: None)
    assert watch.picture() is None
    watch.look({"net": net}, net.parameters(), 1)
    figure = watch.picture()
    assert figure is not None
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["net.0", "net.2"]
    assert watch.picture() is None


def test_without_matplotlib_one_line_says_how_to_get_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    told: list[str] = []
    net = model()
    watch = Gradients(every=1, report=lambda values: None, tell=told.append)
    for step in (1, 2):
        watch.look({"net": net}, net.parameters(), step)
        assert watch.picture() is None
    assert len(told) == 1
    assert told[0].endswith("pip install matplotlib")


def test_what_is_not_finite_is_told_once_by_layer_and_step() -> None:
    told: list[str] = []
    net = model()
    net[2].weight.grad[0, 1] = math.nan
    watch = Gradients(every=2, report=lambda values: None, tell=told.append)
    for step in range(1, 5):
        watch.look({"net": net}, net.parameters(), step)
    assert told == ["the gradient of net.2 is not finite at step 2"]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_ends_the_run_at_once(value: float) -> None:
    net = model()
    watch = Gradients(stop_on_nan=True)
    watch.look({"net": net}, net.parameters(), 1)
    net[0].bias.grad[0] = value
    net[2].bias.grad[0] = value
    message = r"the gradient of net.0 \(and 1 more layers\) is not finite at step 2 \(cfg.stop_on_nan\)"
    with pytest.raises(MlxError, match=message):
        watch.look({"net": net}, net.parameters(), 2)
