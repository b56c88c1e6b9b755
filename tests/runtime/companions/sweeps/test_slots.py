"""Trials that run at a time, on a machine with 8 cores and some GPUs."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mlx_runtime.companions.sweeps import trial
from mlx_runtime.companions.sweeps.engine import slots
from mlx_runtime.companions.sweeps.space import WHOLE
from mlx_runtime.errors import ConfigError, UsageError
from mlx_runtime.loop.options import TrainConfig

pytestmark = pytest.mark.pure


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(8))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(
    ("workers", "gpus_per_trial", "devices"),
    [
        (1, None, ["0", "1", "2", "3"]),
        (1, 0.5, ["0", "1", "2", "3"] * 2),
        (8, None, [""]),  # more workers than GPUs train on cores, as in a run
    ],
)
def test_each_trial_has_its_gpus(workers: int, gpus_per_trial: float | None, devices: list[str]) -> None:
    room = slots(TrainConfig(start_workers=workers), None, gpus_per_trial)
    assert [item["CUDA_VISIBLE_DEVICES"] for item in room.environments] == devices
    assert bool(room.gpus) == bool(devices[0])


def test_a_job_that_may_use_some_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many trials as fit on these by default, but as many as the user asks for."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(3))
    settings = {"use_gpu": False}
    assert len(slots(TrainConfig(start_workers=1, **settings)).environments) == 3
    assert len(slots(TrainConfig(start_workers=4, **settings)).environments) == 1
    assert len(slots(TrainConfig(start_workers=1, **settings), 5).environments) == 5


@pytest.mark.parametrize(
    ("cfg", "asked", "message"),
    [
        ({"start_workers": 1}, (5, None), "cannot run 5 trials at a time: each needs 1 of 4 GPUs, .* 4 fit"),
        ({"start_workers": 1, "use_gpu": False}, (None, 1.0), "--gpus-per-trial 1 contradicts cfg.use_gpu=false"),
    ],
)
def test_what_does_not_fit_is_refused(cfg: dict[str, Any], asked: tuple[Any, Any], message: str) -> None:
    with pytest.raises((ConfigError, UsageError), match=message) as error:
        slots(TrainConfig(**cfg), *asked)
    assert "\n" not in str(error.value)


def test_a_trial_that_lacks_its_gpu_does_not_train_on_cores() -> None:
    job = trial.TrialJob("sweep_001", 1, 0, WHOLE, {}, "runs/digits/run_001", (), gpus=1)
    config: Any = SimpleNamespace(cfg=TrainConfig(start_workers=1))
    cluster: Any = SimpleNamespace(use_gpu=False, gpus=0)
    with pytest.raises(ConfigError, match="trial 1 should train on 1 GPUs, but its process finds 0 for 1 workers"):
        trial.refuse_fallback(job, config, cluster)
