"""Installations: the commands of README.md in a fresh clone, `make setup`, a wheel.

The fresh clone is first, because it takes longest.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import test_generate
from conftest import ROOT
from test_generate import files
from test_setup import downloads, site_packages
from test_template import make

sys.path.insert(0, str(ROOT / "docs"))
import readme

pytestmark = pytest.mark.install

COMMANDS = [
    line
    for block in re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    for line in block.splitlines()
]

NOT_HERE = {"make check", "make test", "make test-all", "make bench", "make launch RAY_ADDRESS=http://head:8265"}
"""Commands that do not run here: those that CI runs in a fresh clone, one that takes too long, one for a cluster."""


def outline(text: str) -> list[str]:
    """Return the output of a run without numbers and paths."""
    lines = [line for line in text.splitlines() if not re.match(r" *\d+/\d+ ", line)]
    return [re.sub(r"\d[\d,.]*(e-\d+)?", "N", re.sub(r"~?/\S+", "PATH", line)) for line in lines]


@pytest.fixture(scope="module")
def bare() -> dict[str, str]:
    """An environment that inherits nothing from this one, except how pip reaches its index, and what was downloaded.

    Modules are compiled when they are imported.
    """
    return downloads() | {"PATH": f"{Path(sys.base_prefix) / 'bin'}:/usr/bin:/bin"}


@pytest.mark.timeout(1800)
def test_the_commands_work_in_a_fresh_clone_with_an_empty_home(bare: dict[str, str], tmp_path: Path) -> None:
    """Clone, then run every command of README.md in order, in a new environment with an empty HOME."""
    home = tmp_path / "home"
    home.mkdir()
    environment = bare | {"HOME": str(home)}
    git = ["-c", "user.name=a", "-c", "user.email=a@b"]
    origin = tmp_path / "origin"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(origin)], check=True)
    changed = subprocess.run(
        ["git", "ls-files", "-com", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    for name in changed.stdout.splitlines():
        if (ROOT / name).exists():
            (origin / name).parent.mkdir(parents=True, exist_ok=True)
            (origin / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run(["git", "add", "-A"], cwd=origin, check=True)
    subprocess.run(["git", *git, "commit", "-q", "--allow-empty", "-m", "working tree"], cwd=origin, check=True)

    printed = {}
    folder = tmp_path
    for command in COMMANDS:
        if command in NOT_HERE:
            continue
        typed = command.replace("<this repository>", str(origin))
        typed = typed.replace('sweep ARGS="', 'sweep ARGS="cfg.num_epochs=1 ')  # six trials of up to 30 epochs
        inside = command.startswith(("make run", "make sweep", "make predict", "make prepare"))  # of the demo
        where = folder / "demo" / "digits" if inside else folder
        options = "PYTHON=../../.venv/bin/python" if inside else ""
        done = subprocess.run(
            ["bash", "-c", f"{typed} {options}"],
            cwd=where,
            env=environment,
            capture_output=True,
            text=True,
            timeout=1200,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        printed[command] = done.stdout
        if command.startswith("git clone"):
            folder = tmp_path / "mlx"
    shown = outline(readme.section("demo output").replace("…\n", ""))
    assert [line for line in outline(printed["make demo"]) if not line.startswith(("install", "starting"))] == shown
    assert (tmp_path / "my-experiment" / "main.py").is_file()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, as `make dist` builds it."""
    folder = tmp_path_factory.mktemp("wheel")
    command = ["make", "-s", "dist", f"PYTHON={sys.executable}", f"DIST={folder}"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=200)
    (wheel,) = folder.iterdir()
    return wheel


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for `sys.path` with the installed wheel, without its dependencies."""
    folder = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), str(wheel)]
    subprocess.run(command, check=True, timeout=200)
    return folder


def new(kind: str, installed: Path, parent: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    """Run `mlx KIND new beta` with the installed wheel, in an interpreter that cannot see the checkout."""
    script = f"import sys; sys.path.insert(0, {str(installed)!r}); from mlx_runtime.cli import mlx; mlx()"
    command = [sys.executable, "-c", script, kind, "new", "beta", "-o", str(parent), *options]
    return subprocess.run(command, capture_output=True, text=True, cwd=parent, timeout=60)


@pytest.mark.parametrize(
    ("kind", "template", "wanted"),
    [
        ("train", "<<cookiecutter.experiment_name>>", test_generate.FILES),
        ("train", "jax/<<cookiecutter.experiment_name>>", test_generate.JAX_FILES),
        ("data", "data_job/<<cookiecutter.job_name>>", test_generate.JOB_FILES),
    ],
)
def test_the_wheel_carries_the_templates_and_works_without_this_repository(
    kind: str, template: str, wanted: list[str], wheel: Path, installed: Path, tmp_path: Path
) -> None:
    """A project that it generates installs the same wheel, and the tested versions of torch and Ray."""
    carried = files(installed / "mlx_runtime" / "template" / template)
    assert [name for name in carried if "__pycache__" not in name] == wanted  # pip has compiled some of them
    done = new(kind, installed, tmp_path, *(["--jax"] if wanted == test_generate.JAX_FILES else []))
    assert (done.returncode, done.stderr) == (0, "")
    assert files(tmp_path / "beta") == sorted([test_generate.RECORD, *wanted])
    assert f"\nRUNTIME ?= mlx-runtime @ {wheel.as_uri()}\n" in (tmp_path / "beta" / "Makefile").read_text()
    assert (tmp_path / "beta" / "constraints.txt").read_text() == (ROOT / "constraints.txt").read_text()


@pytest.mark.timeout(1200)
def test_setup_makes_an_environment_of_its_own_where_the_runtime_is_not(
    wheel: Path, installed: Path, bare: dict[str, str], tmp_path: Path
) -> None:
    """Generate an experiment with the wheel, run `make setup` with a Python that has nothing, then `make bind`.

    The environment has the optional parts that the experiment promises, no others, and remembers the wheel.
    """
    assert new("train", installed, tmp_path).returncode == 0
    beta, environment = tmp_path / "beta", bare | {"HOME": str(tmp_path)}
    python = f"PYTHON={Path(sys.base_prefix) / 'bin' / 'python3'}"
    command = ["make", "-s", "setup", python]
    done = subprocess.run(command, cwd=beta, env=environment, capture_output=True, text=True, timeout=1000)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "installing into .venv (once; a minute or two)\n"
    done = make(beta, environment, "bind", python)
    assert (done.returncode, done.stdout) == (0, "wrote src/conf.yaml\n"), done.stderr
    packages = {path.name.partition("-")[0].lower() for path in site_packages(beta).glob("*.dist-info")}
    assert {"optuna", "scikit_learn", "plotly", "torch", "ray"} <= packages
    assert not {"botocore", "huggingface_hub", "transformers", "wandb"} & packages
    (torch_info,) = site_packages(beta).glob("torch-*.dist-info")
    assert f"torch=={torch_info.name[6:-10].partition('+')[0]}\n" in (beta / "constraints.txt").read_text()
    command = [str(beta / ".venv" / "bin" / "mlx"), "train", "new", "gamma"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert wheel.as_uri() in (tmp_path / "gamma" / "Makefile").read_text()
