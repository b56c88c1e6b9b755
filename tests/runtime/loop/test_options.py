"""Settings of `cfg` that contradict each other."""

from collections import OrderedDict
from typing import Any

import pytest

from mlx_runtime.loop.options import TrainConfig
from mlx_runtime.sections import Elastic, Sharding

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"strategy": "fsdp", "sharding": Sharding(0)}, "cfg.sharding.shard_size is 0; the minimum is 1"),
        (
            {"strategy": "fsdp", "sharding": Sharding(4), "start_workers": 6},
            "cfg.start_workers=6 is not a multiple of 4, as cfg.strategy=fsdp needs",
        ),
        (
            {"strategy": "fsdp", "sharding": Sharding(2), "start_workers": 4, "elastic": Elastic(3)},
            "cfg.elastic.min_workers=3 is not a multiple of 2, as cfg.strategy=fsdp needs",
        ),
        (
            {"sharding": Sharding(offload="cpu")},
            "cfg.strategy=ddp cannot train this: cfg.sharding.shard_size and cfg.sharding.offload are for "
            "cfg.strategy=fsdp; remove them",
        ),
        (
            {"strategy": "fdsp"},
            "cfg.strategy is 'fdsp'; write ddp, fsdp, pipeline, jax, or an import path. Did you mean 'fsdp'?",
        ),
    ],
)
def test_what_a_strategy_cannot_do_is_refused(settings: dict[str, Any], problem: str) -> None:
    assert TrainConfig.out_of_range(TrainConfig(**settings)) == [problem]


METHODS = "on_run_start, on_report, on_epoch_end, on_checkpoint, on_exception, on_run_end"
IN_DRIVER = f"{METHODS}, on_batch_start, on_batch_end, on_update, on_evaluate_start, on_evaluate_end, accompany"


@pytest.mark.parametrize(
    ("kind", "item", "problem"),
    [
        ("callbacks", {"_traget_": "src.tools.Beat"}, "is {'_traget_': 'src.tools.Beat'}, which has no _target_"),
        ("callbacks", OrderedDict(), f"is OrderedDict(), which has none of the methods {IN_DRIVER}"),
        ("trackers", 3, f"is 3, which has none of the methods {METHODS}, on_rewind"),
    ],
)
def test_what_follows_no_run_is_refused(kind: str, item: object, problem: str) -> None:
    (found,) = TrainConfig.out_of_range(TrainConfig(**{kind: {"x": item}}))
    assert found == f"cfg.{kind}.x {problem}"
    assert TrainConfig.out_of_range(TrainConfig(**{kind: {"x": None}})) == []


def test_a_start_behind_the_last_epoch_is_refused() -> None:
    (problem,) = TrainConfig.out_of_range(TrainConfig(start_epoch=5, num_epochs=5))
    assert problem == "cfg.start_epoch is 5, so cfg.num_epochs=5 leaves nothing to train; raise it"
    assert TrainConfig.out_of_range(TrainConfig(start_epoch=5, num_epochs=6)) == []
