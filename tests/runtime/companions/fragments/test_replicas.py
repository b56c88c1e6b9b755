"""Replicas that train on their own are averaged as the papers say, and a resumed run equals an uninterrupted one."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import Mlx, edit
from faults import differences, final_state
from torch import nn

from mlx_runtime import TrainConfig
from mlx_runtime.companions.fragments import replicas
from mlx_runtime.companions.fragments.averaging import Tensors, outer_step
from mlx_runtime.companions.fragments.traffic import Compressor
from mlx_runtime.sections import Replicas

SHAPES = [(12, 30), (12,), (7, 6, 3)]
SIZE = 12 * 30 + 12 + 7 * 6 * 3


@pytest.mark.pure
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_outer_optimizer_is_sgd_of_torch(momentum: float) -> None:
    """Buffers, at the end of vectors, adopt the mean of the replicas."""
    generator = torch.Generator().manual_seed(0)
    common, kept = torch.randn(8, generator=generator), None
    parameter = nn.Parameter(common[:6].clone())
    expected = torch.optim.SGD([parameter], lr=0.7, momentum=momentum, nesterov=momentum > 0)
    for _ in range(3):
        mean = torch.randn(8, generator=generator)
        parameter.grad = mean[:6].clone()
        expected.step()
        common, kept = outer_step(common, kept, mean, 2, 0.7, momentum)
        assert torch.allclose(common[:6], parameter.detach(), rtol=0, atol=1e-6)
        assert torch.equal(common[6:], -mean[6:])


@pytest.mark.pure
@pytest.mark.parametrize(("kind", "part"), [("fp16", 0.51), ("topk", 0.1), ("powersgd", 0.6)])
def test_what_one_average_leaves_out_the_next_one_has(kind: str, part: float) -> None:
    generator = torch.Generator().manual_seed(0)
    vectors = [torch.randn(SIZE + 2, generator=generator) for _ in range(20)]
    compressor, sent = Compressor(kind, SHAPES, exact=2), torch.zeros(SIZE + 2)
    for vector in vectors:
        payload = compressor.compress(vector)
        assert compressor.problem(payload) is None
        assert sum(item.nbytes for item in payload.values()) < part * vector.nbytes
        sent += compressor.expand(payload)
    assert compressor.rest is not None
    total = sum(vectors, torch.zeros(SIZE + 2))
    assert not torch.equal(sent[:SIZE], total[:SIZE])
    assert torch.allclose(sent[:SIZE] + compressor.rest, total[:SIZE], atol=1e-4)
    assert torch.allclose(sent[SIZE:], total[SIZE:], atol=1e-5)


@pytest.mark.pure
def test_a_worker_without_trained_parameters_averages_the_buffers_that_it_holds() -> None:
    """As the first stage of a pipeline whose blocks there are frozen."""
    model = nn.Sequential(nn.BatchNorm1d(2).requires_grad_(False), nn.Linear(2, 2).to("meta"), nn.BatchNorm1d(2))
    model[2].to("meta")
    trained = torch.optim.SGD([item for item in model.parameters() if item.requires_grad])
    tensors = Tensors({"net": model}, trained)
    assert len(tensors) == 4
    assert [*tensors.all] == ["net.0.running_mean", "net.0.running_var"]
    assert tensors.difference(tensors.vector()).tolist() == [0, 0, -1, -1]
    alone = tensors.only([])
    alone.fill(alone.vector())
    frozen = torch.optim.SGD(nn.Linear(2, 2).parameters())
    assert not len(Tensors({"net": model}, frozen))


@pytest.mark.pure
def test_settings_that_contradict_each_other() -> None:
    cfg = TrainConfig(replicas=Replicas(momentum=0.9, traffic="topk"))
    assert [line.partition(" needs ")[0] for line in replicas.problems(cfg)] == [
        "cfg.replicas.momentum=0.9",
        "cfg.replicas.traffic=topk",
    ]
    cfg = TrainConfig(strategy="fsdp", precision="fp16", replicas=Replicas(every=3, momentum=1.0))
    assert [line.partition(" ")[0] for line in replicas.problems(cfg)] == [
        "cfg.replicas.every=3",
        "cfg.replicas.momentum",
        "cfg.precision=fp16",
    ]


def train(mlx: Mlx, folder: Path, *options: str) -> None:
    done = mlx(folder, "train", "run", "cfg.num_epochs=2", "cfg.trackers={}", *options)
    assert done.returncode == 0, done.stdout + done.stderr


def numbers(folder: Path, run: str, name: str) -> list[float]:
    lines = (folder / "runs" / "faults" / run / "metrics.jsonl").read_text().splitlines()
    return [item[name] for item in map(json.loads, lines) if name in item]


def weights(folder: Path, run: str) -> torch.Tensor:
    state = final_state(folder / "runs" / "faults" / run)["models"]["net"]
    return torch.cat([item.flatten() for name, item in state.items() if name.endswith(("weight", "bias"))])


@pytest.mark.local
def test_an_average_after_every_update_equals_ddp(mlx: Mlx, experiment: Callable[[str], Path]) -> None:
    """With SGD, the mean of the replicas' weights is linear in their gradients. Sums have another order."""
    folder = experiment("faults")
    edit(folder / "src" / "experiment.py", "adam: torch.optim.Adam = torch.optim.Adam(", "adam: Any = torch.optim.SGD(")
    edit(folder / "src" / "experiment.py", "lr=0.01)", "lr=0.01, momentum=0.9)")
    assert mlx(folder, "train", "bind").returncode == 0
    for options in ([], ["cfg.replicas.every=1"], ["cfg.replicas.every=3"]):
        train(mlx, folder, *options)
    ddp, one, three = (weights(folder, f"run_00{number}") for number in (1, 2, 3))
    assert torch.allclose(one, ddp, rtol=0, atol=2e-5)
    assert not torch.allclose(three, ddp, rtol=0, atol=1e-3)
    assert numbers(folder, "run_002", "replicas/round") == list(range(1, 17))
    assert {*numbers(folder, "run_003", "replicas/bytes")} == {4.0 * (6 * 16 + 16 + 2 * 16 + 2 * 16 + 16 + 1)}


