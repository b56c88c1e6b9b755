"""Runs of sharded models are resumed from damaged checkpoints, and have whole weights for others."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import Mlx, Script

pytestmark = pytest.mark.kills

TWO = ("cfg.start_workers=2", "cfg.num_epochs=3", "cfg.checkpoint_every_steps=3")


@pytest.fixture(scope="module")
def folder(make_in: Callable[[str, Path], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_in("shards", tmp_path_factory.mktemp("sharded"))


def trained(mlx: Mlx, folder: Path, *overrides: str) -> tuple[dict[str, torch.Tensor], str]:
    """Train, and return the weights at the end of the loop and what was printed."""
    done = mlx(folder, "train", "run", *TWO, *overrides)
    assert done.returncode == 0, done.stdout + done.stderr
    weights = folder / "seen" / "weights.pt"
    return torch.load(weights, weights_only=True) if weights.exists() else {}, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wanted(mlx: Mlx, folder: Path) -> dict[str, torch.Tensor]:
    """The weights of an uninterrupted run."""
    return trained(mlx, folder, "cfg.strategy=fsdp", "cfg.name=straight")[0]


def test_one_whose_newest_checkpoint_is_damaged_equals_an_uninterrupted_one(
    mlx: Mlx, folder: Path, wanted: dict[str, torch.Tensor]
) -> None:
    """Rank 1 alone notices that a byte of its shard has changed, and both workers load the checkpoint before."""
    trained(mlx, folder, "cfg.strategy=fsdp", "cfg.name=damaged", "cfg.max_steps=11")
    newest = folder / "runs" / "damaged" / "run_001" / "checkpoints" / "epoch_0003_step_00000011"
    shard = newest / "shard_00001.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    found, text = trained(mlx, folder, "cfg.name=damaged", "--resume=run_001", "cfg.max_steps=null")
    assert "shard_00001.safetensors is damaged: its SHA-256 is not the one it was saved with; resuming from" in text
    assert "epoch_0003_step_00000009 (epoch 3, step 9)" in text
    assert all(torch.equal(found[name], item) for name, item in wanted.items())


@pytest.mark.usefixtures("wanted")
def test_a_sharded_run_answers_with_whole_weights(folder: Path, script: Script) -> None:
    found = script(
        folder,
        "import json, torch, mlx_runtime\n"
        "run = mlx_runtime.open_run('straight/run_001')\n"
        "rows = run.load_datasets().train.values[:3]\n"
        "expected = run.load_models().net.eval()(rows[:, :-1])[:, -1]\n"
        "found = run.predictor()({'x': rows})['next']\n"
        "print(json.dumps({'rows': len(found), 'equal': torch.equal(found, expected)}))\n",
    )
    assert found == {"rows": 3, "equal": True}
