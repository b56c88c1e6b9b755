"""Sweeps from Python, as in a script and in a notebook."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Mlx, Script

pytestmark = pytest.mark.local

SCRIPT = """
import json, threading, time
from pathlib import Path
from mlx_runtime import MlxError, kfold, open_sweep, sweep
from src.cells import Cells
from src.experiment import Experiment

LR = "optimizers.adam.lr"
options = {"metric": "val/mse", "mode": "min", "parallel": 2}

def found(result):
    trials = [(trial.number, trial.values, trial.score, trial.status) for trial in result.trials]
    return {"trials": trials, "best": result.best.number, "config": result.best_config()["optimizers"]["adam"]["lr"]}

if __name__ == "__main__":
    given = ["cfg.start_workers=0", "cfg.num_epochs=2", "cfg.name=cells", f"{LR}=0.01,1e-9"]
    result = kfold(Cells, given, folds=2, **options)
    same = open_sweep("cells/sweep_001").table().equals(result.table())
    cells = [run.record["metrics"]["cells"] for run in result.runs]
    cells += [result.definition["experiment"], result.command]
    threading.Thread(target=time.sleep, args=[60], daemon=True).start()  # a notebook has some
    try:
        failing = ["cfg.start_workers=0", "cfg.late=raise"]
        sweep(Experiment, failing, folds=2, **options | {"parallel": 1}, name="broken")
        failed = ""
    except MlxError as error:
        failed = str(error)
    cells.append(len(list(Path("runs/cells").glob("sweep_*"))))
    runs = [run.record["status"] for run in result.runs]
    facts = {"runs": runs, "cells": cells}
    print(json.dumps(found(result) | facts | {"same": same, "failed": failed}))
"""

CELLS = """
from src import experiment


class Cells(experiment.Experiment):
    def worker_loop(self, dataset_shards):
        self.log({"cells": self.optimizers.adam.param_groups[0]["lr"]})
        super().worker_loop(dataset_shards)
"""


@pytest.fixture(scope="module")
def folder(make_in: Callable[[str, Path], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_in("faults", tmp_path_factory.mktemp("api"))
    (folder / "src" / "cells.py").write_text(CELLS)
    return folder


@pytest.fixture(scope="module")
def found(script: Script, folder: Path) -> dict[str, Any]:
    """What a script has seen that carries out two sweeps, of a class in another module and of the experiment."""
    return script(folder, SCRIPT)


def test_a_sweep_returns_its_results(found: dict[str, Any]) -> None:
    (first, values, score, status), (second, _, worse, _) = found["trials"]
    assert (first, second, values, status) == (1, 2, {"optimizers.adam.lr": 0.01}, "SUCCEEDED")
    assert score < worse
    assert (found["best"], found["config"]) == (1, 0.01)
    assert found["runs"] == ["SUCCEEDED"] * 4
    assert found["same"]


def test_it_raises_if_all_trials_failed(found: dict[str, Any]) -> None:
    why = "ValueError: on purpose (raised on rank 0)"
    line, *frames = found["failed"].splitlines()
    assert line == f"all trials of faults/sweep_broken failed, the first with: {why}"
    assert frames[0].startswith("  src/experiment.py:")


def test_a_class_of_another_module_is_trained_with_the_defaults_of_its_code(found: dict[str, Any]) -> None:
    *rates, path, command, sweeps = found["cells"]
    assert sweeps == 1
    assert (rates, path) == ([0.01, 0.01, 1e-9, 1e-9], "src.cells.Cells")
    assert "(Cells, ['cfg.start_workers=0', 'cfg.num_epochs=2', 'cfg.name=cells', 'optimizers." in command


def test_such_a_sweep_resumes(found: dict[str, Any], mlx: Mlx, folder: Path) -> None:
    done = mlx(folder, "train", "sweep", "--resume", "runs/cells/sweep_001")
    assert (done.returncode, done.stderr) == (0, "")
    assert "resumed   2 trials are done" in done.stdout
