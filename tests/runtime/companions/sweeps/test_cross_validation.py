"""Runs of one fold: their rows, their records, and how they resume."""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Mlx, edit

from mlx_runtime import open_run

pytestmark = pytest.mark.process

FOLD = ("cfg.cross_validation.folds=5", "cfg.cross_validation.fold=1", "cfg.start_workers=0", "cfg.num_epochs=1")

TESTS = Path(__file__).parents[2]

ROWS = 1257
"""Rows of `datasets.train` of the template."""


def record(folder: Path, run: str = "run_001") -> dict[str, Any]:
    return dict(json.loads((folder / "runs" / "digits" / run / "run.json").read_text()))


@pytest.mark.local
def test_a_fold_takes_the_place_of_val(mlx: Mlx, digits: Path) -> None:
    """The driver, which splits the rows, and the fork server do not touch CUDA: it does not survive a fork."""
    install = f"import sys; sys.path.append({str(TESTS)!r}); import tripwire; tripwire.install()\n"
    (digits / "src" / "__init__.py").write_text(install)
    on_cpus = ("cfg.start_workers=2", "cfg.use_gpu=false")
    done = mlx(digits, "train", "run", *FOLD, *on_cpus, "--prepare-batches")
    assert done.returncode == 0, done.stdout + done.stderr
    found = record(digits)
    rows = {name: item["rows"] for name, item in found["datasets"].items()}
    assert rows["train"] + rows["val"] == ROWS
    assert rows["val"] in (ROWS // 5, ROWS // 5 + 1)
    assert {key: found["fold"][key] for key in ("folds", "fold")} == {"folds": 5, "fold": 1}
    assert found["prepared"]["train"] == found["prepared"]["val"] != found["prepared"].get("test")
    assert "Digits has no argument training or augment that turns off augmentation" in done.stdout
    assert "split: val" in (digits / "runs" / "digits" / "run_001" / "conf.yaml").read_text()


def test_a_run_keeps_its_fold(mlx: Mlx, digits: Path) -> None:
    done = mlx(digits, "train", "run", *FOLD)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = record(digits)["fold"]["rows"]
    read = open_run(digits / "runs" / "digits" / "run_001").load_datasets(trust=True)
    sizes = [record(digits)["datasets"][name]["rows"] for name in ("train", "val")]
    assert [len(read.train), len(read.val)] == sizes
    assert sorted([*read.train.indices, *read.val.indices]) == [*range(ROWS)]
    assert (read.train.dataset.batch_size, read.val.dataset.batch_size, len(read.test)) == (32, 128, 270)
    other = (
        "cfg.cross_validation.fold=2",
        "cfg.cross_validation.folds=6",
        "cfg.cross_validation.splitter={_target_: sklearn.model_selection.KFold}",
    )
    done = mlx(digits, "train", "run", "--resume=run_001", "cfg.num_epochs=2", *other)
    assert (done.returncode, done.stderr.count("it cannot change within a run")) == (1, 3), done.stderr
    done = mlx(digits, "train", "run", "--resume=run_001", "cfg.num_epochs=2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (record(digits)["fold"]["rows"], record(digits)["attempt"]) == (rows, 2)
    edit(digits / "src" / "datasets.py", "int(0.7 *", "int(0.6 *")
    done = mlx(digits, "train", "run", "--resume=run_001", "cfg.num_epochs=3")
    assert done.returncode == 1
    assert "fold 1 has different rows than when the run started" in done.stderr
    assert record(digits)["attempt"] == 2
