"""Training functions with libraries of Ray: as trainables of Tune's own `Tuner`, and with datasets of Ray Data."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Mlx

from mlx_runtime import open_run

pytestmark = pytest.mark.cluster

SCRIPT = """
import json, os
import pandas as pd
import ray
import ray.data
from ray import tune
from mlx_runtime import MlxError, Trainer, get_dataset_shard, load_checkpoint, report, save_checkpoint


def train_func(config):
    start = (load_checkpoint() or {"epoch": -1})["epoch"] + 1
    for epoch in range(start, config["num_epochs"]):
        report(output=config["input"] * len(get_dataset_shard()) * (epoch + 1), start=start)
        save_checkpoint(epoch=epoch)
        if config["input"] == 3 and start == 0:
            raise ValueError("on purpose")


def read(config):
    shard = get_dataset_shard()
    loader = shard.iter_torch_batches(batch_size=8)
    epochs = [[batch["id"].tolist() for batch in loader] for _ in range(2)]
    return epochs, len(loader), len(list(shard)), len(shard)


def refused(engine="auto", **options):
    try:
        Trainer(num_workers=2, engine=engine).run(read, {}, **options)
    except MlxError as error:
        return str(error)


ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
trainable = Trainer(backend="torch", num_workers=2).to_tune_trainable(train_func, dataset=list(range(8)))
space = {"num_epochs": 2, "input": tune.grid_search([1, 3])}
again = tune.RunConfig(failure_config=tune.FailureConfig(max_failures=1))
results = tune.Tuner(trainable, param_space=space, run_config=again).fit()
best = results.get_best_result(metric="output", mode="max")
found = {name: best.metrics[name] for name in ("output", "start", "run", "checkpoint_path", "training_iteration")}
pd.DataFrame({"id": range(50)}).to_csv("rows.csv", index=False)
rows = ray.data.read_csv(os.path.abspath("rows.csv"))
streams = {
    "refused": [
        refused(dataset={"val": ray.data.from_items([{"id": row} for row in range(4)])}),
        refused("local", dataset=rows),
    ],
    "stream": Trainer(num_workers=2).run(read, {}, dataset=rows),
}
print("FOUND", json.dumps(found | streams | {"config": best.config, "errors": results.num_errors}))
"""


@pytest.fixture(scope="module")
def found(python: Mlx, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a script has seen that uses both, on one Ray."""
    folder = tmp_path_factory.mktemp("with_ray")
    (folder / "script.py").write_text(SCRIPT)
    done = python(folder, "script.py")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    return json.loads(line.removeprefix("FOUND ")) | {"folder": folder}


def test_a_tuner_of_ray_finds_the_best_config_and_continues_failed_trials(found: dict[str, Any]) -> None:
    assert (found["output"], found["config"]) == (24, {"num_epochs": 2, "input": 3})
    assert (found["training_iteration"], found["errors"], found["start"]) == (2, 0, 1)
    run = open_run(found["run"])
    assert (run.record["status"], run.record["latest"]["path"]) == ("SUCCEEDED", found["checkpoint_path"])
    assert Path(found["run"]).parent == (found["folder"] / "runs" / "train_func")


def test_datasets_of_ray_data_are_read_by_workers_of_ray(found: dict[str, Any]) -> None:
    (one, *sizes), (other, *_) = found["stream"]
    for epoch in (0, 1):
        assert sorted(itertools.chain(*one[epoch], *other[epoch])) == list(range(50))
    assert one[0] != one[1]
    assert sizes == [4, 25, 25]
    cfg = open_run(found["folder"] / "runs" / "read" / "run_001").config["cfg"]
    assert cfg["engine"] == "ray"
    assert cfg["dataset_files"]["train"].startswith("ray:")
    elsewhere = (
        "dataset is a Dataset of Ray Data, which the engine ray reads, without folds; for others, pass a list of "
    )
    assert found["refused"] == [
        "dataset['val'] is a Dataset of Ray Data with its rows in memory; write them to files with "
        "write_parquet(path), and pass ray.data.read_parquet(path)",
        f"{elsewhere}its rows: dataset.take_all()",
    ]
