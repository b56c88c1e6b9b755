"""The check that the workers of a run fit on a machine or a cluster."""

import pytest

from mlx_runtime.loop.options import TrainConfig
from mlx_runtime.workers.placement import shortage, uses_gpus

pytestmark = pytest.mark.pure


def test_workers_of_one_machine_may_outnumber_its_cores_within_reason() -> None:
    assert shortage(TrainConfig(start_workers=64), 2, 0, cluster=False) is None
    text = "cfg.start_workers=65, but this machine has room for 64 workers; lower it"
    assert shortage(TrainConfig(start_workers=65), 2, 0, cluster=False) == text
    cure = "lower cfg.start_workers or cfg.cpus_per_worker"
    text = f"cfg.start_workers=8 needs 8 CPUs; the cluster has room for 2; {cure}"
    assert shortage(TrainConfig(start_workers=8), 2, 0, cluster=True) == text
    text = "cfg.start_workers=20 needs 20 GPUs; this machine has room for 1; "
    assert (shortage(TrainConfig(start_workers=20, use_gpu=True), 2, 1, cluster=False) or "").startswith(text)


@pytest.mark.parametrize(
    ("use_gpu", "gpus", "expected"), [(None, 1, False), (None, 2, True), (True, 2, True), (False, 2, False)]
)
def test_gpus_are_used_if_there_is_one_per_worker(use_gpu: bool | None, gpus: int, expected: bool) -> None:
    cfg = TrainConfig(start_workers=2, use_gpu=use_gpu)
    assert shortage(cfg, 4, gpus, cluster=False) is None
    assert uses_gpus(cfg, gpus) is expected
