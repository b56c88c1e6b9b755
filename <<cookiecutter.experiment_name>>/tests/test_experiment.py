"""Tests that the experiment binds, trains and restores. Edit: add tests for what it promises."""

import json
import math
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
    """Train one epoch in a single process, stored separately from real runs."""
    folder = tmp_path_factory.mktemp("runs")
    mlx("train", "run", "cfg.start_workers=0", "cfg.num_epochs=1", f"cfg.storage_path={folder}", "cfg.name=test")
    return folder / "test"


def weights(checkpoint: Path) -> list[torch.Tensor]:
    """Return all parameters, but not the statistics of norm layers, which change even without an optimizer."""
    models = torch.load(checkpoint / "state.pt", weights_only=True)["models"].values()
    items = [item for model in models for name, item in model.items() if "running_" not in name]
    return [item for item in items if isinstance(item, torch.Tensor) and item.is_floating_point()]


def test_conf_yaml_matches_the_code(storage: Path) -> None:
    mlx("train", "bind", "--check")


def test_one_epoch_trains(storage: Path) -> None:
    record = json.loads((storage / "run_001" / "run.json").read_text())
    assert record["status"] == "SUCCEEDED"
    assert any(math.isfinite(value) for value in record["metrics"].values())


def test_training_continues_from_a_checkpoint(storage: Path) -> None:
    checkpoint = storage / "run_001" / "checkpoints" / "epoch_0001"
    options = [f"cfg.restore_checkpoint_path={checkpoint}", f"cfg.storage_path={storage.parent}", "cfg.name=test"]
    mlx("train", "run", "cfg.start_workers=0", "cfg.num_epochs=2", *options)
    after = storage / "run_002" / "checkpoints" / "epoch_0002"
    assert any(not torch.equal(old, new) for old, new in zip(weights(checkpoint), weights(after), strict=True))
