"""The blocks of models: those that repeat, and those that a plan selects."""

from typing import Any

import pytest
from torch import nn

from mlx_runtime.companions.sharding.blocks import planned_blocks, repeated_blocks
from mlx_runtime.errors import ConfigError

pytestmark = pytest.mark.pure


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


class Deep(nn.Module):
    """Its head is tied to its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.layers = nn.ModuleList([Layer(), Layer(), nn.Dropout(), nn.Dropout()])
        self.stages = nn.ModuleList([nn.ModuleList([Layer(), Layer()]), nn.ModuleList([Layer()])])
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.embed.weight


class TestBlocks:
    def test_by_default_they_are_what_repeats(self) -> None:
        """Neither what is inside them, nor what has no parameters, nor containers that are never called."""
        single = ["stages.1.0.mlp.0", "stages.1.0.mlp.2"]
        assert repeated_blocks(Deep()) == ["layers.0", "layers.1", "stages.0.0", "stages.0.1", *single]
        assert repeated_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.ReLU())) == ["0", "2"]
        assert repeated_blocks(nn.Linear(2, 2)) == []

    def test_a_plan_selects_by_patterns(self) -> None:
        assert planned_blocks(Deep(), ["head", "layers.[01]", "layers.0"], "plan") == ["head", "layers.0", "layers.1"]

    @pytest.mark.parametrize(
        ("plan", "message"),
        [
            (["layer.*"], "plan: 'layer.*' matches no module; print(model) shows their paths, like 'layers.*'"),
            (["layers"], "plan: layers is a ModuleList, which is never called; write 'layers.*'"),
        ],
    )
    def test_plans_that_do_not_fit(self, plan: Any, message: str) -> None:
        with pytest.raises(ConfigError) as error:
            planned_blocks(Deep(), plan, "plan")
        assert str(error.value).startswith(message)
