"""Training functions as trainables of Ray Tune's own `Tuner`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_runtime import open_run

pytestmark = pytest.mark.cluster

SCRIPT = """
import json
import ray
from ray import tune
from mlx_runtime import Trainer, report, save_checkpoint


def train_func(config):
    for epoch in range(2):
        report(score=config["x"] * (epoch + 1))
        save_checkpoint(epoch=epoch)


if __name__ == "__main__":
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    trainable = Trainer(num_workers=1).to_tune_trainable(train_func)
    results = tune.Tuner(trainable, param_space={"x": tune.grid_search([1.0, 3.0])}).fit()
    best = results.get_best_result("score", "max")
    found = {name: best.metrics[name] for name in ("score", "run", "checkpoint_path", "training_iteration")}
    print("FOUND", json.dumps(found | {"config": best.config, "errors": results.num_errors}))
"""


def test_a_tuner_of_ray_finds_the_best_config(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    found = json.loads(line.removeprefix("FOUND "))
    assert (found["score"], found["config"], found["training_iteration"], found["errors"]) == (6.0, {"x": 3.0}, 2, 0)
    run = open_run(found["run"])
    assert (run.record["status"], run.record["latest"]["path"]) == ("SUCCEEDED", found["checkpoint_path"])
    assert Path(found["run"]).parent == (tmp_path / "runs" / "train_func")
