"""The results of sweeps, from the records and metrics of their runs."""

import json
import math
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from stored_sweeps import LR, WIDTH, store_run, store_sweep

from mlx_runtime.cli import mlx
from mlx_runtime.companions.sweeps.results import SweepResult
from mlx_runtime.errors import UsageError
from mlx_runtime.runs.checkpoints.index import CheckpointInfo
from mlx_runtime.runs.checkpoints.store import CheckpointStore
from mlx_runtime.runs.folder import RunFolder, run_folder
from mlx_runtime.runs.queries import ranking as ranking
from mlx_runtime.storage.files import join_path

pytestmark = pytest.mark.process


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.s3)])
def root(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty storage of either kind."""
    monkeypatch.setenv("MLX_CACHE", str(tmp_path / "cache"))
    found = str(tmp_path / "runs")
    return found if request.param == "folder" else request.getfixturevalue("s3").format(f"sweep-{tmp_path.name}")


@pytest.fixture
def searched(root: str) -> RunFolder:
    """A sweep whose four trials ended in different ways."""
    losses = [[0.9, 0.5, 0.7], [0.8, 0.6], [0.1], [math.nan, 0.55, None]]
    statuses = ["SUCCEEDED", "PRUNED", "FAILED", "SUCCEEDED"]
    names = [
        store_run(root, {"val/loss": values, "val/f1": [0.1, 0.2, 0.3]}, status)
        for values, status in zip(losses, statuses, strict=True)
    ]
    values = [{LR: lr, WIDTH: width} for lr, width in (("0.1", "8"), ("1e-3", "8"), ("0.01", "16"), ("0.001", "16"))]
    trials = [{"values": own, "runs": [name]} for own, name in zip(values, names, strict=True)]
    return store_sweep(root, [*trials, {"values": values[0], "runs": [None]}])


def test_a_row_per_trial(searched: RunFolder) -> None:
    table = SweepResult(searched).table()
    assert [*table.columns] == [LR, WIDTH, "status", "epoch", "val/loss", "train/loss", "val/f1", "duration_s"]
    assert [*table.index] == [1, 2, 3, 4, 5]
    assert [*table["status"]] == ["SUCCEEDED", "PRUNED", "FAILED", "SUCCEEDED", "PENDING"]
    assert [*table["val/loss"].iloc[:4]] == [0.5, 0.6, 0.1, 0.55]
    assert [*table["epoch"].iloc[:4]] == [2, 2, 1, 2]
    assert [*table["val/f1"].iloc[:4]] == [0.2, 0.2, 0.1, 0.2]
    assert [*table[LR].iloc[:3]] == [0.1, 0.001, 0.01]
    assert table[WIDTH].dtype == int
    assert [*table["duration_s"].iloc[:4]] == [30.0] * 4
    assert table.loc[5, ["epoch", "val/loss", "duration_s"]].isna().all()


def test_the_best_is_one_that_did_not_fail(searched: RunFolder) -> None:
    result = SweepResult(searched)
    assert (result.best.number, result.best.score, result.best.epoch) == (1, 0.5, 2)
    assert result.best.values == {LR: 0.1, WIDTH: 8}
    assert [trial.number for trial in result.ranked()] == [1, 4, 2, 3, 5]
    assert result.command == f"mlx train run cfg.num_epochs=3 {LR}=0.1 {WIDTH}=8"
    assert result.best_config()["cfg"]["seed"] == 0
    assert [run.record["run"] for run in result.runs] == ["run_001", "run_002", "run_003", "run_004"]
    assert repr(result) == f"<SweepResult digits/sweep_001, 5 trials, best val/loss 0.5000 with {LR}=0.1 {WIDTH}=8>"
    assert "<td>PRUNED</td>" in result._repr_html_()


def test_folds_count_by_their_mean_at_the_same_epoch(root: str) -> None:
    """The best epochs of the single folds would favor trial 2."""
    curves = [([0.5, 0.4, 0.5], [0.6, 0.2, 0.7]), ([0.1, 0.9, 0.4], [0.9, 0.1, 0.4]), ([0.0], [0.0])]
    others = {"test/loss": [None, None, 7.0], "val/rare": [9.0, None, 8.0]}
    runs = [[store_run(root, {"val/loss": fold, **others}) for fold in folds] for folds in curves]
    trials = [{"values": {"a": str(number)}, "runs": own} for number, own in enumerate(runs)]
    trials[2]["runs"] = [runs[2][0], None]
    overrides = [
        "cfg.num_epochs=3",
        "cfg.cross_validation.splitter={_target_: sklearn.model_selection.KFold}",
        "+cfg.cross_validation.splitter.shuffle=true",
    ]
    result = SweepResult(store_sweep(root, trials, folds=2, overrides=overrides))
    first, second, third = result.trials
    assert (first.epoch, first.score, second.epoch, second.score) == (2, pytest.approx(0.3), 3, pytest.approx(0.4))
    assert result.best is first
    assert (third.status, third.score, third.curve) == ("PENDING", None, {})
    table = result.table()
    assert table.loc[1, "val/loss_std"] == pytest.approx(math.sqrt(0.02))
    assert table.loc[1, ["test/loss", "test/loss_std"]].tolist() == [7.0, 0.0]
    assert math.isnan(table.loc[1, "val/rare"])  # its values belong to other epochs
    assert table.loc[2, "val/rare"] == 8.0
    assert table.loc[1, "duration_s"] == 60
    assert result.best_config()["cfg"] == {
        "seed": 0,
        "cross_validation": {"folds": None, "fold": None, "splitter": None},
    }
    saved = CheckpointStore(run_folder(root, "digits", runs[0][0]).checkpoints)
    kept = saved.save({}, CheckpointInfo(1, True, 19, {"val/loss": 0.4}))
    saved.save({}, CheckpointInfo(2, True, 29, {"val/loss": 0.5}))
    assert result.summary()["checkpoints"] == [saved.path(kept), None]
    assert result.lines() == [
        "val/loss  0.3000 ± 0.1414 (min, epoch 2)",
        "trial     1 of digits/sweep_001",
        "values    a=0",
        "run       digits/run_001, run_002",
        f"fold 1    {saved.path(kept)}",
        "fold 2    none of epoch 2 is kept; a higher cfg.keep_checkpoints keeps more",
        "full run  mlx train run cfg.num_epochs=3 a=0",  # on all rows, so without the splitter
    ]


def test_without_any_value_there_is_no_best(root: str) -> None:
    empty = store_sweep(root, [])
    assert len(SweepResult(empty).table()) == 0
    with pytest.raises(UsageError, match="no trial of digits/sweep_001 has recorded val/loss. There are none"):
        _ = SweepResult(empty).best
    failed = store_run(root, {}, "FAILED", error="ValueError: no\n  src/experiment.py")
    shutil.rmtree(empty.path)
    result = SweepResult(store_sweep(root, [{"values": {"a": "1"}, "runs": [failed]}]))
    with pytest.raises(UsageError, match="recorded val/loss; trial 1: ValueError: no$"):
        _ = result.best
    with pytest.raises(UsageError, match="run_001 is a run, not a sweep"):
        SweepResult(run_folder(root, "digits", "run_001"))


def test_xp_best_of_a_sweep(searched: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_STORAGE", searched.root)
    best = run_folder(searched.root, "digits", "run_001")
    for checkpoint in (
        CheckpointInfo(0, True, 9, {}),
        CheckpointInfo(1, False, 15, {}),
        CheckpointInfo(1, True, 19, {}),
    ):
        CheckpointStore(best.checkpoints).save({}, checkpoint)
    done = CliRunner().invoke(mlx, ["xp", "best", "digits", "sweep_001"])
    assert done.stdout.splitlines() == [
        "val/loss    0.5000 (min)",
        "trial       1 of digits/sweep_001",
        f"values      {LR}=0.1 {WIDTH}=8",
        "run         digits/run_001",
        f"checkpoint  {join_path(best.checkpoints, 'epoch_0002')} (epoch 2)",
        f"full run    mlx train run cfg.num_epochs=3 {LR}=0.1 {WIDTH}=8",
    ]
    found = json.loads(CliRunner().invoke(mlx, ["xp", "best", "digits", "sweep_001", "--json"]).stdout)
    assert (found["trial"], found["runs"], found["value"], found["std"]) == (1, ["run_001"], 0.5, None)
    assert CliRunner().invoke(mlx, ["xp", "best", "digits", "sweep_001", "--mode", "max"]).exit_code != 0
