"""The display of a run on a terminal and in a pipe, and its estimate of the remaining time."""

import io
import re
from pathlib import Path
from typing import Any, cast

import pytest

from mlx_runtime.driver.console_lines import ConsoleLines
from mlx_runtime.driver.planning import RunPlan
from mlx_runtime.driver.request import RunConfig
from mlx_runtime.events import (
    EpochEnded,
    LoaderOpened,
    Notice,
    PreparationProgress,
    RunInfo,
    RunStarted,
    StepProgress,
    WorkersStarted,
    WorkersWaiting,
)
from mlx_runtime.loop.experiment import BaseModule
from mlx_runtime.loop.job import Cluster
from mlx_runtime.loop.options import TrainConfig
from mlx_runtime.sections import Elastic
from mlx_runtime.tracking import console
from mlx_runtime.tracking.console import SECONDS_PER_LINE, Display, TimeLeft

pytestmark = pytest.mark.pure


def step(number: int, epoch: int = 0, stage: str = "train", rate: float = 10.0) -> StepProgress:
    return StepProgress(stage, epoch, number, 100, rate, {f"{stage}/loss": 0.5})


def ended(epoch: int, seconds: float) -> EpochEnded:
    return EpochEnded(epoch, 5, {"train/loss": 0.25}, seconds)


class Clock:
    """A fake of the module `time` that the test controls."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


CLOCK = Clock()


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "time", CLOCK)


def draw(display: Display) -> None:
    """Display the beginning and one epoch of a run, as its driver does."""
    display.print("workers   2")
    display.print("folder    /runs/run_001", always=True)
    for number in (1, 20, 60):
        display.handle(step(number))
        CLOCK.now += SECONDS_PER_LINE / 2 + 0.1
    display.handle(Notice("a notice"))
    display.handle(PreparationProgress("train", 5, 10))
    display.handle(ended(0, 12.0))
    display.close()


class TestTimeLeft:
    def test_later_ones_are_told_by_the_latest_that_ended(self) -> None:
        left = TimeLeft(20)
        left.epoch(ended(0, 1000.0))
        left.epoch(ended(9, 60.0))
        assert left.text(step(20, epoch=10)) == "8 s left, 10 min in all"
        assert left.text(step(20, epoch=19)) == "8 s left, 1 min in all"  # evaluation follows the pass
        assert left.text(step(20, epoch=19, rate=1.0)) == "1 min 20 s left"


class TestPipe:
    def test_lines(self) -> None:
        stream = io.StringIO()
        draw(Display(stream, epochs=5))
        first, folder, train, *rest = stream.getvalue().splitlines()
        assert (first, folder) == ("workers   2", "folder    /runs/run_001")
        assert re.fullmatch(r"train \| 60/100 \| 10\.0 it/s \| 4 s left, \d\d s in all \| loss 0\.5000", train)
        assert rest == ["a notice", "      train", "epoch     loss   time", "  1/5   0.2500   12 s"]


@pytest.mark.parametrize(
    ("gpus", "use_gpu", "asked", "warned"),
    [
        (1, False, None, True),
        (4, True, None, False),
        (1, False, False, False),
    ],
)
def test_training_on_cpus_beside_gpus_cannot_be_overlooked(
    tmp_path: Path, gpus: int, use_gpu: bool, asked: bool | None, warned: bool
) -> None:
    cfg = TrainConfig(start_workers=4, use_gpu=asked)
    screen, copy = io.StringIO(), io.StringIO()
    cluster = Cluster("on 8 cores", 8, gpus, engine="local", use_gpu=use_gpu)
    plan = RunPlan(BaseModule, RunConfig({}, {}, cfg), cluster, cast(Any, None), tmp_path)
    lines = ConsoleLines(Display(screen, copy.write, quiet=True), plan)
    lines.handle(RunStarted(RunInfo("x", "run_001", tmp_path, str(tmp_path), {}, 1)))
    for text in (screen.getvalue(), copy.getvalue()):
        assert text.count("warning   training on CPUs, with ") == warned
    if warned:
        assert (
            f"{gpus} GPU{'s' * (gpus > 1)} for 4 workers. cfg.start_workers={gpus} trains on GPUs" in screen.getvalue()
        )


def test_an_elastic_run_counts_the_workers_that_have_started(tmp_path: Path) -> None:
    cfg = TrainConfig(start_workers=4, elastic=Elastic(min_workers=1))
    screen = io.StringIO()
    cluster = Cluster("in Ray cluster with 4 CPUs", 4, 0, engine="ray")
    plan = RunPlan(BaseModule, RunConfig({}, {}, cfg), cluster, cast(Any, None), tmp_path)
    lines = ConsoleLines(Display(screen), plan)
    lines.handle(RunStarted(RunInfo("x", "run_001", tmp_path, str(tmp_path), {}, 1)))
    lines.handle(WorkersWaiting("1 CPUs, 0 free"))
    lines.handle(WorkersStarted("cpu", 10, 3))
    lines.handle(WorkersStarted("cpu", 10, 4))
    lines.handle(LoaderOpened("train", True, 40, 10, 16, 3))
    assert screen.getvalue().splitlines()[2:] == [
        "workers   1 to 4 DDP workers in Ray cluster with 4 CPUs",
        "waiting   for 1 CPUs, 0 free",
        "workers   3 started",
        "device    cpu, fp32, 1 thread per worker, 10 parameters",
        "workers   3 → 4: restarted",
        "train     40 rows in 10 steps, 3 updates, global batch 16",
    ]
