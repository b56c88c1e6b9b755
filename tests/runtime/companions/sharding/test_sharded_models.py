"""Models with unusual structures are sharded, or rejected with one line, as a group of one worker suffices to show."""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sessions import ALONE
from torch import nn

from mlx_runtime import TrainConfig
from mlx_runtime.distributed.wrapping import whole
from mlx_runtime.errors import WorkerLoopError
from mlx_runtime.loop.strategies import strategy_of
from mlx_runtime.workers.worker import loop_errors

pytestmark = pytest.mark.pure


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Views(nn.Module):
    """Returns views of what its layers have computed, and so do its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Unflatten(1, (2, 2))) for _ in range(2))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        for layer in self.layers:
            x = layer(x)
            x += 1
            x = x.flatten(1)
        return {"first": x[:, 0], "all": [x]}


@dataclass
class Models:
    net: nn.Module


def built(kind: type[nn.Module], strategy: str, **settings: Any) -> tuple[Any, tuple[str, ...]]:
    """Return a model, and the lines about it."""
    torch.manual_seed(0)
    node = {"_target_": f"{__name__}.Models", "net": {"_target_": f"{__name__}.{kind.__name__}"}}
    made = strategy_of(TrainConfig(strategy=strategy, **settings), ALONE, node)
    return made.build(node).net, tuple(made.described)


def test_views_may_be_changed_in_place() -> None:
    gradients = []
    for strategy in ("ddp", "fsdp"):
        model, _ = built(Views, strategy)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # FSDP warns of views
            output = model(torch.ones(3, 4))
        output["first"] += output["all"][0].sum()
        output["first"].square().sum().backward()
        gradients.append([whole(item.grad) for item in model.parameters()])
    torch.testing.assert_close(*gradients)


def test_whole_weights_are_loaded() -> None:
    model, whole_model = built(Views, "fsdp")[0], Views()
    model(torch.ones(3, 4))  # after which its own parameters are gathered
    model.load_state_dict(whole_model.state_dict())
    for param, wanted in zip(model.parameters(), whole_model.parameters(), strict=True):
        assert torch.equal(whole(param), wanted)
    with pytest.raises(RuntimeError, match=r"size mismatch for layers\.0\.0\.bias: .*\[5\].*\[4\]"):
        model.load_state_dict(whole_model.state_dict() | {"layers.0.0.bias": torch.ones(5)})


def test_operations_that_mix_sharded_and_whole_tensors_are_explained(tmp_path: Path) -> None:
    model, _ = built(Views, "fsdp")
    with (
        pytest.raises(WorkerLoopError, match=r"\(sharded and whole tensors do not mix; call "),
        loop_errors(0, tmp_path),
    ):
        torch.add(torch.ones(4), next(model.parameters()))
