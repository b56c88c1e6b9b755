"""Extensions by other packages: the example in the docs is installed, and trains."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TIMEOUT_S, Mlx
from forkserver import Commands

from mlx_runtime.distributed.messages import encode
from mlx_runtime.runs.checkpoints import store

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "extending"
PAGE = ROOT / "docs" / "guides" / "extending.md"

Run = Callable[..., str]
"""Calls `mlx` in the experiment, and returns what it prints."""

Losses = Callable[[dict[str, str], str], list[str]]
"""Returns the loss of each epoch of a run: `losses(settings, "experiment")`."""

EXPERIMENT = """
from dataclasses import dataclass

import mlx_runtime
import torch
from torchmetrics import MeanMetric, SumMetric
from mlx_runtime.losses import Mean
from more_mlx.csv_folder import CSVFolder


class Net(torch.nn.Sequential):
    def __init__(self, width: int = 8):
        super().__init__(torch.nn.Linear(2, width), torch.nn.Tanh(), torch.nn.Linear(width, 2))


class Datasets:
    def __init__(self, train: CSVFolder = CSVFolder("rows", batch_size=4)):
        self.train = train


class Models:
    map_params_to_optimizers = {"net": "adam"}

    def __init__(self, net: Net = Net()):
        self.net = net


class Optimizers:
    def __init__(self, adam: torch.optim.Adam = torch.optim.Adam(mlx_runtime.DUMMY_PARAMS, lr=0.1)):
        self.adam = adam


class Losses:
    def __init__(self, entropy: Mean = Mean(torch.nn.functional.cross_entropy)):
        self.entropy = entropy


class Metrics:
    def __init__(self, rows: SumMetric = SumMetric()):
        self.rows = rows


@dataclass
class TrainConfig(mlx_runtime.TrainConfig):
    num_epochs: int = 4
    gradient_clip: float | None = 0.5


class Experiment(mlx_runtime.BaseModule):
    def __init__(self, cfg: TrainConfig, datasets: Datasets, models: Models, losses: Losses,
                 optimizers: Optimizers, metrics: Metrics):
        self.cfg, self.datasets, self.models, self.losses = cfg, datasets, models, losses
        self.optimizers, self.metrics = optimizers, metrics

    def worker_loop(self, shards):
        net = mlx_runtime.prepare_model(self.models.net)
        loader = shards.train.iter_torch_batches()
        for epoch in range(self.cfg.start_epoch, self.cfg.num_epochs):
            self.reset_all_metrics_and_losses()
            rows = []
            for number, batch in enumerate(loader):
                loss = self.losses.entropy(net(batch["x"]), batch["y"])
                self.backward(loss)
                self.optimizer_step()
                self.metrics.rows.update(len(batch["x"]))
                rows += batch["x"][:, 1].tolist()
                self.save_metrics_and_losses(number, epoch)
            print("read", epoch, hash(tuple(rows)), len(rows))
            self.save_checkpoint(epoch, {})

    def eval_loop(self, shards):
        with torch.no_grad():
            for number, batch in enumerate(shards.train.iter_torch_batches()):
                self.losses.entropy(self.models.net(batch["x"]), batch["y"])
                self.save_losses(number, 0)
"""

SPLIT = "cfg.strategy=more_mlx.split.Split"


@pytest.fixture(scope="session")
def mlx(commands: Commands, environment: dict[str, str]) -> Mlx:
    """The command, also with the example on the path: the server of commands has not imported it."""

    def run(folder: Path, *arguments: str, **settings: str) -> "subprocess.CompletedProcess[str]":
        return commands.run(folder, [*arguments], environment | settings, TIMEOUT_S)

    return run


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
    """An experiment that reads a folder of CSV files, with a model that can be split."""
    folder = tmp_path_factory.mktemp("extended") / "layers"
    shutil.copytree(baked, folder, ignore=shutil.ignore_patterns("runs", "conf.yaml"))
    (folder / "src" / "experiment.py").write_text(EXPERIMENT)
    (folder / "rows").mkdir()
    for number in range(2):
        lines = ["a,b,label", *(f"{number}.{row},{row},{row % 2}" for row in range(11))]
        (folder / "rows" / f"{number}.csv").write_text("\n".join(lines))
    return folder


def variables(installed: Path, storage: Path) -> dict[str, str]:
    """Environment variables with which commands find the example, and keep their runs in a folder."""
    path = os.pathsep.join([str(installed), os.environ.get("PYTHONPATH", "")])
    return {"PYTHONPATH": path, "MLX_STORAGE": str(storage)}


@pytest.fixture
def settings(installed: Path, tmp_path: Path) -> dict[str, str]:
    return variables(installed, tmp_path)


@pytest.fixture
def run(extended: Path, mlx: Mlx, settings: dict[str, str]) -> Run:
    """Call `mlx` there, with the example on the path."""
    return caller(extended, mlx, settings)


@pytest.fixture(scope="session")
def losses(commands: Commands, environment: dict[str, str]) -> Losses:
    script = "import sys, mlx_runtime; print(*mlx_runtime.open_run(sys.argv[1]).metrics()['train/entropy'].dropna())"

    def losses(settings: dict[str, str], name: str) -> list[str]:
        done = commands.run(ROOT, [f"{name}/run_001"], environment | settings, TIMEOUT_S, script)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    return losses


@pytest.fixture(scope="module")
def ours(
    extended: Path, mlx: Mlx, installed: Path, losses: Losses, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, list[str]]:
    """What a run of the local engine in a folder prints, and its losses."""
    settings = variables(installed, tmp_path_factory.mktemp("ours"))
    run = caller(extended, mlx, settings)
    return run("train", "run", "cfg.engine=local", "cfg.num_epochs=2"), losses(settings, "experiment")


@pytest.fixture(scope="module")
def whole(extended: Path, mlx: Mlx, installed: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What a split run of two workers prints, and the folder of its runs."""
    storage = tmp_path_factory.mktemp("whole")
    return caller(extended, mlx, variables(installed, storage))("train", "run", SPLIT, "cfg.name=split"), storage


