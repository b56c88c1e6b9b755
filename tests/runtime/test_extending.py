"""The seams that other packages fill: the example in the docs is installed, and trains."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Mlx

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "extending"
PAGE = ROOT / "docs" / "guides" / "extending.md"

Run = Callable[..., str]
"""Calls `mlx` in the experiment, and returns what it prints."""

EXPERIMENT = """
import mlx_runtime
import torch
from torch.nn import functional as F
from torchmetrics import MeanMetric
from more_mlx.csv_folder import CSVFolder


class Datasets:
    def __init__(self, train: CSVFolder = CSVFolder("rows", batch_size=4)):
        self.train = train


class Models:
    map_params_to_optimizers = {"net": "sgd"}

    def __init__(self, net: torch.nn.Linear = torch.nn.Linear(2, 2)):
        self.net = net


class Optimizers:
    def __init__(self, sgd: torch.optim.SGD = torch.optim.SGD(mlx_runtime.DUMMY_PARAMS, lr=0.1)):
        self.sgd = sgd


class Experiment(mlx_runtime.BaseModule):
    def __init__(self, cfg: mlx_runtime.TrainConfig = mlx_runtime.TrainConfig(num_epochs=2),
                 datasets: Datasets = Datasets(), models: Models = Models(), optimizers: Optimizers = Optimizers()):
        self.cfg, self.datasets, self.models, self.optimizers = cfg, datasets, models, optimizers

    def worker_loop(self, shards):
        net = mlx_runtime.prepare_model(self.models.net)
        loader = shards.train.iter_torch_batches()
        for epoch in range(self.cfg.start_epoch, self.cfg.num_epochs):
            rows = torch.zeros(())
            for batch in loader:
                F.cross_entropy(net(batch["x"]), batch["y"]).backward()
                self.optimizers.sgd.step()
                self.optimizers.sgd.zero_grad()
                rows += len(batch["x"])
            print("rows", int(rows))
            self.save_checkpoint(epoch, {"weight": self.models.net.weight.norm().item()})
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the example is installed in."""
    copy, folder = tmp_path_factory.mktemp("copy") / "extending", tmp_path_factory.mktemp("packages")
    shutil.copytree(EXAMPLE, copy)  # building writes next to the sources
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", str(folder), str(copy)], check=True)
    return folder


@pytest.fixture(scope="module")
def extended(installed: Path, baked: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An experiment that reads a folder of CSV files."""
    folder = tmp_path_factory.mktemp("extended") / "lines"
    shutil.copytree(baked, folder, ignore=shutil.ignore_patterns("runs", "conf.yaml"))
    (folder / "src" / "experiment.py").write_text(EXPERIMENT)
    (folder / "rows").mkdir()
    for number in range(2):
        lines = ["a,b,label", *(f"{number}.{row},{row},{row % 2}" for row in range(11))]
        (folder / "rows" / f"{number}.csv").write_text("\n".join(lines))
    return folder


@pytest.fixture
def settings(installed: Path, tmp_path: Path) -> dict[str, str]:
    """Environment variables with which commands find the example."""
    path = os.pathsep.join([str(installed), os.environ.get("PYTHONPATH", "")])
    return {"PYTHONPATH": path, "MLX_STORAGE": str(tmp_path)}


@pytest.fixture
def run(extended: Path, mlx: Mlx, settings: dict[str, str]) -> Run:
    """Call `mlx` there, with the example on the path."""

    def call(*words: str) -> str:
        done = mlx(extended, *words, **settings)
        assert done.returncode == 0, done.stdout + done.stderr
        return str(done.stdout)

    return call


def weights(run: Run, name: str) -> list[str]:
    """The metric of each epoch of a run, as the command of the example prints it."""
    first, *rows = [line.split(",") for line in run("rows", f"{name}/run_001").splitlines()]
    return [value for row in rows if (value := row[first.index("weight")])]


@pytest.mark.local
def test_an_engine_and_a_kind_of_dataset_train_as_ours_do(run: Run, tmp_path: Path) -> None:
    here = run("train", "run", "cfg.engine=local")
    there = run("train", "run", "cfg.engine=more_mlx.engine.Subprocesses", "cfg.name=other")
    assert "workers   2 DDP workers on" in there
    assert "(cfg.engine=more_mlx.engine.Subprocesses)" in there
    assert "local engine" in here

    assert len(weights(run, "experiment")) == 2
    assert weights(run, "other") == weights(run, "experiment")
    for rank in range(2):  # 11 of the 22 rows for each, in steps of 4; each worker writes its own log
        (log,) = (tmp_path / "other" / "run_001").rglob(f"*{rank}.log")
        assert log.read_text().count("rows 11\n") == 2


@pytest.mark.local
def test_a_run_goes_on_with_another_engine(run: Run, tmp_path: Path) -> None:
    run("train", "run", "cfg.engine=more_mlx.engine.Subprocesses", "cfg.num_epochs=1", "cfg.name=two")
    run("train", "run", "--resume=two/run_001", "cfg.engine=local", "cfg.num_epochs=2")
    run("train", "run", "cfg.engine=local", "cfg.name=one")
    assert weights(run, "two") == weights(run, "one")


@pytest.mark.local
def test_an_engine_refuses_what_it_cannot_train(extended: Path, mlx: Mlx, settings: dict[str, str]) -> None:
    words = ["cfg.engine=more_mlx.engine.Subprocesses", "cfg.elastic.min_workers=1"]
    done = mlx(extended, "train", "run", *words, **settings)
    line = "cfg.engine=more_mlx.engine.Subprocesses cannot train this: the number of its workers is fixed"
    assert (done.returncode, done.stderr) == (1, f"error: {line}; use cfg.engine=auto\n")


@pytest.mark.process
def test_a_kind_of_dataset_is_split_into_folds_by_the_rows_of_its_reader(run: Run, extended: Path) -> None:
    edited = extended / "src" / "experiment.py"
    text = edited.read_text()
    try:
        with_val = text.replace("=4)):", "=4), val: CSVFolder = CSVFolder()):").replace(
            "= train", "= train; self.val = val"
        )
        edited.write_text(with_val)
        (extended / "src" / "conf.yaml").unlink(missing_ok=True)
        printed = run(
            "train",
            "run",
            "cfg.start_workers=0",
            "cfg.cross_validation.folds=2",
            "cfg.cross_validation.fold=0",
            "cfg.name=fold",
        )
        assert "11 rows in 3 steps" in printed
    finally:
        edited.write_text(text)
        (extended / "src" / "conf.yaml").unlink(missing_ok=True)


@pytest.mark.process
def test_an_extension_accompanies_a_run(run: Run, tmp_path: Path) -> None:
    words = ["+cfg.callbacks.heartbeat={_target_: more_mlx.heartbeat.Heartbeat, every_s: 0.1}", "cfg.start_workers=0"]
    printed = run("train", "run", *words)
    assert "SUCCEEDED after 2 checkpoints" in printed
    assert list(tmp_path.rglob("heartbeat"))


@pytest.mark.process
def test_a_command_is_listed_and_runs(run: Run) -> None:
    assert "rows        From the package more-mlx." in run("--help")
    run("train", "run", "cfg.start_workers=0", "cfg.name=shown")
    assert run("rows", "shown/run_001").startswith("step,epoch,")


@pytest.mark.pure
def test_the_guide_shows_these_files() -> None:
    page = PAGE.read_text()
    for file in (*EXAMPLE.rglob("*.py"), EXAMPLE / "pyproject.toml"):
        if file.name != "__init__.py" and "build" not in file.parts:
            assert f"\n{file.read_text()}```\n" in page, file.name
