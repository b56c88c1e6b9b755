"""Runs in JAX: several workers as one, exact after kills, and restored by other workers."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Mlx
from faults import differences, final_state, reports

pytestmark = pytest.mark.local

ONE = ("cfg.start_workers=0", "datasets.train.batch_size=16")
SHARDED = ("cfg.mesh.data=1", "cfg.mesh.model=2", "datasets.train.batch_size=16")
PLAIN = ("models.net.dropout=0", "models.net.half=false", "cfg.noise=0")
"""Without random numbers, which depend on the positions of rows in a batch, and without bfloat16."""


@pytest.fixture(scope="module")
def run(
    make_in: Callable[[str, Path], Path], mlx: Mlx, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[Path, str]]:
    """`run("cfg.num_epochs=2", ...)` trains in a folder of its own. Returns the folder of the run, and the output."""
    bound = make_in("jax", tmp_path_factory.mktemp("bound"))

    def run(*words: str, code: int = 0, origin: Path | None = None, **settings: str) -> tuple[Path, str]:
        folder = tmp_path_factory.mktemp("run") / "jax"
        shutil.copytree(bound if origin is None else origin.parents[2], folder)
        done = mlx(folder, "train", "run", *words, **settings)
        output = done.stdout + done.stderr
        assert done.returncode == code, output
        return max((folder / "runs" / "jax").glob("run_*"), default=folder), output

    return run


@pytest.fixture(scope="module")
def sharded(run: Callable[..., tuple[Path, str]]) -> Path:
    """A run of two workers that share the parameters, and read the same rows."""
    return run(*SHARDED, "cfg.num_epochs=3")[0]


def rows(folder: Path, stage: str = "val") -> list[float]:
    """Return the sum of the numbers of the rows in each evaluation of a run; each row has another one."""
    return [line[f"{stage}/row"] for line in reports(folder) if f"{stage}/row" in line]


def numbers(folder: Path) -> list[list[float]]:
    """Return the metrics of the evaluations of a run."""
    return [[line["val/mse"], line["val/mae"]] for line in reports(folder) if "val/mse" in line]


def test_two_workers_with_their_own_rows_train_as_one(run: Callable[..., tuple[Path, str]]) -> None:
    """Batches of 16 rows, the last one with 13, and evaluations of 23 rows; each row counts once."""
    one, _ = run(*ONE, *PLAIN, "cfg.num_epochs=1")
    two, output = run(*PLAIN, "cfg.num_epochs=1")
    assert "workers   2 JAX workers" in output
    assert np.allclose(numbers(one), numbers(two), rtol=1e-4)
    assert rows(one) == rows(two) == [sum(range(23))]


def test_two_workers_with_shards_of_parameters_train_as_one(
    run: Callable[..., tuple[Path, str]], sharded: Path
) -> None:
    one, _ = run(*ONE, "cfg.num_epochs=2")
    assert np.allclose(numbers(one), numbers(sharded)[:2], rtol=2e-2)  # bfloat16
    assert rows(one) == rows(sharded)[:2] == [sum(range(23))] * 2
    index = json.loads((sharded / "checkpoints" / "epoch_0003" / "index.json").read_text())
    kernels = {name: len(item["pieces"]) for name, item in index["tensors"].items() if name.endswith("first.kernel")}
    moments = (f"own/optimizer/opt_state.0.{name}.first.kernel" for name in ("mu", "nu"))
    assert kernels == dict.fromkeys(("models/net/first.kernel", *moments, "own/average/first.kernel"), 2)


def test_devices_of_one_process_are_a_mesh(run: Callable[..., tuple[Path, str]], sharded: Path) -> None:
    flags = "--xla_force_host_platform_device_count=4"
    found, _ = run(*ONE, "cfg.mesh.data=2", "cfg.mesh.model=2", "cfg.num_epochs=2", XLA_FLAGS=flags)
    assert np.allclose(numbers(found), numbers(sharded)[:2], rtol=2e-2)


def test_three_workers_continue_an_epoch_of_four(run: Callable[..., tuple[Path, str]]) -> None:
    """Four write their parts of a mesh with two axes. Three read the rows that are left, each once."""
    words = (*PLAIN, "cfg.num_epochs=1", "datasets.train.rows=60")
    one, _ = run(*words, "cfg.start_workers=0", "datasets.train.batch_size=12")
    four = ("cfg.start_workers=4", "cfg.mesh.data=2", "cfg.mesh.model=2", "datasets.train.batch_size=6")
    began, _ = run(*words, *four, "cfg.max_steps=3")
    three = ("cfg.start_workers=3", "cfg.mesh.data=3", "cfg.mesh.model=1", "datasets.train.batch_size=4")
    found, output = run("--from=run_001@latest", *three, "cfg.max_steps=null", origin=began)
    assert "restored" in output
    assert np.allclose(numbers(found), numbers(one), rtol=1e-4)
    assert (rows(found, "train"), rows(found)) == ([sum(range(60))], [sum(range(23))])
    assert json.loads((found / "run.json").read_text())["from"] == "jax/run_001"


@pytest.mark.kills
def test_killed_three_times_it_ends_with_the_same_bits(run: Callable[..., tuple[Path, str]], sharded: Path) -> None:
    killed = ("cfg.kills=3", "cfg.pause_s=0.1", "cfg.elastic.max_failures=3")
    disturbed, output = run(*SHARDED, "cfg.num_epochs=3", *killed)
    assert output.count("was killed by SIGKILL") == 3, output
    assert differences(final_state(disturbed), final_state(sharded)) == []
    assert reports(disturbed) == reports(sharded)


@pytest.mark.process
@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("cfg.fault='not finite'", "cfg.debug.stop_on_nan=true"), "FloatingPointError: invalid value (nan)"),
        (
            ("cfg.fault=donated",),
            "Array has been deleted with shape=float32[8,6]. (a call that donated it has",
        ),
        (("cfg.strategy=ddp",), "cfg.strategy=ddp trains models of torch, but Experiment has models of jax; change"),
        (
            ("datasets.train.ragged=true", "cfg.start_workers=2"),
            "datasets.train: rows of 'x' have the shape [7] on rank 1, and [6]",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_cannot_train_is_refused(run: Callable[..., tuple[Path, str]], words: tuple[str, ...], line: str) -> None:
    _, output = run("cfg.start_workers=0", *words, code=1)
    assert line in output
    assert "Traceback" not in output


@pytest.mark.process
def test_a_state_of_another_optimizer_is_refused(run: Callable[..., tuple[Path, str]], sharded: Path) -> None:
    other = ("optimizers.adam._target_=optax.sgd", "optimizers.adam.learning_rate=0.1")
    words = ("--from=run_001@latest", *ONE, "cfg.mesh.model=1", "cfg.num_epochs=4")
    _, output = run(*words, *other, code=1, origin=sharded)
    assert "self.optimizer in the checkpoint does not fit the config: opt_state.0.count is only there" in output


@pytest.mark.process
def test_it_predicts_as_it_evaluates_and_cannot_be_exported(mlx: Mlx, sharded: Path) -> None:
    project = sharded.parents[2]
    done = mlx(project, "train", "predict", "jax/run_001", "-o", "outputs.jsonl")
    assert done.returncode == 0, done.stderr
    outputs = [json.loads(line)["sum"] for line in (project / "outputs.jsonl").read_text().splitlines()]
    sums = torch.randn(23, 6, generator=torch.Generator().manual_seed(23)).sum(dim=1).numpy()
    assert np.allclose(np.square(np.subtract(outputs, sums)).mean(), numbers(sharded)[-1][0], rtol=1e-2)
    done = mlx(project, "xp", "export", "jax/run_001")
    assert "error: programs are made of torch modules, and the models of this experiment are none" in done.stderr
