"""Backends of training functions: JAX, a class of another package, and the variable that TensorFlow reads."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from conftest import ROOT, Mlx

from mlx_runtime.companions.notebook.backends import TensorFlow
from mlx_runtime.distributed.topology import Topology

JAX = """
import json
import os

import jax
import jax.numpy as jnp
from mlx_runtime import MlxError, Trainer, load_checkpoint, report, save_checkpoint, world_rank

here = jnp.ones((1, 2)) * 2  # starts the threads of JAX in each process that imports this


def train(config):
    total = jax.pmap(lambda values: jax.lax.psum(values, "workers"), axis_name="workers")
    checkpoint = load_checkpoint() or {"epoch": -1, "layers": [{"w": jnp.zeros(2, jnp.bfloat16)}]}
    w = jax.dlpack.from_dlpack(checkpoint["layers"][0]["w"]) if checkpoint["epoch"] >= 0 else jnp.zeros(2, jnp.bfloat16)
    for epoch in range(checkpoint["epoch"] + 1, config["num_epochs"]):
        if config.get("fails_at") == epoch and world_rank() == 1:
            raise ValueError("on purpose")
        w += total(here * world_rank())[0].astype(w.dtype)
        report(w=w[0], devices=len(jax.devices()), epochs_left=config["num_epochs"] - epoch)
        save_checkpoint(epoch=epoch, layers=[{"w": w}])
    return [jax.process_index(), jax.process_count(), w.astype(float).tolist(), epoch - checkpoint["epoch"]]


def resumed():
    try:
        trainer.run(train, {"num_epochs": 2, "fails_at": 1})
    except MlxError as error:
        running = trainer.run_iterator(train, {"fails_at": None}, resume="latest")
        return str(error), list(running), running.get_returns(), str(trainer.latest_checkpoint["layers"][0]["w"])


def machines():
    return os.environ["MACHINES"]


if __name__ == "__main__":
    trainer = Trainer(num_workers=2, backend="jax")
    other = Trainer(num_workers=2, backend="addresses.Addresses").run(machines)
    print(json.dumps({"table": str(trainer), "resumed": resumed(), "machines": other}))
"""


@pytest.mark.examples
def test_workers_sum_with_jax_report_save_and_resume(python: Mlx, tmp_path: Path) -> None:
    """Rank 1 fails in the second of two epochs. A class of another package is set up before the function."""
    shutil.copy(ROOT / "docs" / "examples" / "extending" / "more_mlx" / "addresses.py", tmp_path)
    (tmp_path / "script.py").write_text(JAX)
    done = python(tmp_path, "script.py")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["table"].splitlines()[0] == "Trainer with 2 workers, engine local, backend jax"
    error, reports, returned, saved = found["resumed"]
    assert error.startswith("ValueError: on purpose (raised on rank 1)")  # not the lost connection of rank 0
    own = [
        [{key: value for key, value in result.items() if key[0] != "_"} for result in results] for results in reports
    ]
    assert own == [[{"w": 4.0, "devices": 2, "epochs_left": 1}] * 2]
    assert returned == [[rank, 2, [4.0, 4.0], 1] for rank in (0, 1)]
    assert saved == "tensor([4., 4.], dtype=torch.bfloat16)"
    one, other = found["machines"]
    assert one == other
    assert re.fullmatch(r"127\.0\.0\.1:(\d+),127\.0\.0\.1:(?!\1\b)\d+", one)


@pytest.mark.pure
def test_a_strategy_of_tensorflow_finds_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the form that https://www.tensorflow.org/guide/distributed_training describes."""
    monkeypatch.setattr(os, "environ", {})
    backend = TensorFlow()
    backend.setup(["10.0.0.1:5000", "10.0.0.2:6000"], Topology(1, 2, torch.device("cpu")))
    assert json.loads(os.environ["TF_CONFIG"]) == {
        "cluster": {"worker": ["10.0.0.1:5000", "10.0.0.2:6000"]},
        "task": {"type": "worker", "index": 1},
    }
    backend.teardown()
    assert os.environ == {}
