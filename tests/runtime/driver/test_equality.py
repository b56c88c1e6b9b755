"""The same rows give the same losses, on any number of workers and with any strategy."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Mlx, edit
from faults import differences, final_state

pytestmark = pytest.mark.examples

GLOBAL_BATCH = 8

RELATIVE = 1e-5
"""Tolerance, in float32; sums over workers have another order. The largest difference is 3e-7."""


@pytest.fixture
def losses(mlx: Mlx, experiment: Callable[[str], Path]) -> Callable[..., list[float]]:
    """`losses("fsdp", 2, "cfg.sharding.offload=cpu")`: the mean losses of all workers in each step of a run."""
    folder = experiment("shards")

    def losses(strategy: str, workers: int, *options: str) -> list[float]:
        rows = f"datasets.train.batch_size={GLOBAL_BATCH // max(1, workers)}"
        done = mlx(folder, "train", "run", f"cfg.strategy={strategy}", f"cfg.start_workers={workers}", rows, *options)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count(f"sharded   net: {strategy} over ") == (strategy != "ddp")
        return json.loads((folder / "seen" / "losses.json").read_text())  # type: ignore[no-any-return]

    return losses


def test_strategies_and_numbers_of_workers(losses: Callable[..., list[float]]) -> None:
    steps = ("datasets.train.rows=80", "cfg.num_epochs=5")
    one = losses("ddp", 0, *steps)
    assert len(one) == 50
    assert one[-1] < one[0] / 2
    assert losses("ddp", 2, *steps) == pytest.approx(one, rel=RELATIVE)
    assert losses("fsdp", 4, "cfg.sharding.shard_size=2", *steps) == pytest.approx(one, rel=RELATIVE)


def test_running_statistics_of_a_model_outside_of_ddp(mlx: Mlx, experiment: Callable[[str], Path]) -> None:
    """A run that is resumed at the end of an epoch is exact, with evaluations by the statistics of the checkpoint.

    They are those of an average on the experiment.
    """
    folder = experiment("faults")
    module = folder / "src" / "experiment.py"
    edit(module, "    net: Net = Net()\n", "    net: Net = Net()\n    norm: Norm = Norm(6, affine=False)\n")
    edit(module, 'self.tools.noise(batch["x"])', 'self.models.norm.train()(self.tools.noise(batch["x"]))')
    edit(
        module,
        "self.schedule = ",
        "self.average = AveragedModel(self.models.norm, use_buffers=True)\n        self.schedule = ",
    )
    edit(module, "from torch import nn\n", "from torch import nn\nfrom torch.optim.swa_utils import AveragedModel\n")
    edit(
        module,
        "self.metrics.mean.update",
        "self.average.update_parameters(self.models.norm)\n        self.metrics.mean.update",
    )
    edit(module, "with torch.no_grad()", "with self.evaluation()")
    edit(module, 'update(self.models.net(batch["x"])', 'update(self.models.net(self.average.eval()(batch["x"]))')
    for words in (["cfg.num_epochs=2"], ["cfg.num_epochs=1"], ["--resume=run_002", "cfg.num_epochs=2"]):
        done = mlx(folder, "train", "run", "cfg.trackers={}", *words)
        assert done.returncode == 0, done.stdout + done.stderr
    whole, resumed = (folder / "runs" / "faults" / f"run_00{number}" for number in (1, 2))
    assert differences(final_state(whole), final_state(resumed)) == []