@pytest.mark.local
def test_a_run_is_resumed_in_the_middle_of_a_period(mlx: Mlx, experiment: Callable[[str], Path]) -> None:
    """Each worker has its own weights, running statistics, optimizer state and rest of a compressed average then."""
    folder = experiment("faults")
    options = ("cfg.replicas.every=3", "cfg.replicas.lr=0.7", "cfg.replicas.momentum=0.9")
    options += ("cfg.replicas.traffic=powersgd",)
    train(mlx, folder, *options)
    train(mlx, folder, *options, "cfg.max_steps=8")  # at the end of an epoch
    train(mlx, folder, "--resume=run_002", "cfg.max_steps=13")
    train(mlx, folder, "--resume=run_002", "cfg.max_steps=null")
    whole, resumed = (final_state(folder / "runs" / "faults" / f"run_00{number}") for number in (1, 2))
    assert differences(whole, resumed) == []
    own = [rank["per_worker"]["replicas_own"] for rank in resumed["ranks"]]
    assert not own[0]["tensors"]
    assert not torch.equal(own[1]["tensors"]["net.layers.3.weight"], resumed["models"]["net"]["layers.3.weight"])


@pytest.mark.local
def test_an_optimizer_that_is_not_on_self_is_refused(mlx: Mlx, experiment: Callable[[str], Path]) -> None:
    """Its replicas would never be averaged."""
    folder = experiment("faults")
    edit(folder / "src" / "experiment.py", "        if self.cfg.late:", "        global own\n        if self.cfg.late:")
    new = "        own = torch.optim.SGD(self.models.net.parameters(), lr=0.1)\n        self.schedule ="
    edit(folder / "src" / "experiment.py", "        self.schedule =", new)
    edit(folder / "src" / "experiment.py", "self.optimizers.adam.step()", "own.step()")
    done = mlx(folder, "train", "run", "cfg.replicas.every=3", "cfg.trackers={}")
    assert done.returncode == 1
    assert "this optimizer or its model is not on self; assign them" in done.stdout + done.stderr
    edit(folder / "src" / "experiment.py", "        own = torch", "        own = self.own = torch")
    edit(folder / "src" / "experiment.py", "own.step()", "self.optimizers.adam.step(), own.step()")
    done = mlx(folder, "train", "run", "cfg.start_workers=0", "cfg.replicas.every=3", "cfg.replicas.meet=meeting")
    assert done.returncode == 1
    assert "cfg.replicas.meet averages the models of one optimizer; this experiment has several" in done.stderr