def caller(folder: Path, mlx: Mlx, settings: dict[str, str]) -> Run:
    def call(*words: str, **changed: str) -> str:
        done = mlx(folder, *words, **(settings | changed))
        assert done.returncode == 0, done.stdout + done.stderr
        return str(done.stdout)

    return call


@pytest.mark.local
def test_an_engine_and_a_kind_of_dataset_train_as_ours_do(
    run: Run, settings: dict[str, str], losses: Losses, ours: tuple[str, list[str]], tmp_path: Path
) -> None:
    here, expected = ours
    there = run("train", "run", "cfg.engine=more_mlx.engine.Subprocesses", "cfg.num_epochs=2", "cfg.name=other")
    assert "workers   2 DDP workers on" in there
    assert "(cfg.engine=more_mlx.engine.Subprocesses)" in there
    assert "local engine" in here

    assert len(expected) == 2
    assert losses(settings, "other") == expected
    for rank in range(2):  # 11 of the 22 rows for each, in steps of 4; each worker writes its own log
        (log,) = (tmp_path / "other" / "run_001").rglob(f"*{rank}.log")
        assert log.read_text().count(" 11\n") == 2


@pytest.mark.examples
def test_a_run_goes_on_with_another_engine(
    run: Run, settings: dict[str, str], losses: Losses, ours: tuple[str, list[str]]
) -> None:
    run("train", "run", "cfg.engine=more_mlx.engine.Subprocesses", "cfg.num_epochs=1", "cfg.name=two")
    run("train", "run", "--resume=two/run_001", "cfg.engine=local", "cfg.num_epochs=2")
    assert losses(settings, "two") == ours[1]


@pytest.mark.examples
def test_runs_live_in_a_storage_of_another_package(
    run: Run, settings: dict[str, str], losses: Losses, ours: tuple[str, list[str]], tmp_path: Path
) -> None:
    database = f"cfg.storage_path=sqlite://{tmp_path}/runs.db"
    run("train", "run", "cfg.engine=local", database, "cfg.num_epochs=1", "cfg.name=two")
    run("train", "run", f"--resume=sqlite://{tmp_path}/runs.db/two/run_001", "cfg.num_epochs=2", database)
    assert losses(settings, f"sqlite://{tmp_path}/runs.db/two") == ours[1]
    assert [item.name for item in tmp_path.iterdir()] == ["runs.db"]
    rows = json.loads(run("xp", "ls", "two", "--json", MLX_STORAGE=f"sqlite://{tmp_path}/runs.db"))
    assert [row["status"] for row in rows] == ["SUCCEEDED"]


@pytest.mark.local
def test_an_engine_refuses_what_it_cannot_train(extended: Path, mlx: Mlx, settings: dict[str, str]) -> None:
    words = ["cfg.engine=more_mlx.engine.Subprocesses", "cfg.elastic.min_workers=1"]
    done = mlx(extended, "train", "run", *words, **settings)
    line = "cfg.engine=more_mlx.engine.Subprocesses cannot train this: the number of its workers is fixed"
    assert (done.returncode, done.stderr) == (1, f"error: {line}; use cfg.engine=auto\n")


def latest(folder: Path) -> dict[str, Any]:
    """The state in the newest checkpoint of a run, read without the strategy that saved it."""
    return store.read(str(max((folder / "run_001" / "checkpoints").glob("epoch_*"))))


def orders(printed: str) -> Counter[str]:
    """What workers read, in which order: the lines that they print, and how many print the same."""
    return Counter(line for line in printed.splitlines() if line.startswith("read "))


