"""Modules loaded by a plain run of the template: the core, and no companions."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

import pytest
from conftest import TIMEOUT_S
from forkserver import Commands
from test_layers import PACKAGE

from mlx_runtime.companions import COMPANIONS

pytestmark = pytest.mark.process

LIMITS = {0: (82, 14_228), 2: (92, 15_739)}
"""Modules and lines of a run in one process, and of all processes of one with two local workers. The goals are 60 and
11,000, and 75 and 13,000; a change that raises these figures says why."""

ONLY_SOME_RUNS = (
    *("config.binding", "distributed.messages", "extras", "runs.queries"),
    *("workers.local", "companions.notebook.links", "workers.fork_server", "workers.deadlocks"),
    *("loop.replicas", "loop.weighting"),
)
"""The beginnings of names of modules that a plain run does without, besides companions."""

SCRIPT = """
import runpy, sys
sys.path.insert(0, ".")
import src.experiment
declared = [name for name in ("torch.optim", "torch._dynamo") if name in sys.modules]
runpy.run_path("main.py", run_name="__main__")
src.experiment.write(declared)
"""

OBSERVED = """

import json, os, sys
from pathlib import Path


def write(declared=()):
    loaded = [name for name in sys.modules if name.partition(".")[0] == "mlx_runtime"]
    (Path(os.environ["LOADED"]) / f"{os.getpid()}.json").write_text(json.dumps([declared, loaded]))


def observed(self, epoch):
    BaseModule.save_checkpoint(self, epoch)
    write()


Experiment.save_checkpoint = observed
"""
"""Appended to src/experiment.py: at the end of an epoch, each process that trains writes what it has loaded."""


Imports = Callable[[int], list[list[list[str]]]]


@pytest.fixture(scope="module")
def imports(bound: Path, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Imports:
    """Modules of torch that the experiment imports, and those of the package that a run has loaded, by process."""

    @cache
    def imports(workers: int) -> list[list[list[str]]]:
        folder = tmp_path_factory.mktemp("loaded")
        settings = environment | {"MLX_STORAGE": str(tmp_path_factory.mktemp("runs")), "LOADED": str(folder)}
        here = Path(shutil.copytree(bound, tmp_path_factory.mktemp("observed") / "digits"))
        with (here / "src" / "experiment.py").open("a") as file:
            file.write(OBSERVED)
        run = [f"cfg.start_workers={workers}", "cfg.num_epochs=1", "cfg.debug.limit_batches=2"]
        command = [sys.executable, "-c", SCRIPT, *run]
        done = subprocess.run(command, cwd=here, env=settings, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return [json.loads(path.read_text()) for path in folder.iterdir()]

    return imports


@pytest.fixture(scope="module")
def loaded(imports: Imports) -> list[str]:
    [(_, loaded)] = imports(0)
    return loaded


@pytest.mark.parametrize("workers", [pytest.param(0), pytest.param(2, marks=pytest.mark.local)])
def test_a_run_loads_little(imports: Imports, workers: int) -> None:
    processes = imports(workers)
    assert len(processes) == 1 + workers
    names = {name for _, loaded in processes for name in loaded}
    lines = {name: len(Path(str(sys.modules[name].__file__)).read_text().splitlines()) for name in found(names)}
    modules, most = LIMITS[workers]
    assert len(lines) <= modules
    assert sum(lines.values()) <= most, sorted(lines.items(), key=lambda item: -item[1])


def found(names: Iterable[str]) -> Iterable[str]:
    """Import modules here. Return their names."""
    for name in names:
        __import__(name)
    return names


@pytest.mark.parametrize("name", [*(f"companions.{name}" for name in COMPANIONS), *ONLY_SOME_RUNS])
def test_it_does_without(loaded: list[str], name: str) -> None:
    assert [item for item in loaded if item.startswith(f"mlx_runtime.{name}")] == []
    assert list(PACKAGE.glob(f"{name.replace('.', os.sep)}*")), "there is no such module"


def test_the_optimizers_of_an_experiment_are_declared_without_torchs_compiler(imports: Imports) -> None:
    """Its import takes a CPU second, in the driver of each run and in each command that reads `src`."""
    [(declared, _)] = imports(0)
    assert declared == ["torch.optim"]


@pytest.mark.examples
@pytest.mark.parametrize("name", COMPANIONS)
def test_a_companion_is_removed_with_its_folder_and_its_line(
    name: str, digits: Path, commands: Commands, environment: dict[str, str], tmp_path: Path
) -> None:
    package = tmp_path / "mlx_runtime"
    shutil.copytree(PACKAGE, package)  # with its bytecode
    shutil.rmtree(package / "companions" / name)
    registry = package / "companions" / "__init__.py"
    lines = registry.read_text().splitlines(keepends=True)
    kept = [line for line in lines if not line.startswith(f'    "{name}": ')]
    assert len(kept) == len(lines) - 1
    registry.write_text("".join(kept))

    def mlx(*words: str) -> subprocess.CompletedProcess[str]:
        return commands.run(digits, [*words], environment | {"PYTHONPATH": str(tmp_path)}, TIMEOUT_S)

    for words in (
        ("train", "bind"),
        ("train", "run", "cfg.start_workers=0", "cfg.debug.limit_batches=2", "cfg.num_epochs=1"),
        ("train", "run", "--resume=run_001", "cfg.start_workers=0", "cfg.num_epochs=2"),
    ):
        done = mlx(*words)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "SUCCEEDED" in mlx("xp", "ls").stdout
    for command in COMPANIONS[name].commands[:1]:
        assert "No such command" in mlx(*command.split()).stderr
