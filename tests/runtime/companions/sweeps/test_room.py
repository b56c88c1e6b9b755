"""The number of runs of a sweep that fit on a cluster or, in `TestSlots`, on one machine."""

from typing import Any

import pytest

from mlx_runtime import TrainConfig
from mlx_runtime.companions.sweeps.engine import room
from mlx_runtime.companions.sweeps.trial import gpus_of_worker
from mlx_runtime.errors import UsageError

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("settings", "total", "asked", "expected"),
    [
        ({"start_workers": 2}, (5, 0), (None, None), (2, 0)),
        ({"start_workers": 2, "cpus_per_worker": 2}, (9, 0), (None, None), (2, 0)),
        ({"start_workers": 0}, (3, 0), (None, None), (3, 0)),
        ({"start_workers": 1}, (5, 0), (2, None), (2, 0)),
        ({"start_workers": 2}, (16, 5), (None, None), (2, 2)),
        ({"start_workers": 1}, (3, 4), (None, None), (3, 1)),
        ({"start_workers": 1}, (16, 2), (None, 0.3), (6, 0.3)),
        ({"start_workers": 1}, (16, 2), (None, 0), (16, 0)),
    ],
)
def test_runs_that_fit(settings: dict[str, Any], total: Any, asked: tuple[Any, Any], expected: object) -> None:
    assert room(TrainConfig(**settings), *total, *asked, cluster=True) == expected


@pytest.mark.parametrize(
    ("settings", "asked", "message"),
    [
        (
            {"start_workers": 1},
            (5, None),
            "cannot run 5 trials at a time: each needs 1 of 4 CPUs and 1 of 2 GPUs, so at most 2 fit",
        ),
        (
            {"start_workers": 5},
            (None, 0),
            "cannot run 1 trials at a time: each needs 5 of 4 CPUs, so at most 0 fit",
        ),
        (
            {"start_workers": 2},
            (None, 0.5),
            "--gpus-per-trial is 0.5 for 2 workers; each has cfg.gpus_per_worker=1, a single one also a share",
        ),
        (
            {"start_workers": 1},
            (None, 2),
            "--gpus-per-trial is 2 for 1 workers; each has cfg.gpus_per_worker=1, a single one also a share",
        ),
        (
            {"start_workers": 1, "gpus_per_worker": 2},
            (None, 3),
            "--gpus-per-trial is 3 for 1 workers; each has cfg.gpus_per_worker=2, a single one also a share",
        ),
        (
            {"start_workers": 1, "gpus_per_worker": 2},
            (2, None),
            "cannot run 2 trials at a time: each needs 1 of 4 CPUs and 2 of 2 GPUs, so at most 1 fit",
        ),
        ({"start_workers": 1, "use_gpu": True}, (None, 0), "--gpus-per-trial 0 contradicts cfg.use_gpu=true"),
    ],
)
def test_more_runs_than_fit_are_refused(settings: dict[str, Any], asked: tuple[Any, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        room(TrainConfig(**settings), 4, 2, *asked, cluster=True)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("gpus", "workers", "each"), [(0.0, 2, 0.0), (0.5, 1, 0.5), (2.0, 2, 1.0), (3.0, 2, 1.0), (4.0, 2, 2.0)]
)
def test_the_workers_of_a_trial_have_whole_gpus_or_a_share(gpus: float, workers: int, each: float) -> None:
    assert gpus_of_worker(gpus, workers) == each
