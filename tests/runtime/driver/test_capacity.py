"""The check that the workers of a run fit on a machine or a cluster."""

from dataclasses import replace

import pytest

from mlx_runtime.loop.options import TrainConfig
from mlx_runtime.sections import Elastic
from mlx_runtime.workers.placement import shortage, uses_gpus
from mlx_runtime.workers.worker import InProcess

pytestmark = pytest.mark.pure


def test_workers_of_one_machine_may_outnumber_its_cores_within_reason() -> None:
    assert shortage(TrainConfig(start_workers=64), 2, 0, cluster=False) is None
    text = "cfg.start_workers=65, but this machine has room for 64 workers; lower it"
    assert shortage(TrainConfig(start_workers=65), 2, 0, cluster=False) == text
    cure = "lower cfg.start_workers or cfg.cpus_per_worker"
    text = f"cfg.start_workers=8 needs 8 CPUs; the cluster has room for 2; {cure}"
    assert shortage(TrainConfig(start_workers=8), 2, 0, cluster=True) == text


def test_without_workers_the_title_names_a_size_that_has_no_effect() -> None:
    for elastic, title in (
        (Elastic(), ""),
        (Elastic(5), "; cfg.elastic.min_workers=5 needs workers and has no effect"),
    ):
        with InProcess.connect(TrainConfig(start_workers=0, elastic=elastic), "") as cluster:
            assert cluster.title == f"0: training in this process{title}"


def test_an_elastic_group_needs_room_for_the_smallest() -> None:
    cfg = TrainConfig(start_workers=8, cpus_per_worker=2, elastic=Elastic(min_workers=3))
    assert shortage(cfg, 6, 0, cluster=True) is None
    assert str(shortage(cfg, 5, 0, cluster=True)).startswith("cfg.elastic.min_workers=3 needs 6 CPUs; the cluster has ")


@pytest.mark.parametrize(
    ("use_gpu", "gpus", "expected"), [(None, 1, False), (None, 2, True), (True, 2, True), (False, 2, False)]
)
def test_gpus_are_used_if_there_is_one_per_worker(use_gpu: bool | None, gpus: int, expected: bool) -> None:
    cfg = TrainConfig(start_workers=2, use_gpu=use_gpu)
    assert shortage(cfg, 4, gpus, cluster=False) is None
    assert uses_gpus(cfg, gpus) is expected


def test_gpus_that_are_required_and_missing() -> None:
    cfg = TrainConfig(start_workers=2, gpus_per_worker=2)
    assert [uses_gpus(cfg, gpus) for gpus in (0, 3, 4)] == [False, False, True]
    required = replace(cfg, use_gpu=True)
    assert shortage(required, 4, 4, cluster=True) is None
    cure = "lower cfg.start_workers, or leave cfg.use_gpu at null"
    text = f"cfg.start_workers=2 needs 4 GPUs; the cluster has room for 3; {cure}"
    assert shortage(required, 4, 3, cluster=True) == text
