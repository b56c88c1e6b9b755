"""Settings of `cfg` that contradict each other."""

from typing import Any

import pytest

from mlx_runtime.training.options import TrainConfig

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"shard_size": 2}, "cfg.shard_size=2 is for cfg.strategy=hsdp, and cfg.strategy is ddp"),
        (
            {"strategy": "fsdp", "shard_size": 2},
            "cfg.shard_size=2 is for cfg.strategy=hsdp, and cfg.strategy is fsdp",
        ),
        (
            {"strategy": "hsdp"},
            "cfg.strategy=hsdp needs cfg.shard_size; set the number of workers that share one replica of the models, "
            "or use cfg.strategy=fsdp",
        ),
        ({"strategy": "hsdp", "shard_size": 0}, "cfg.shard_size is 0; the minimum is 1"),
        (
            {"strategy": "hsdp", "shard_size": 4, "start_workers": 6},
            "cfg.start_workers=6 is not a multiple of cfg.shard_size=4; use 4 or 8",
        ),
        (
            {"strategy": "hsdp", "shard_size": 4, "start_workers": 2},
            "cfg.start_workers=2 is not a multiple of cfg.shard_size=4; use 4",
        ),
        (
            {"strategy": "hsdp", "shard_size": 2, "start_workers": 4, "min_workers": 3},
            "cfg.min_workers=3 is not a multiple of cfg.shard_size=2; use 2 or 4",
        ),
        (
            {"strategy": "hsdp", "shard_size": 2, "start_workers": 4, "max_workers": 7},
            "cfg.max_workers=7 is not a multiple of cfg.shard_size=2; use 6 or 8",
        ),
        (
            {"offload": "cpu"},
            "cfg.offload=cpu is for sharded models, and cfg.strategy is ddp; use cfg.strategy=fsdp or hsdp",
        ),
    ],
)
def test_what_a_strategy_cannot_do_is_refused(settings: dict[str, Any], problem: str) -> None:
    assert TrainConfig.out_of_range(TrainConfig(**settings)) == [problem]


@pytest.mark.parametrize(
    "settings",
    [
        {"strategy": "fsdp", "offload": "cpu", "start_workers": 3},
        {"strategy": "hsdp", "shard_size": 2, "start_workers": 4, "min_workers": 2, "max_workers": 8},
        {"strategy": "hsdp", "shard_size": 2, "start_workers": 0},  # in the driver, for a debugger
        {"activation_checkpointing": "layers.*"},
    ],
)
def test_what_fits_is_accepted(settings: dict[str, Any]) -> None:
    assert TrainConfig.out_of_range(TrainConfig(**settings)) == []