@pytest.mark.local
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_strategy_splits_a_model(run: Run, whole: tuple[str, Path], tmp_path: Path, replicas: int) -> None:
    """The result is that of as many workers as there are replicas, each with the whole model."""
    there, storage = whole
    if replicas == 2:
        there, storage = run("train", "run", SPLIT, "cfg.start_workers=4", "cfg.name=split"), tmp_path
    here = run("train", "run", f"cfg.start_workers={replicas}", "cfg.name=whole")
    assert f"workers   {2 * replicas} Split workers on" in there
    assert "42 parameters" in there
    assert f"train     22 rows in {6 // replicas} steps, global batch {4 * replicas}" in there
    assert orders(there) == dict.fromkeys(orders(here), 2)
    assert len(orders(here)) == 4 * replicas

    one, other = latest(storage / "split"), latest(tmp_path / "whole")
    assert one["numbers"]["latest"]["train/rows"] == 22
    assert list(one["models"]["net"]) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert sorted(one["optimizers"]["adam"]["state"]) == [0, 1, 2, 3]
    for group in ("models", "optimizers"):
        torch.testing.assert_close(one[group], other[group], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        one["numbers"]["latest"]["train/entropy"], other["numbers"]["latest"]["train/entropy"], rtol=1e-5, atol=0
    )


@pytest.mark.examples
def test_a_split_run_goes_on_as_if_it_had_not_been_interrupted(
    run: Run, whole: tuple[str, Path], tmp_path: Path
) -> None:
    """Within an epoch, and bit by bit; under another strategy and number of replicas, it reads each row once."""
    run("train", "run", SPLIT, "cfg.name=halves", "cfg.max_steps=8")
    run("train", "run", "--resume=halves/run_001", SPLIT, "cfg.max_steps=null")
    one, other = latest(tmp_path / "halves"), latest(whole[1] / "split")
    for group in ("models", "optimizers", "ranks"):
        assert encode(one[group]) == encode(other[group])

    run("train", "run", SPLIT, "cfg.start_workers=4", "cfg.name=pairs", "cfg.num_epochs=2", "cfg.max_steps=4")
    run("train", "run", "--resume=pairs/run_001", "cfg.strategy=ddp", "cfg.start_workers=1", "cfg.max_steps=null")
    assert latest(tmp_path / "pairs")["numbers"]["latest"]["train/rows"] == 22


@pytest.mark.examples
def test_the_checkpoint_of_a_split_run_needs_no_strategy(
    whole: tuple[str, Path], extended: Path, mlx: Mlx, installed: Path, commands: Commands, environment: dict[str, str]
) -> None:
    storage = whole[1]
    settings = variables(installed, storage)
    code = (
        "import mlx_runtime\n"
        f"models = mlx_runtime.open_run({str(storage / 'split' / 'run_001')!r}).load_models()\n"
        "print([round(float(item.sum()), 6) for item in models.net.parameters()])"
    )
    done = commands.run(extended, [], environment | settings, TIMEOUT_S, code)
    weights = latest(storage / "split")["models"]["net"].values()
    assert done.stdout == f"{[round(float(item.sum()), 6) for item in weights]}\n", done.stderr
    call = caller(extended, mlx, settings)
    alone = call("train", "eval", "split/run_001", "cfg.strategy=ddp", "cfg.start_workers=0")
    halves = call("train", "eval", "split/run_001")
    (value,) = [line for line in alone.splitlines() if line.startswith("train/entropy")]
    assert value in halves


@pytest.mark.local
@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["cfg.start_workers=3"],
            "override cfg.start_workers=3: cfg.start_workers=3 is not a multiple of 2, as "
            "cfg.strategy=more_mlx.split.Split needs",
        ),
        (
            ["cfg.precision=fp16"],
            "override cfg.strategy=more_mlx.split.Split: cfg.strategy=more_mlx.split.Split cannot train this: "
            "it has no scaler for cfg.precision=fp16",
        ),
        (
            ["cfg.strategy=more_mlx.split.Spilt"],
            "cfg.strategy=more_mlx.split.Spilt cannot be imported: module 'more_mlx.split' has no attribute 'Spilt'",
        ),
        (
            ["cfg.strategy=more_mlx.heartbeat.Heartbeat"],
            "cfg.strategy=more_mlx.heartbeat.Heartbeat has no method refusal, which every strategy has",
        ),
    ],
)
def test_what_a_strategy_cannot_train_is_refused_before_there_is_a_run(
    extended: Path, mlx: Mlx, settings: dict[str, str], tmp_path: Path, words: list[str], line: str
) -> None:
    done = mlx(extended, "train", "run", SPLIT, *words, **settings)
    assert (done.returncode, done.stderr) == (1, f"error: {line}\n")
    assert not (tmp_path / "experiment").exists()


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
    words = [
        "+cfg.callbacks.heartbeat={_target_: more_mlx.heartbeat.Heartbeat, every_s: 0.1}",
        "cfg.start_workers=0",
        "cfg.num_epochs=2",
    ]
    printed = run("train", "run", *words)
    assert "SUCCEEDED after 2 checkpoints" in printed
    assert list(tmp_path.rglob("heartbeat"))


@pytest.mark.pure
def test_the_guide_links_these_files_and_shows_parts_of_them() -> None:
    page = PAGE.read_text()
    files = [file for file in EXAMPLE.rglob("*.py") if file.name != "__init__.py" and "build" not in file.parts]
    for file in files:
        assert f"(../examples/extending/more_mlx/{file.name})" in page, file.name
    texts = [file.read_text() for file in (*files, EXAMPLE / "pyproject.toml")]
    for block in re.findall(r"```(?:python|toml)\n(.*?)```", page, re.DOTALL):
        assert any(block in text for text in texts), block
