"""The template of data jobs: generated in every way, then linted, type-checked, bound, run by make, and tested.

shards/
    main.py  src/job.py         a dozen lines, and the user's code
    storage/data/shards/        output of `make run`: job.json, index.json, shard_0000_images.npy, …
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, Mlx
from test_generate import RECORD, cookiecutter, files, repository  # noqa: F401 - a fixture
from test_template import check, make

pytestmark = pytest.mark.process

FILES = [
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


@pytest.fixture
def shards(baked_job: Path, tmp_path: Path) -> Path:
    """A generated data job for a single test."""
    return Path(shutil.copytree(baked_job, tmp_path / "shards"))


def test_every_way_makes_the_same_files(mlx: Mlx, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    origin = request.getfixturevalue("repository")
    (tmp_path / "url").mkdir()
    done = cookiecutter(origin, tmp_path / "url", "--no-input", "--directory", "data_job", "job_name=alpha")
    assert done.returncode == 0, done.stderr
    done = cookiecutter(str(ROOT), tmp_path / "prompted", "--directory", "data_job", answers="alpha\n")
    assert done.returncode == 0, done.stderr
    assert "Name of the data job" in done.stdout
    assert mlx(tmp_path, "data", "new", "alpha", "-o", "mlx").returncode == 0
    for way in ("url", "prompted", "mlx"):
        assert files(tmp_path / way / "alpha") == sorted([RECORD, *FILES]), way
        for name in ("src/job.py", "README.md", "pyproject.toml"):
            assert (tmp_path / way / "alpha" / name).read_text() == (tmp_path / "url" / "alpha" / name).read_text()
    assert f"\nRUNTIME ?= mlx-runtime @ git+{origin}\\#subdirectory=runtime\n" in makefile(tmp_path / "url")
    for way in ("prompted", "mlx"):
        assert f"\nRUNTIME ?= {ROOT}/runtime\n" in makefile(tmp_path / way)


def makefile(folder: Path) -> str:
    return (folder / "alpha" / "Makefile").read_text()


@pytest.mark.cluster
def test_it_binds_and_runs_in_parallel_by_make(shards: Path, environment: dict[str, str]) -> None:
    done = make(shards, environment, "bind")
    assert (done.returncode, done.stdout) == (0, "wrote src/conf.yaml\n"), done.stderr
    assert (shards / "src" / "conf.yaml").read_text().startswith("# yaml-language-server: $schema=conf.schema.json\n")
    assert "the source of truth for `mlx data run`" in (shards / "src" / "conf.yaml").read_text()
    done = make(shards, environment, "run", "ARGS=images.size=16 images.per_shard=500")
    assert (done.returncode, done.stderr) == (0, "")
    made = shards / "storage" / "data" / "shards"
    assert done.stdout.splitlines()[-1] == f"folder    {made}"
    assert "workers   2 tasks at a time in embedded Ray on" in done.stdout
    names = [f"shard_{number:04d}_{part}.npy" for number in range(4) for part in ("images", "labels")]
    assert files(made) == ["index.json", "job.json", *names]
    assert json.loads((made / "index.json").read_text()) == {"size": 16, "rows": [500, 500, 500, 297]}
    images = np.load(made / "shard_0003_images.npy", mmap_mode="r")
    assert (images.shape, images.dtype, images.max()) == ((297, 16, 16), np.uint8, 255)


@pytest.mark.examples
def test_its_own_tests_pass(shards: Path, environment: dict[str, str], mlx: Mlx) -> None:
    assert mlx(shards, "data", "bind").returncode == 0
    done = make(shards, environment, "test")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout


@pytest.mark.examples
def test_it_is_linted_formatted_and_typed(shards: Path) -> None:
    check(shards)
