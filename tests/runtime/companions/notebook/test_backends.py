"""Backends of training functions: JAX and TensorFlow, installed and real, and a class of another package."""

import json
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from clusters import free_ports
from conftest import ROOT, TIMEOUT_S, Mlx

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


LISTENING = """
import os, socket, sys

import torch
from mlx_runtime.companions.notebook.backends import JAX
from mlx_runtime.distributed.handshake import listening_sockets
from mlx_runtime.distributed.topology import Topology

backend = JAX()
backend.setup([f"127.0.0.2:{sys.argv[1]}"], Topology(0, 1, torch.device("cpu")))

import jax

jax.devices()
print(*(socket.socket(fileno=os.dup(number)).getsockname()[0] for number in listening_sockets()))
backend.teardown()
"""

TENSORFLOW = """
import json, os
from mlx_runtime import Trainer, report, save_checkpoint


def train_func(config):
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        weight = tf.Variable(0.0)
    rows = tf.data.Dataset.from_tensor_slices([1.0, 2.0, 3.0, 4.0]).batch(4)  # two rows for each worker

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((weight * x - 3 * x) ** 2) / 4
        gradient = tf.distribute.get_replica_context().all_reduce("sum", tape.gradient(loss, weight))
        weight.assign_sub(0.05 * gradient)
        return loss

    train_step = tf.function(lambda x: strategy.reduce("sum", strategy.run(step, (x,)), axis=None))
    for epoch in range(config["num_epochs"]):
        for batch in strategy.experimental_distribute_dataset(rows):
            loss = train_step(batch)
        report(loss=loss)
        save_checkpoint(epoch=epoch, weight=weight)
    return strategy.num_replicas_in_sync, float(weight.numpy()), json.loads(os.environ["TF_CONFIG"])["task"]


if __name__ == "__main__":
    trainer = Trainer(backend="tensorflow", num_workers=2)
    running = trainer.run_iterator(train_func, {"num_epochs": 4})
    reports = [[result["loss"] for result in results] for results in running]
    print(json.dumps([reports, running.get_returns(), trainer.latest_checkpoint["epoch"]]))
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


@pytest.fixture
def with_tensorflow(tmp_path: Path) -> Path:
    """The Python of an environment that has TensorFlow in addition to the libraries of this one.

    It is not installed here, because TensorBoard, and so each run, would import it.
    """
    venv.create(tmp_path / "venv", symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (site / "parent.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    install = ["-m", "pip", "install", "-q", "--no-compile", "-c", str(ROOT / "constraints.txt"), "tensorflow-cpu"]
    subprocess.run([python, *install], check=True, timeout=300)
    return python


@pytest.mark.install
def test_workers_of_tensorflow_train_one_model(
    with_tensorflow: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    (tmp_path / "script.py").write_text(TENSORFLOW)
    path = str(ROOT / "runtime")
    done = subprocess.run(
        [with_tensorflow, "script.py"],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    reports, returned, epoch = json.loads(done.stdout.splitlines()[-1])
    losses = [losses[0] for losses in reports]
    assert all(one == other for one, other in reports)
    assert losses[:2] == pytest.approx([67.5, 4.21875])  # of all four rows: 30 / 4 * (w - 3)², and w - 3 shrinks to 1/4
    assert losses[-1] == pytest.approx(67.5 / 16**3)
    assert [values[0] for values in returned] == [2, 2]
    assert [values[2] for values in returned] == [{"type": "worker", "index": rank} for rank in (0, 1)]
    assert returned[0][1] == returned[1][1] == pytest.approx(3 - 3 / 4**4)
    assert epoch == 3


@pytest.mark.process
def test_jax_and_its_gloo_listen_on_the_address_of_the_worker(python: Mlx, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(LISTENING)
    done = python(tmp_path, "script.py", str(free_ports(1)[0]))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == ["127.0.0.2", "::ffff:127.0.0.2"]
