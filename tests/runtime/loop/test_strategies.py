"""Strategies prepare models before optimizers are built over their parameters."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sessions import ALONE

from mlx_runtime import TrainConfig
from mlx_runtime.distributed.topology import Topology
from mlx_runtime.loop.assembly import dataset_shards
from mlx_runtime.loop.options import strategy_class
from mlx_runtime.loop.strategies import DDP, strategy_of
from mlx_runtime.sections import Elastic, Fragments

pytestmark = pytest.mark.pure


def test_without_workers_models_are_not_sharded() -> None:
    strategy = strategy_of(TrainConfig(strategy="fsdp"), ALONE, {"_target_": "builtins.dict"})
    assert isinstance(strategy, DDP)
    assert strategy.notice == "without workers, models are whole: fsdp has no effect"
    cfg = TrainConfig(fragments=Fragments(microbatches=2))
    assert strategy_of(cfg, ALONE, None).notice == "cfg.fragments has no effect without cfg.strategy=pipeline"


def test_the_global_batch_counts_the_pipelines_of_all_workers() -> None:
    """Without `cfg.fragments.stages`, two of four workers form one pipeline, as all four did."""
    cut, elastic = Fragments(), Elastic(min_workers=2, keep_global_batch=True)
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
    assert shards.train.options.wanted_workers == 1
