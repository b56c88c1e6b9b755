"""The display of a sweep: a table on a terminal, lines in a pipe."""

import io
import math
from pathlib import Path
from typing import Any

import pytest
from fakes import plan_of
from rich.console import Console
from stored_sweeps import store_run, store_sweep

from mlx_runtime.companions.sweeps.display import SweepDisplay
from mlx_runtime.companions.sweeps.events import SweepEnded, SweepStarted, TrialEnded, TrialProgress, TrialStarted
from mlx_runtime.companions.sweeps.results import SweepResult
from mlx_runtime.companions.sweeps.space import WHOLE, Part
from mlx_runtime.errors import UsageError

pytestmark = pytest.mark.pure


def shown(display: SweepDisplay, width: int) -> list[str]:
    """Lines of the live table on a terminal of this width."""
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(display.table())
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def display_of(root: Path, *overrides: str, **fields: Any) -> tuple[SweepDisplay, io.StringIO]:
    stream = io.StringIO()
    return SweepDisplay(plan_of(root, *overrides, **fields), stream), stream


def test_the_table_marks_the_best_trial(tmp_path: Path) -> None:
    display, stream = display_of(tmp_path, "a.lr=1,2", "b.width=8")
    for trial, value in ((1, 0.5), (2, 0.25)):
        display.handle(TrialStarted(trial, WHOLE, {"a.lr": str(trial)}, f"run_{trial:03d}"))
        display.handle(TrialProgress(trial, WHOLE, 0, 3, value))
    display.handle(TrialEnded(1, WHOLE, "SUCCEEDED", (0, 0.5)))
    assert [line.split() for line in shown(display, 80)] == [
        ["trial", "lr", "epoch", "val/loss", "status"],
        ["1", "1", "1", "0.5000", "SUCCEEDED"],
        ["2", "2", "1/3", "0.2500", "RUNNING", "best"],
    ]
    assert stream.getvalue().splitlines() == [
        "trial 1 run_001  a.lr=1",
        "trial 2 run_002  a.lr=2",
        "trial 1 SUCCEEDED  val/loss 0.5000 (epoch 1)",
    ]


def test_the_table_names_the_seed_and_the_fold_of_each_run(tmp_path: Path) -> None:
    display, _ = display_of(tmp_path, folds=5, seeds=2)
    for part in (Part(9, 0), Part(10, 4)):
        display.handle(TrialStarted(2, part, {}, "run_001"))
    display.handle(TrialStarted(1, Part(9, 1), {}, "run_003"))
    display.handle(TrialEnded(1, WHOLE, "SUCCEEDED", (0, 0.5)))
    assert [line.split()[:5] for line in shown(display, 80)[1:]] == [
        ["1", "mean", "1", "0.5000", "SUCCEEDED"],
        ["2", "seed", "9", "fold", "1/5"],
        ["2", "seed", "10", "fold", "5/5"],
    ]


def test_a_sweep_without_a_finite_value_says_so(tmp_path: Path) -> None:
    """Its trials stay in the tables."""
    runs = [store_run(str(tmp_path), {"val/loss": values}) for values in ([math.nan, math.nan], [math.inf])]
    entries = [{"values": {"lr": str(number)}, "runs": [run]} for number, run in enumerate(runs, 1)]
    folder = store_sweep(str(tmp_path), [*entries, {"values": {"lr": "3"}, "runs": [None]}])
    display, stream = display_of(tmp_path, "lr=1,2,3", mode="max")
    display.handle(TrialStarted(2, WHOLE, {"lr": "2"}, "run_002"))
    display.handle(TrialProgress(2, WHOLE, 0, 3, math.inf))
    assert "best" not in shown(display, 80)[1]
    display.handle(SweepStarted(folder, plan_of(tmp_path, "lr=1,2,3").definition, ()))
    display.handle(SweepEnded("SUCCEEDED", None, 0, 0))
    lines = [line.split() for line in stream.getvalue().splitlines()]
    assert ["1", "1", "nan", "-", "SUCCEEDED", "run_001"] in lines
    assert "best      none: no trial has a finite value of val/loss" in stream.getvalue()
    result = SweepResult(folder)
    with pytest.raises(UsageError, match="no trial of digits/sweep_001 has a finite value of val/loss"):
        _ = result.best
    assert [*result.table().columns] == ["lr", "status", "epoch", "val/loss", "duration_s"]
    assert [trial.shown.get("val/loss") for trial in result.ranked()] == ["nan", "nan", None]
