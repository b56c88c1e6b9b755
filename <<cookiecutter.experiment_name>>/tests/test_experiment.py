"""Does the experiment bind, train and restore? Edit: add what your experiment promises."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROJECT = Path(__file__).parents[1]


def mlx(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "mlx_runtime", *arguments], cwd=PROJECT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One epoch, trained inside one process and stored apart from real runs."""
    folder = tmp_path_factory.mktemp("runs")
    mlx("train", "bind")
    mlx("train", "run", "cfg.start_workers=0", "cfg.num_epochs=1", f"cfg.storage_path={folder}", "cfg.name=test")
    return folder / "test"


def test_binding_again_changes_nothing(storage: Path) -> None:
    assert "unchanged src/conf.yaml" in mlx("train", "bind")


def test_one_epoch_trains(storage: Path) -> None:
    record = json.loads((storage / "run_001" / "run.json").read_text())
    assert record["status"] == "SUCCEEDED"
    assert record["metrics"]["train/cross_entropy"] > 0


def test_a_checkpoint_restores(storage: Path) -> None:
    checkpoint = storage / "run_001" / "checkpoints" / "epoch_0000"
    options = [f"cfg.restore_checkpoint_path={checkpoint}", f"cfg.storage_path={storage.parent}", "cfg.name=test"]
    mlx("train", "run", "cfg.start_workers=0", "cfg.num_epochs=2", *options)
    before = torch.load(checkpoint / "state.pt", weights_only=True)
    after = torch.load(storage / "run_002" / "checkpoints" / "epoch_0001" / "state.pt", weights_only=True)
    assert after["epoch"] == 1
    assert after["global_step"] == 2 * before["global_step"]
