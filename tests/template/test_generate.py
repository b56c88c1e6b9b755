"""Generating an experiment: with cookiecutter from a folder and from a git URL, and with `mlx`."""

import hashlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, Mlx

pytestmark = pytest.mark.process

FILES = [
    ".dockerignore",
    ".env.example",
    ".gitignore",
    ".rayignore",
    "Dockerfile",
    "Makefile",
    "README.md",
    "constraints.txt",
    "dashboard.py",
    "environment.yml",
    "main.py",
    "notebook.ipynb",
    "pyproject.toml",
    "requirements.txt",
    "src/__init__.py",
    "src/config.py",
    "src/datasets.py",
    "src/experiment.py",
    "src/losses.py",
    "src/metrics.py",
    "src/models.py",
    "src/tools.py",
    "tests/test_experiment.py",
]

JAX_FILES = [name for name in FILES if name != "notebook.ipynb"]

JOB_FILES = [
    ".env.example",
    ".gitignore",
    ".rayignore",
    "Makefile",
    "README.md",
    "constraints.txt",
    "main.py",
    "pyproject.toml",
    "requirements.txt",
    "src/__init__.py",
    "src/job.py",
    "tests/test_job.py",
]

RECORD = ".mlx/template.json"
"""Written by a hook, for `mlx train upgrade`."""


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def cookiecutter(source: str, folder: Path, *options: str, answers: str = "") -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "cookiecutter", source, "-o", str(folder), *options]
    home = folder.with_name("home")
    home.mkdir(exist_ok=True)
    environment = {"HOME": str(home), "PATH": "/usr/bin:/bin"}
    return subprocess.run(command, input=answers, capture_output=True, text=True, timeout=120, env=environment)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The working tree of this repository, as a separate git repository."""
    folder = tmp_path_factory.mktemp("origin") / "origin.git"
    tracked = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    for name in tracked.stdout.splitlines():
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name, follow_symlinks=False)
    for command in (["init", "-q"], ["add", "-A"], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a"]):
        subprocess.run(["git", *command], cwd=folder, check=True)
    return f"file://{folder}"


@pytest.mark.parametrize(
    ("template", "wanted", "question", "ways"),
    [
        ("", FILES, "experiment", (("new",), ("train", "new"))),
        ("data_job", JOB_FILES, "data job", (("data", "new"),)),
    ],
)
def test_every_way_makes_the_same_files(
    template: str,
    wanted: list[str],
    question: str,
    ways: tuple[tuple[str, ...], ...],
    mlx: Mlx,
    repository: str,
    tmp_path: Path,
) -> None:
    (tmp_path / "url").mkdir()
    directory = ("--directory", template) if template else ()
    named = f"{question.split()[-1]}_name=alpha"
    done = cookiecutter(repository, tmp_path / "url", "--no-input", *directory, named)
    assert done.returncode == 0, done.stderr
    done = cookiecutter(str(ROOT), tmp_path / "prompted", *directory, answers="alpha\n")
    assert done.returncode == 0, done.stderr
    assert f"Name of the {question}" in done.stdout
    for command in ways:
        assert mlx(tmp_path, *command, "alpha", "-o", command[0]).returncode == 0
    for way in ("url", "prompted", *(command[0] for command in ways)):
        assert files(tmp_path / way / "alpha") == sorted([RECORD, *wanted]), way
        for name in {*wanted} - {"Makefile"}:
            assert (tmp_path / way / "alpha" / name).read_bytes() == (tmp_path / "url" / "alpha" / name).read_bytes()
        if way != "url":
            assert f"\nRUNTIME ?= {ROOT}/runtime\n" in makefile(tmp_path / way)
    assert f"\nRUNTIME ?= mlx-runtime @ git+{repository}\\#subdirectory=runtime\n" in makefile(tmp_path / "url")


def test_every_way_makes_the_same_files_in_jax(mlx: Mlx, repository: str, tmp_path: Path) -> None:
    """Those of the template for torch, from links to them, except the notebook; they name the same runtime."""
    (tmp_path / "url").mkdir()
    done = cookiecutter(repository, tmp_path / "url", "--directory", "jax", "--no-input", "experiment_name=alpha")
    assert done.returncode == 0, done.stderr
    assert mlx(tmp_path, "train", "new", "alpha", "--jax", "-o", "jax").returncode == 0
    assert mlx(tmp_path, "train", "new", "alpha", "-o", "torch").returncode == 0
    for way in ("url", "jax"):
        assert files(tmp_path / way / "alpha") == sorted([RECORD, *JAX_FILES])
        assert not any(path.is_symlink() for path in (tmp_path / way).rglob("*"))
    differing = {"README.md", "requirements.txt", "src/config.py", "src/tools.py"}
    differing |= {f"src/{name}.py" for name in ("experiment", "losses", "models")}
    for name in {*JAX_FILES} - {"Makefile"}:
        text = (tmp_path / "jax" / "alpha" / name).read_text()
        assert text == (tmp_path / "url" / "alpha" / name).read_text()
        assert (text != (tmp_path / "torch" / "alpha" / name).read_text()) == (name in differing), name
        assert "cookiecutter" not in text, name
        assert "<<" not in text, name
    assert f"\nRUNTIME ?= mlx-runtime @ git+{repository}\\#subdirectory=runtime\n" in makefile(tmp_path / "url")
    runtime = re.search(r"^RUNTIME \?= (.*)$", makefile(tmp_path / "jax"), re.MULTILINE)
    assert runtime is not None
    assert Path(runtime[1]).samefile(ROOT / "runtime")
    record = json.loads((tmp_path / "jax" / "alpha" / RECORD).read_text())
    assert record["context"] == {"experiment_name": "alpha", "variant": "jax"}


def makefile(folder: Path) -> str:
    return (folder / "alpha" / "Makefile").read_text()


def test_no_template_syntax_is_left(baked: Path) -> None:
    for name in FILES:
        text = (baked / name).read_text()
        assert "cookiecutter" not in text, name
        assert "<<" not in text, name


def test_the_version_of_the_template_is_recorded_and_is_the_runtimes(baked: Path) -> None:
    import mlx_runtime

    record = json.loads((baked / RECORD).read_text())
    assert (record["version"], record["context"]) == (mlx_runtime.__version__, {"experiment_name": "digits"})
    assert [*record["files"]] == FILES
    for name in FILES:
        content, item = (baked / name).read_bytes(), record["files"][name]
        digest = {"sha256": hashlib.sha256(content).hexdigest()}
        lines = {"executable": False, "lines": content.decode().splitlines(keepends=True)}
        assert item == (digest if name.startswith(("src/", "tests/", "notebook")) else lines)


@pytest.mark.parametrize("name", ["9lives", "a/b"])
def test_a_wrong_name_leaves_nothing_behind(mlx: Mlx, tmp_path: Path, name: str) -> None:
    cure = "use up to 100 letters, digits, - and _, starting with a letter"
    message = f"error: {name!r} is not a valid experiment name; {cure}\n"
    done = mlx(tmp_path, "train", "new", "--", name)
    assert (done.returncode, done.stderr) == (2, message)
    assert list(tmp_path.iterdir()) == []
    if name != "9lives":
        return  # the hook checks the same; for others, cookiecutter creates folders or takes its default before
    done = cookiecutter(str(ROOT), tmp_path / "out", "--no-input", f"experiment_name={name}")
    assert done.returncode != 0
    assert message in done.stderr
    assert {path.name for path in tmp_path.iterdir()} <= {"home", "out"}
    assert not (tmp_path / "out").exists() or list((tmp_path / "out").iterdir()) == []


def test_an_existing_folder_is_kept(mlx: Mlx, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "precious").write_text("x")
    done = mlx(tmp_path, "train", "new", "mine")
    assert done.returncode == 2
    assert done.stderr == "error: mine already exists; choose another name, or another folder with -o\n"
    assert files(tmp_path / "mine") == ["precious"]


@pytest.mark.parametrize("template", ["", "data_job"])
def test_only_what_is_rendered_is_recorded(baked: Path, tmp_path: Path, template: str) -> None:
    """Not the files of a user over which it is rendered, and no newer template in place of the one before."""
    name = "digits-shards" if template else "digits"
    with_record, mine, cloned = (tmp_path / way / name for way in ("with_record", "mine", "cloned"))
    shutil.copytree(baked, with_record)
    (with_record / RECORD).write_text("that of an older template")
    mine.mkdir(parents=True)
    (mine / ".env").write_text("TOKEN=secret\n")
    subprocess.run(["git", "init", "-q", cloned], check=True)
    for folder in (with_record, mine, cloned):
        done = cookiecutter(str(ROOT / template), folder.parent, "--no-input", "-f")
        assert done.returncode == 0, done.stderr
        assert (folder / "Makefile").is_file()
    assert (with_record / RECORD).read_text() == "that of an older template"
    assert not (mine / RECORD).exists()
    recorded = json.loads((cloned / RECORD).read_text())["files"]
    assert [*recorded] == [path for path in files(cloned) if not path.startswith((".git/", ".mlx/"))]


def test_the_templates_have_the_same_hook() -> None:
    """A copy, not a link: a zip file has none."""
    hooks = [ROOT / template / "hooks" / "post_gen_project.py" for template in ("", "data_job")]
    assert hooks[0].read_text() == hooks[1].read_text()
    assert not any(hook.is_symlink() for hook in hooks)
