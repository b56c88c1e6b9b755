"""Tests that the job binds, and that its output is complete. Edit: add tests for what it promises."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

PROJECT = Path(__file__).parents[1]


def mlx(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "mlx_runtime", *arguments], cwd=PROJECT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the job in a single process, stored separately from real data."""
    storage = tmp_path_factory.mktemp("storage")
    mlx("data", "run", "cfg.start_workers=0", f"cfg.storage_path={storage}", "cfg.path=test", "images.size=16")
    return storage / "test"


def test_conf_yaml_matches_the_code(made: Path) -> None:
    mlx("data", "bind", "--check")


def test_the_folder_is_complete(made: Path) -> None:
    record = json.loads((made / "job.json").read_text())
    assert record["status"] == "SUCCEEDED"
    assert record["files"] == len([path for path in made.rglob("*") if path.is_file()]) - 1  # without job.json itself


def test_every_image_is_there_once(made: Path) -> None:
    index = json.loads((made / "index.json").read_text())
    images = [np.load(file, mmap_mode="r") for file in sorted(made.glob("*_images.npy"))]
    labels = [np.load(file, mmap_mode="r") for file in sorted(made.glob("*_labels.npy"))]
    assert [len(shard) for shard in images] == [len(shard) for shard in labels] == index["rows"]
    assert sum(index["rows"]) == 1797
    assert {shard.shape[1:] for shard in images} == {(16, 16)}
