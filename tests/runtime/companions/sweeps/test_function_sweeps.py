"""Sweeps of training functions, in a script as users write them."""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Mlx

pytestmark = pytest.mark.local

SCRIPT = """
import json
from pathlib import Path
from mlx_runtime import MlxError, get_dataset_shard, open_sweep, report, sweep


def training_func(config):
    for _ in range(config["num_epochs"]):
        report(output=config["layer"]["input"], negative=-config["layer"]["input"])


def summing(config):
    report(total=config["factor"] * sum(get_dataset_shard()))


def refused(config, function=training_func, **options):
    try:
        sweep(function, config, **options)
    except MlxError as error:
        return str(error)


def interrupt(event):
    if type(event).__name__ == "TrialEnded":
        raise KeyboardInterrupt


space = {"num_epochs": 2, "layer": {"input": "choice(1, 3)"}}
options = {"metric": "output", "mode": "max", "num_workers": 1, "parallel": 1}
try:
    sweep(training_func, space, **options, listeners=[interrupt])
except KeyboardInterrupt:
    begun = open_sweep("training_func/sweep_001").get_best_config()
result = sweep(training_func, space, **options, resume="latest")
found = {
    "begun": begun,
    "best": [result.get_best_config(), result.get_best_config("negative", "max"), result.best_run.record["status"]],
    "trials": [[trial.values, trial.score, run.record["attempt"]] for trial, run in zip(result.trials, result.runs)],
    "command": result.command,
    "refused": [
        refused({"lr": [1, 2]}),
        refused(space, **options, folds=2),
    ],
}
rows = sweep(summing, {"factor": "choice(1, 2)"}, metric="total", mode="min", num_workers=1, dataset=[1, 2, 3])
found["with a dataset"] = [[trial.score, run.record["monitor"]] for trial, run in zip(rows.trials, rows.runs)]
script = Path(__file__)
script.write_text(script.read_text().replace('report(output=config["', 'report(output=2 * config["'))
found["refused"].append(refused(space, **options, resume="latest"))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("functions")


@pytest.fixture(scope="module")
def found(folder: Path, python: Mlx) -> dict[str, Any]:
    """What a script has seen that interrupts and resumes a sweep."""
    (folder / "tuning.py").write_text(SCRIPT)
    done = python(folder, "tuning.py")
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def config(value: int) -> dict[str, Any]:
    return {"num_epochs": 2, "layer": {"input": value}}


def test_all_trials_read_the_same_dataset_and_keep_checkpoints_by_the_metric(found: dict[str, Any]) -> None:
    assert found["with a dataset"] == [[6, "total"], [12, "total"]]


def test_a_sweep_of_a_function_resumes_and_returns_the_best_config(found: dict[str, Any]) -> None:
    assert found["begun"] == config(1)
    assert found["best"] == [config(3), config(1), "SUCCEEDED"]
    key = "cfg.config.layer.input"
    assert found["trials"] == [[{key: 1}, 1, 1], [{key: 3}, 3, 1]]  # none was repeated
    assert found["command"] == f"trainer.run(training_func, {config(3)})"


def test_its_runs_are_listed_below_it_and_the_command_resumes_it(found: dict[str, Any], folder: Path, mlx: Mlx) -> None:
    rows = [line.split() for line in mlx(folder, "xp", "ls", "training_func").stdout.splitlines()]
    assert [row[1] for row in rows[1:]] == ["sweep_001", "run_001", "run_002"]
    assert "cfg.config.layer.input" in mlx(folder, "xp", "ls", "training_func", "--sweep", "sweep_001").stdout
    done = mlx(folder, "train", "sweep", "--resume", "training_func/sweep_001")
    assert "resumed   2 trials are done" in done.stdout, done.stderr


def test_what_cannot_be_tuned_is_refused(found: dict[str, Any]) -> None:
    nothing, folds, edited = found["refused"]
    assert nothing == (
        "no value in the config of training_func varies; write some as text, like 'choice(0.1, 0.01)' or "
        "'interval(0.01, 0.1)'. A list is one value"
    )
    assert folds == "training_func is a function, but folds split the datasets of an experiment"
    cause = "was started with another definition of training_func"
    assert edited == f"training_func/sweep_001 {cause}; undo the edits, or start a new one"
