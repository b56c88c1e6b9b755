"""Resuming runs of sharded models: with other strategies, and from damaged checkpoints."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import ROOT, Mlx, Script, edit

from mlx_runtime import open_run

pytestmark = pytest.mark.kills

TWO = ("cfg.start_workers=2", "cfg.num_epochs=3")

TOOL = """

@dataclass
class Tools:
    best: BestWeights = BestWeights("min")


class Experiment(BaseModule):
    tools: Tools
"""

LAST = """\
            self.tools.best.update(shared.item() * (epoch != 1), epoch, self.models.net)
            self.save_checkpoint(epoch=epoch)
        self.tools.best.restore(self.models.net)
"""


@pytest.fixture(scope="module")
def folder(mlx: Mlx, make_in: Callable[[str, Path], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An experiment with a tool that keeps the best weights, which the loop restores at its end."""
    folder = make_in("shards", tmp_path_factory.mktemp("sharded"))
    shutil.copy(ROOT / "<<cookiecutter.experiment_name>>" / "src" / "tools.py", folder / "src")
    code = folder / "src" / "experiment.py"
    edit(code, "\nclass Experiment(BaseModule):\n", TOOL)
    imports = "from mlx_runtime import DUMMY_PARAMS, BaseModule\n"
    edit(code, imports, f"{imports}from src.tools import BestWeights\n")
    step = "                self.save_metrics_and_losses(batch_idx=batch_idx, epoch=epoch)\n"
    edit(code, step, step + LAST)
    done = mlx(folder, "train", "bind")
    assert done.returncode == 0, done.stderr
    return folder


def trained(mlx: Mlx, folder: Path, *overrides: str) -> tuple[dict[str, torch.Tensor], str]:
    """Train, and return the weights at the end of the loop and what was printed."""
    done = mlx(folder, "train", "run", *TWO, *overrides)
    assert done.returncode == 0, done.stdout + done.stderr
    weights = folder / "seen" / "weights.pt"
    return torch.load(weights, weights_only=True) if weights.exists() else {}, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wanted(mlx: Mlx, folder: Path) -> dict[str, torch.Tensor]:
    """The weights of an uninterrupted run: those of its second epoch are the best."""
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
    assert "epoch_0002 (epoch 2, step 8)" in text
    assert all(torch.equal(found[name], item) for name, item in wanted.items())


def test_any_strategy_resumes_any_other(mlx: Mlx, folder: Path, wanted: dict[str, torch.Tensor]) -> None:
    """In the middle of an epoch, with the best weights that a tool keeps: sharded, whole, and sharded again."""
    trained(mlx, folder, "cfg.name=chain", "cfg.strategy=fsdp", "cfg.max_steps=6")
    resumed = ("cfg.name=chain", "--resume=run_001")
    trained(mlx, folder, *resumed, "cfg.strategy=ddp", "cfg.max_steps=10")
    checkpoints = folder / "runs" / "chain" / "run_001" / "checkpoints"
    assert not any((checkpoints / "epoch_0003_step_00000010").glob("*.safetensors"))
    found, _ = trained(mlx, folder, *resumed, "cfg.strategy=fsdp", "cfg.max_steps=null")
    for name, item in wanted.items():
        assert torch.allclose(found[name], item, rtol=1e-5, atol=1e-6), name
    best = open_run(checkpoints.parent).state()["tools"]["best"]
    assert best["epoch"] == 1
    assert all(torch.equal(best["weights"][name], found[name]) for name in found)


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
