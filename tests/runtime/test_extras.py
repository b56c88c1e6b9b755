"""Optional dependencies: if one is missing, its features end with one line, and all others work."""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import MAIN, ROOT, TIMEOUT_S, Mlx
from forkserver import Commands
from hidden import distribution, hide, hiding

from mlx_runtime.companions.notebook.backends import BACKENDS
from mlx_runtime.extras import EXTRAS

pytestmark = pytest.mark.process

Without = Callable[..., "subprocess.CompletedProcess[str]"]

METRIC = ("--metric", "val/mse", "--mode", "min")
SHORT = ("cfg.start_workers=0", "cfg.num_epochs=1")


@pytest.fixture
def without(commands: Commands, environment: dict[str, str]) -> Without:
    """`without("optuna", folder, "train", "sweep", ...)` runs a command that cannot import a library."""

    def run(library: str, folder: Path, *arguments: str, script: str = MAIN) -> "subprocess.CompletedProcess[str]":
        return commands.run(folder, [*arguments], environment, TIMEOUT_S, hiding([library]) + script)

    return run


@pytest.fixture(scope="module")
def swept(mlx: Mlx, make_in: Callable[[str, Path], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An experiment with a sweep over a grid, by a new interpreter that could not import optional libraries."""
    folder = make_in("faults", tmp_path_factory.mktemp("swept"))
    optional = {library for library, extra in EXTRAS.items() if extra != "train"}
    hidden = hide(tmp_path_factory.mktemp("hidden"), optional - {"jinja2"})  # which torch imports
    done = mlx(folder, "train", "sweep", "cfg.seed=1,2", "--parallel", "1", *METRIC, *SHORT, **hidden)
    assert done.returncode == 0, done.stderr
    return folder


def test_a_run_and_a_plain_grid_need_none(swept: Path) -> None:
    assert len([*swept.glob("runs/faults/*/metrics.jsonl")]) == 2


@pytest.mark.parametrize(
    ("library", "command", "line"),
    [
        ("marimo", ("xp", "ui"), 'the page needs marimo; type: pip install "mlx-runtime[ui]"'),
        (
            "optuna",
            ("train", "sweep", "cfg.seed=3,4", "--search=random", *METRIC),
            'a sweep other than a plain grid needs optuna; type: pip install "mlx-runtime[sweeps]"',
        ),
        (
            "sklearn",
            ("train", "run", "cfg.cross_validation.folds=3", "cfg.cross_validation.fold=0"),
            'a cross-validation without a splitter needs sklearn; type: pip install "mlx-runtime[sweeps]"',
        ),
        (
            "plotly",
            ("xp", "report", "faults", "run_001"),
            'a report needs plotly; type: pip install "mlx-runtime[views]"',
        ),
        (
            "huggingface_hub",
            ("xp", "ls", "hf://alice/faults"),
            'hf://alice/faults needs huggingface_hub; type: pip install "mlx-runtime[hub]"',
        ),
    ],
)
def test_what_needs_a_missing_library_ends_with_one_line(
    library: str, command: tuple[str, ...], line: str, swept: Path, without: Without
) -> None:
    """It exits with 1 and writes no run."""
    before = sorted(swept.rglob("run.json"))
    done = without(library, swept, *command, *(SHORT if command[0] == "train" else ()))
    assert (done.returncode, done.stderr) == (1, f"error: {line}\n"), done.stdout
    assert sorted(swept.rglob("run.json")) == before


@pytest.mark.parametrize("library", ["optuna", "sklearn"])
def test_the_report_of_a_plain_grid_has_no_charts_without(library: str, swept: Path, without: Without) -> None:
    done = without(library, swept, "xp", "report", "faults", "sweep_001", "-o", "page.html")
    assert done.returncode == 0, done.stderr
    page = (swept / "page.html").read_text()
    line = f"drawing the charts of a sweep needs {library}; type: pip install &#34;mlx-runtime[sweeps]&#34;"
    assert (line in page, page.count("SUCCEEDED") >= 3) == (True, True)


@pytest.mark.parametrize("library", BACKENDS)
def test_so_does_a_backend_of_functions(library: str, without: Without, tmp_path: Path) -> None:
    done = without(library, tmp_path, script=f"from mlx_runtime import Trainer\nTrainer(backend={library!r})\n")
    line = f'backend={library!r} needs {library}; type: pip install "mlx-runtime[{library}]"'
    assert done.stderr.splitlines()[-1] == f"mlx_runtime.errors.MissingLibraryError: {line}"


@pytest.mark.s3
def test_so_does_a_storage(experiment: Callable[[str], Path], without: Without, s3: str) -> None:
    folder = experiment("faults")
    done = without("botocore", folder, "train", "run", f"cfg.storage_path={s3.format('none')}", *SHORT)
    line = 'storage on S3 needs botocore; type: pip install "mlx-runtime[stores]"'
    assert (done.returncode, done.stderr) == (1, f"error: {line}\n"), done.stdout
    assert list(folder.rglob("run.json")) == []


def test_a_missing_library_that_conf_yaml_names_is_a_line_of_its_problems(swept: Path, without: Without) -> None:
    override = "cfg.cross_validation.splitter={_target_: sklearn.model_selection.KFold}"
    folds = ("cfg.cross_validation.folds=3", "cfg.cross_validation.fold=0")
    done = without("sklearn", swept, "train", "run", *folds, override)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert done.stderr.endswith("no module named 'sklearn'; type: pip install \"mlx-runtime[sweeps]\"\n")


@pytest.mark.pure
def test_each_library_is_in_its_extra() -> None:
    text = (ROOT / "runtime" / "pyproject.toml").read_text().partition("optional-dependencies]")[2].partition("\n[")[0]
    extras = dict(re.findall(r"^(\w+) = \[(\".*?\")\]", text, re.MULTILINE))
    names = {extra: set(re.findall(r'"([\w-]+)[\[>]', listed)) for extra, listed in extras.items()}
    for library, extra in EXTRAS.items():
        assert distribution(library) in names[extra]
    assert extras["all"] == f'"mlx-runtime[{",".join(sorted(extras.keys() - {"all", *BACKENDS}))}]"'
