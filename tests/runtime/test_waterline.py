"""Modules loaded by a plain run of the template: the core, and no companions."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import TIMEOUT_S
from forkserver import Commands
from test_layers import PACKAGE

from mlx_runtime.companions import COMPANIONS

pytestmark = pytest.mark.process

MAX_MODULES, MAX_LINES = 82, 13_980
"""Of a run in one process. The goal is 60 and 11,000; a change may lower these figures, not raise them."""

ONLY_SOME_RUNS = (
    *("config.binding", "distributed.messages", "extras", "runs.queries"),
    *("workers.local", "companions.notebook.links", "workers.fork_server", "workers.deadlocks"),
    *("loop.replicas", "loop.weighting"),
)
"""The beginnings of names of modules that a plain run does without, besides companions."""

SCRIPT = """
import json, runpy, sys
sys.path.insert(0, ".")
sys.argv = ["main.py", "cfg.start_workers=0", "cfg.num_epochs=1", "cfg.debug.limit_batches=2"]
import src.experiment
declared = [name for name in ("torch.optim", "torch._dynamo") if name in sys.modules]
runpy.run_path("main.py", run_name="__main__")
print(json.dumps([declared, [name for name in sys.modules if name.partition(".")[0] == "mlx_runtime"]]))
"""


@pytest.fixture(scope="module")
def imports(bound: Path, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """Modules of torch that the experiment imports, and those of the package that a run has loaded."""
    settings = environment | {"MLX_STORAGE": str(tmp_path_factory.mktemp("runs"))}
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=bound, env=settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found: list[list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def loaded(imports: list[list[str]]) -> list[str]:
    return imports[1]


def test_a_plain_run_loads_little(loaded: list[str]) -> None:
    lines = {name: len(Path(str(sys.modules[name].__file__)).read_text().splitlines()) for name in found(loaded)}
    assert len(lines) <= MAX_MODULES
    assert sum(lines.values()) <= MAX_LINES, sorted(lines.items(), key=lambda item: -item[1])


def found(names: list[str]) -> list[str]:
    """Import modules here. Return their names."""
    for name in names:
        __import__(name)
    return names


@pytest.mark.parametrize("name", [*(f"companions.{name}" for name in COMPANIONS), *ONLY_SOME_RUNS])
def test_it_does_without(loaded: list[str], name: str) -> None:
    assert [item for item in loaded if item.startswith(f"mlx_runtime.{name}")] == []
    assert list(PACKAGE.glob(f"{name.replace('.', os.sep)}*")), "there is no such module"


def test_the_optimizers_of_an_experiment_are_declared_without_torchs_compiler(imports: list[list[str]]) -> None:
    """Its import takes a CPU second, in the driver of each run and in each command that reads `src`."""
    assert imports[0] == ["torch.optim"]


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
