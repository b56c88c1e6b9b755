"""Blocks of a model, and what each of them needs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

from mlx_runtime.companions.fragments.scripted import opened
from mlx_runtime.companions.fragments.tracing import trace
from mlx_runtime.errors import ConfigError

pytestmark = pytest.mark.pure

ROWS, FLOAT = 5, 4


class Net(nn.Module):
    """Two linear layers, defined in another order than they run."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(16, 3)
        self.first = nn.Linear(8, 16)
        self.scale = nn.Parameter(torch.ones(16))
        self.unused = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(self.first(x).relu() * self.scale)
        return result


def test_blocks_are_in_order_of_execution_with_exact_sizes() -> None:
    net, x = Net(), torch.rand(ROWS, 8)
    first, second = trace(net, (x,), optimizers=[Adam(net.parameters())]).blocks
    assert (first.name, second.name) == ("first", "second")
    others = 16 + 2 * 2 + 2  # `scale`, which the first block uses, and `unused`
    assert (first.parameters, second.parameters) == (8 * 16 + 16 + others, 16 * 3 + 3)
    assert first.weights == first.gradients == FLOAT * first.parameters
    assert first.states == FLOAT * (2 * first.parameters + 5)  # two moments, and the step of each of five tensors
    assert first.activations == FLOAT * ROWS * (8 + 16)  # x, and the output of relu
    assert first.sends == first.returns == FLOAT * ROWS * 16
    assert second.activations == FLOAT * ROWS * (16 + 3)  # with the outputs, which the loss needs
    assert (second.sends, second.returns) == (FLOAT * ROWS * 3, 0)
    assert (first.crossing, second.crossing) == (first.sends, 0)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(20, 4), nn.LayerNorm(4)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True) for _ in range(2))
        self.head, self.last = nn.Linear(4, 20, bias=False), nn.Linear(20, 2)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        result: torch.Tensor = self.last(self.head(self.norm(x)))
        return result


def test_blocks_that_share_weights_are_one_with_those_between() -> None:
    net, rows = Tied(), torch.randint(0, 20, (ROWS, 6))
    found = trace(net, (rows,))
    assert [block.name for block in found.blocks] == ["embed", "last"]
    assert found.notes == ["embed and head share embed.weight, so all from one to the other are one block"]
    assert sum(block.parameters for block in found.blocks) == sum(item.numel() for item in net.parameters())


def test_the_model_stays_as_it_is() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 4)).eval()
    net[0].weight.grad = torch.ones(4, 4)
    before = {name: item.clone() for name, item in net.state_dict().items()}
    torch.manual_seed(1)
    drawn = torch.rand(3)
    torch.manual_seed(1)
    trace(net, (torch.ones(ROWS, 4),))
    assert torch.equal(torch.rand(3), drawn)
    assert not any(module.training for module in net.modules())
    assert torch.equal(net[0].weight.grad, torch.ones(4, 4))
    assert net[3].weight.grad is None
    assert all(torch.equal(item, before[name]) for name, item in net.state_dict().items())
    assert not net[0]._forward_pre_hooks
    assert not net[0]._forward_hooks


class Selecting(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        result: torch.Tensor = self.second(x[x[:, 0] > 0])
        return result


class Branching(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        result: torch.Tensor = self.second(-x if x.sum() > 0 else x)
        return result


def test_shapes_that_depend_on_values_are_refused_with_their_line() -> None:
    with pytest.raises(ConfigError, match=r"test_tracing.py:\d+: aten.nonzero.default returns a shape that"):
        trace(Selecting(), (torch.rand(ROWS, 8),))


def test_branches_that_depend_on_values_are_measured_with_real_tensors() -> None:
    found = trace(Branching(), (torch.rand(ROWS, 8),))
    assert [block.name for block in found.blocks] == ["first", "second"]
    assert found.blocks[0].sends == FLOAT * ROWS * 16
    assert "test_tracing.py:" in found.notes[0]


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.head = nn.Linear(4 * 6 * 6, 2)

    def forward(self, x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        for layer in self.layers:
            x = layer(x) + x * scale
        result: torch.Tensor = self.head(x.flatten(1))
        return result


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("convert", [torch.jit.script, lambda model: torch.jit.trace(model, torch.rand(2, 1, 8, 8))])
def test_a_loaded_script_is_cut_between_its_submodules(convert: Any, tmp_path: Path) -> None:
    net, x = Plain(), torch.rand(ROWS, 1, 8, 8)
    convert(net).save(tmp_path / "model.pt")
    loaded = torch.jit.load(tmp_path / "model.pt")
    found = trace(loaded, (x,), optimizers=[Adam(loaded.parameters())])
    assert [block.name for block in found.blocks] == ["stem", "norm", "layers.0", "layers.1", "head"]
    expected = trace(net, (x,), optimizers=[Adam(net.parameters())]).blocks
    sizes = [(item.parameters, item.weights, item.gradients, item.states) for item in found.blocks]
    assert sizes == [(item.parameters, item.weights, item.gradients, item.states) for item in expected]
    sends = [item.sends for item in found.blocks]
    assert sends == pytest.approx([item.sends for item in expected], abs=8)  # with a number that was traced
    again = opened(loaded)
    assert torch.equal(again(x), loaded(x))
    assert [*again.state_dict()] == [*loaded.state_dict()] == [*net.state_dict()]
    SGD(again.parameters(), 0.1).step(lambda: again(x).sum().backward())
    assert torch.equal(again.eval()(x), loaded.eval()(x)), "they have the same weights"


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_script_with_branches_is_one_block() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if bool(x.sum() > 0):
                x = self.a(x)
            result: torch.Tensor = self.b(x)
            return result

    found = trace(torch.jit.script(Branches()), (torch.rand(ROWS, 4),))
    assert [block.name for block in found.blocks] == [""]
    assert found.blocks[0].parameters == 40
    assert found.notes[0] == "the model is a ScriptModule with branches, so it is one block"
