"""Training functions as trainables of Ray Tune's own `Tuner`."""

import json
from pathlib import Path

import pytest
from conftest import Mlx

from mlx_runtime import open_run

pytestmark = pytest.mark.cluster

SCRIPT = """
import json
import ray
from ray import tune
from mlx_runtime import Trainer, get_dataset_shard, load_checkpoint, report, save_checkpoint


def train_func(config):
    start = (load_checkpoint() or {"epoch": -1})["epoch"] + 1
    for epoch in range(start, config["num_epochs"]):
        report(output=config["input"] * len(get_dataset_shard()) * (epoch + 1), start=start)
        save_checkpoint(epoch=epoch)
        if config["input"] == 3 and start == 0:
            raise ValueError("on purpose")


ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
trainable = Trainer(backend="torch", num_workers=2).to_tune_trainable(train_func, dataset=list(range(8)))
space = {"num_epochs": 2, "input": tune.grid_search([1, 3])}
again = tune.RunConfig(failure_config=tune.FailureConfig(max_failures=1))
results = tune.Tuner(trainable, param_space=space, run_config=again).fit()
best = results.get_best_result(metric="output", mode="max")
found = {name: best.metrics[name] for name in ("output", "start", "run", "checkpoint_path", "training_iteration")}
print("FOUND", json.dumps(found | {"config": best.config, "errors": results.num_errors}))
"""


def test_a_tuner_of_ray_finds_the_best_config_and_continues_failed_trials(python: Mlx, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = python(tmp_path, "script.py")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    found = json.loads(line.removeprefix("FOUND "))
    assert (found["output"], found["config"]) == (24, {"num_epochs": 2, "input": 3})
    assert (found["training_iteration"], found["errors"], found["start"]) == (2, 0, 1)
    run = open_run(found["run"])
    assert (run.record["status"], run.record["latest"]["path"]) == ("SUCCEEDED", found["checkpoint_path"])
    assert Path(found["run"]).parent == (tmp_path / "runs" / "train_func")
