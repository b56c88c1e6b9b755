"""How many runs of a sweep a cluster holds. `test_cluster.py` runs sweeps on one."""

from typing import Any

import pytest

from mlx_runtime import TrainConfig
from mlx_runtime.errors import UsageError
from mlx_runtime.sweeps.engines.tune import room
from mlx_runtime.training.engines.placement import Cluster

pytestmark = pytest.mark.pure


def cluster(cpus: float, gpus: float = 0) -> Cluster:
    return Cluster("here", False, "127.0.0.1", cpus, gpus, use_gpu=gpus > 0)


@pytest.mark.parametrize(
    ("settings", "there", "asked", "expected"),
    [
        ({"start_workers": 2}, cluster(5), (None, None), (2, 0)),
        ({"start_workers": 2, "cpus_per_worker": 2}, cluster(9), (None, None), (2, 0)),
        ({"start_workers": 0}, cluster(3), (None, None), (3, 0)),
        ({"start_workers": 1}, cluster(5), (2, None), (2, 0)),
        ({"start_workers": 2}, cluster(16, 5), (None, None), (2, 2)),
        ({"start_workers": 1}, cluster(3, 4), (None, None), (3, 1)),
        ({"start_workers": 1}, cluster(16, 2), (None, 0.3), (6, 0.3)),
        ({"start_workers": 1}, cluster(16, 2), (None, 0), (16, 0)),
    ],
)
def test_runs_that_fit(settings: dict[str, Any], there: Cluster, asked: tuple[Any, Any], expected: object) -> None:
    assert room(TrainConfig(**settings), there, *asked) == expected


@pytest.mark.parametrize(
    ("workers", "asked", "message"),
    [
        (1, (5, None), "cannot run 5 trials at a time: each needs 1 of 4 CPUs and 1 of 2 GPUs, so at most 2 fit"),
        (5, (None, 0), "cannot run 1 trials at a time: each needs 5 of 4 CPUs, so at most 0 fit"),
        (2, (None, 0.5), "--gpus-per-trial is 0.5 for 2 workers; each has one, a single one also a share"),
        (1, (None, 2), "--gpus-per-trial is 2 for 1 workers; each has one, a single one also a share"),
    ],
)
def test_more_runs_than_fit_are_refused(workers: int, asked: tuple[Any, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        room(TrainConfig(start_workers=workers), cluster(4, 2), *asked)
    assert str(error.value) == message
