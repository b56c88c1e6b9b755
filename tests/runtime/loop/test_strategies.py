"""Strategies prepare models before optimizers are built over their parameters."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from sessions import ALONE
from torch import nn

from mlx_runtime import TrainConfig
from mlx_runtime.distributed.topology import Topology
from mlx_runtime.loop.assembly import build_experiment, dataset_shards
from mlx_runtime.loop.options import strategy_class
from mlx_runtime.loop.strategies import DDP, strategy_of
from mlx_runtime.sections import Elastic, Fragments

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

    def build(self, node: Mapping[str, Any]) -> Any:
        group = super().build(node)
        for name, param in list(group.net.named_parameters()):
            setattr(group.net, name, nn.Parameter(param.detach().clone()))
        return group


TREE = {
    "cfg": {"_target_": "mlx_runtime.TrainConfig"},
    "models": {
        "_target_": f"{__name__}.Models",
        "net": {"_target_": "torch.nn.Linear", "in_features": 3, "out_features": 2},
    },
    "optimizers": {"_target_": f"{__name__}.Optimizers", "sgd": {"_target_": "torch.optim.SGD", "lr": 0.1}},
}


@pytest.mark.parametrize("strategy", [DDP(CFG, ALONE), Replacing(CFG, ALONE)], ids=lambda item: type(item).__name__)
def test_optimizers_hold_the_parameters_of_prepared_models(strategy: DDP, tmp_path: Path) -> None:
    job = SimpleNamespace(experiment=f"{__name__}.Experiment", tree=TREE)
    _, experiment = build_experiment(cast(Any, job), ALONE, CFG, strategy)
    held = [param for group in experiment.optimizers.sgd.param_groups for param in group["params"]]
    assert [id(param) for param in held] == [id(param) for param in experiment.models.net.parameters()]


def test_without_workers_models_are_not_sharded() -> None:
    strategy = strategy_of(TrainConfig(strategy="fsdp"), ALONE, TREE["models"])
    assert isinstance(strategy, DDP)
    assert strategy.notice == "without workers, models are whole: fsdp has no effect"
    cfg = TrainConfig(fragments=Fragments(microbatches=2))
    assert strategy_of(cfg, ALONE, None).notice == "cfg.fragments has no effect without cfg.strategy=pipeline"


@pytest.mark.parametrize(("stages", "pipelines"), [(None, 1), (2, 2)])
def test_the_global_batch_counts_the_pipelines_of_all_workers(stages: int | None, pipelines: int) -> None:
    """Without `cfg.fragments.stages`, two of four workers form one pipeline, as all four did."""
    cut, elastic = Fragments(stages=stages), Elastic(min_workers=2, keep_global_batch=True)
    cfg = TrainConfig(strategy="pipeline", start_workers=4, elastic=elastic, fragments=cut)
    kind = strategy_class("pipeline")
    left = Topology(0, 2, torch.device("cpu"), model_parallel_size=kind.model_parallel_size(cfg, 2))  # type: ignore[call-arg, arg-type]
    strategy: Any = SimpleNamespace(topology=left, model_parallel_size=kind.model_parallel_size)
    job: Any = SimpleNamespace(
        tree={"datasets": {"train": {"_target_": "builtins.dict"}}},
        project=None,
        prepared={},
        subsets={},
        cluster=SimpleNamespace(in_driver=False),
    )
    shards = dataset_shards(cfg, SimpleNamespace(train={}), job, strategy, lambda loader: loader)
    assert shards.train.options.wanted_workers == pipelines


def test_sharding_is_imported_only_by_runs_that_shard() -> None:
    script = "import mlx_runtime.workers.worker, sys; print([name for name in sys.modules if 'fsdp' in name])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
