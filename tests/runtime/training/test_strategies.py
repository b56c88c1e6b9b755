"""Strategies are applied before optimizers are built over the parameters of models."""

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from sessions import ALONE
from torch import nn

from mlx_runtime import TrainConfig
from mlx_runtime.training.assembly import build_experiment
from mlx_runtime.training.strategies import DDP, Strategy

pytestmark = pytest.mark.pure

CFG = TrainConfig()


class Models:
    map_params_to_optimizers = {"net": "sgd"}

    def __init__(self, net: nn.Module) -> None:
        self.net = net


class Optimizers:
    def __init__(self, sgd: torch.optim.SGD) -> None:
        self.sgd = sgd


class Experiment:
    def __init__(self, cfg: Any, models: Models, optimizers: Optimizers) -> None:
        self.models, self.optimizers = models, optimizers


class Replacing(DDP):
    """Replaces the parameters of a model, as sharding does."""

    def prepare(self, model: nn.Module) -> None:
        for name, param in list(model.named_parameters()):
            setattr(model, name, nn.Parameter(param.detach().clone()))


TREE = {
    "cfg": {"_target_": "mlx_runtime.TrainConfig"},
    "models": {
        "_target_": f"{__name__}.Models",
        "net": {"_target_": "torch.nn.Linear", "in_features": 3, "out_features": 2},
    },
    "optimizers": {"_target_": f"{__name__}.Optimizers", "sgd": {"_target_": "torch.optim.SGD", "lr": 0.1}},
}


@pytest.mark.parametrize("strategy", [DDP(CFG, ALONE), Replacing(CFG, ALONE)], ids=lambda item: type(item).__name__)
def test_optimizers_hold_the_parameters_of_prepared_models(strategy: Strategy, tmp_path: Path) -> None:
    job = SimpleNamespace(experiment=f"{__name__}.Experiment", tree=TREE)
    with contextlib.ExitStack() as stack:
        _, experiment = build_experiment(cast(Any, job), ALONE, CFG, strategy, stack)
    held = [param for group in experiment.optimizers.sgd.param_groups for param in group["params"]]
    assert [id(param) for param in held] == [id(param) for param in experiment.models.net.parameters()]


def test_preparing_under_ddp_draws_no_random_numbers() -> None:
    model = nn.Linear(3, 2)
    before = torch.get_rng_state()
    DDP(CFG, ALONE).prepare(model)
    assert torch.equal(torch.get_rng_state(), before)
