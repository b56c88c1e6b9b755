"""The generated experiment in JAX, as used by its owner: bound, trained, resumed, evaluated, checked."""

import re
import shutil
from pathlib import Path

import pytest
from conftest import Mlx
from test_template import check, make

pytestmark = pytest.mark.process

UNTYPED = tuple(
    f"{name}.*" for name in ("jax", "jaxlib", "msgpack", "optax", "orbax", "rich", "tensorstore", "treescope")
)
"""What Flax imports, which would take mypy most of a minute."""


@pytest.fixture(scope="module")
def jax_digits(mlx: Mlx, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The experiment, bound."""
    folder = tmp_path_factory.mktemp("jax") / "digits"
    assert mlx(folder.parent, "train", "new", "digits", "--jax").returncode == 0
    assert mlx(folder, "train", "bind").stdout == "wrote src/conf.yaml\n"
    return folder


@pytest.mark.examples
def test_the_commands_of_an_experiment_work(jax_digits: Path, mlx: Mlx) -> None:
    done = mlx(jax_digits, "train", "run", "cfg.num_epochs=2")
    assert (done.returncode, done.stderr) == (0, "")
    done = mlx(jax_digits, "train", "run", "--resume", "cfg.num_epochs=3")
    assert (done.returncode, done.stderr) == (0, "")
    accuracy = re.search(r"^test/accuracy +(\d\.\d{4})$", done.stdout, re.MULTILINE)
    assert accuracy is not None
    assert float(accuracy[1]) >= 0.9
    assert accuracy[0] in mlx(jax_digits, "train", "eval", "run_001", "cfg.start_workers=0").stdout
    refused = mlx(jax_digits, "train", "draw", "-o", "m.svg")
    assert "error: mlx train draw shows torch modules, and the models of this experiment are none" in refused.stderr


@pytest.mark.examples
def test_its_own_tests_pass(jax_digits: Path, environment: dict[str, str]) -> None:
    done = make(jax_digits, environment, "test")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout


@pytest.mark.examples
def test_it_is_linted_formatted_and_typed(jax_digits: Path, tmp_path: Path) -> None:
    check(Path(shutil.copytree(jax_digits, tmp_path / "digits", ignore=shutil.ignore_patterns("runs"))), *UNTYPED)
