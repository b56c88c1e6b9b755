"""Strategies that have no effect say so."""

import pytest
from sessions import ALONE

from mlx_runtime import TrainConfig
from mlx_runtime.loop.strategies import DDP, strategy_of
from mlx_runtime.sections import Fragments

pytestmark = pytest.mark.pure


def test_without_workers_models_are_not_sharded() -> None:
    strategy = strategy_of(TrainConfig(strategy="fsdp"), ALONE, {"_target_": "builtins.dict"})
    assert isinstance(strategy, DDP)
    assert strategy.notice == "without workers, models are whole: fsdp has no effect"
    cfg = TrainConfig(fragments=Fragments(microbatches=2))
    assert strategy_of(cfg, ALONE, None).notice == "cfg.fragments has no effect without cfg.strategy=pipeline"
