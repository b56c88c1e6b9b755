"""`mlx train eval` evaluates a checkpoint without training, and changes nothing else in its run."""

import json
import re
import shutil
from pathlib import Path

import pytest
from conftest import Mlx, edit

from mlx_runtime import open_run

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def trained(mlx: Mlx, bound: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The template's experiment with a run of two epochs."""
    folder = Path(shutil.copytree(bound, tmp_path_factory.mktemp("evaluated") / "digits"))
    done = mlx(folder, "train", "run", "cfg.start_workers=0", "cfg.num_epochs=2", "cfg.keep_checkpoints=2")
    assert done.returncode == 0, done.stderr
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """Return all files of the storage except evaluations."""
    files = [path for path in (folder / "runs").rglob("*") if path.is_file() and path.parent.name != "evaluations"]
    return {str(path): path.read_bytes() for path in files}


def recorded(folder: Path, name: str) -> list[float]:
    """Return the values of a metric that training recorded, one per epoch."""
    reports = map(json.loads, (folder / "runs/digits/run_001/metrics.jsonl").read_text().splitlines())
    return [report[name] for report in reports if name in report]


@pytest.mark.parametrize(
    ("words", "epoch"),
    [
        ((), 2),
        (("--checkpoint", "epoch_0001"), 1),
        pytest.param(("1", "cfg.start_workers=2"), 2, marks=pytest.mark.local),
    ],
)
def test_numbers_are_those_of_training(trained: Path, mlx: Mlx, words: tuple[str, ...], epoch: int) -> None:
    before = contents(trained)
    done = mlx(trained, "train", "eval", *words)
    assert done.returncode == 0, done.stderr
    assert contents(trained) == before
    found = open_run(trained / "runs/digits/run_001").evaluations()[-1]
    assert {name.partition("/")[0] for name in found["metrics"]} == {"val", "test"}
    for name in ("val/accuracy", "val/cross_entropy"):
        assert found["metrics"][name] == pytest.approx(recorded(trained, name)[epoch - 1], abs=1e-6)
    assert found["checkpoint"] == str(trained / f"runs/digits/run_001/checkpoints/epoch_{epoch:04d}")
    assert found["overrides"] == [word for word in words if word.startswith("cfg.")]
    assert re.search(rf"^ +{epoch}  +[01]\.\d+", done.stdout, re.MULTILINE)  # no progress of training, like 2/1000
    assert f"val/accuracy        {found['metrics']['val/accuracy']:.4f}" in done.stdout
    assert len(list((trained / "runs/digits").iterdir())) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--checkpoint", "last"), "digits/run_001 has no checkpoint last. Available: epoch_0001, epoch_0002.\n"),
        (("latest", "models.net.hidden=3"), "models.net"),
    ],
)
def test_what_cannot_be_evaluated_changes_nothing(
    trained: Path, mlx: Mlx, words: tuple[str, ...], message: str
) -> None:
    before = contents(trained)
    done = mlx(trained, "train", "eval", *words)
    assert done.returncode in (1, 2)
    assert message in done.stderr
    assert contents(trained) == before


def test_an_experiment_must_say_how(trained: Path, mlx: Mlx, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(trained, tmp_path / "digits"))
    edit(folder / "src/experiment.py", "def eval_loop(", "def another(")
    done = mlx(folder, "train", "eval")
    assert done.returncode == 2
    assert done.stderr.startswith("error: Experiment has no eval_loop(self, dataset_shards)")
