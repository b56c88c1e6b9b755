"""The template of data jobs: linted, type-checked, bound, run by make, and tested.

shards/
    main.py  src/job.py         a dozen lines, and the user's code
    storage/data/shards/        output of `make run`: job.json, index.json, shard_0000_images.npy, …
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from conftest import Mlx
from test_generate import files
from test_template import check, make

pytestmark = pytest.mark.process


@pytest.fixture
def shards(baked_job: Path, tmp_path: Path) -> Path:
    """A generated data job for a single test."""
    return Path(shutil.copytree(baked_job, tmp_path / "shards"))


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
