"""Replicas that train on their own are averaged as the papers say, and a resumed run equals an uninterrupted one."""

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import Mlx, Start, edit
from faults import diary, differences, final_state, reports, wait_for
from torch import nn

from mlx_runtime import TrainConfig, open_run
from mlx_runtime.companions.fragments import replicas
from mlx_runtime.companions.fragments.averaging import outer_step
from mlx_runtime.sections import Replicas


@pytest.mark.pure
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_outer_optimizer_is_sgd_of_torch(momentum: float) -> None:
    generator = torch.Generator().manual_seed(0)
    common, kept = torch.randn(6, generator=generator), None
    parameter = nn.Parameter(common.clone())
    expected = torch.optim.SGD([parameter], lr=0.7, momentum=momentum, nesterov=momentum > 0)
    for _ in range(3):
        mean = torch.randn(6, generator=generator)
        parameter.grad = mean.clone()
        expected.step()
        common, kept = outer_step(common, kept, mean, 0.7, momentum)
        assert torch.allclose(common, parameter.detach(), rtol=0, atol=1e-6)


@pytest.mark.pure
def test_settings_that_contradict_each_other() -> None:
    wanted = Replicas(every=3, momentum=1.0, traffic="powersgd")
    cfg = TrainConfig(strategy="fsdp", precision="fp16", replicas=wanted)
    assert [line.partition(" ")[0] for line in replicas.problems(cfg)] == [
        "cfg.replicas.every=3",
        "cfg.replicas.momentum=1.0",
        "cfg.replicas.traffic=powersgd",
        "cfg.precision=fp16",
    ]


def train(mlx: Mlx, folder: Path, *options: str) -> str:
    done = mlx(folder, "train", "run", "cfg.num_epochs=2", "cfg.trackers={}", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


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


@pytest.mark.kills
def test_a_stopped_run_is_resumed_at_an_average(mlx: Mlx, start: Start, experiment: Callable[[str], Path]) -> None:
    """The stop waits for it, and the end of an epoch takes one. Each worker has its own states of optimizers."""
    folder = experiment("faults")
    options = ("cfg.replicas.every=3", "cfg.replicas.lr=0.7", "cfg.replicas.momentum=0.9", "cfg.replicas.traffic=fp16")
    train(mlx, folder, *options)
    assert {*numbers(folder, "run_001", "replicas/bytes")} == {4.0 * 2 * 16 + 2 * (6 * 16 + 16 + 2 * 16 + 16 + 1)}
    (folder / "diary").rename(folder / "before")
    stopped = start(folder, "train", "run", "cfg.num_epochs=2", "cfg.trackers={}", *options, "cfg.pause_s=0.5")
    wait_for(lambda: any(note.get("step") == 4 for note in diary(folder)), 120)
    stopped.send_signal(signal.SIGTERM)
    stopped.communicate(timeout=120)
    assert open_run(folder / "runs" / "faults" / "run_002").state()["global_step"] == 6
    train(mlx, folder, "--resume=run_002", "cfg.pause_s=0", "cfg.max_steps=11")
    train(mlx, folder, "--resume=run_002", "cfg.max_steps=null")
    whole, resumed = (final_state(folder / "runs" / "faults" / f"run_00{number}") for number in (1, 2))
    assert differences(whole, resumed) == []
    first, second = (rank["per_worker"]["replicas_own"]["optimizers"] for rank in resumed["ranks"])
    moment = second["adam"][0]["exp_avg"]
    assert (first, torch.equal(moment, resumed["optimizers"]["adam"]["state"][0]["exp_avg"])) == ({}, False)


CUTS = ([[(0, 1), (2, 4)], [(0, 4)]], [[(0, 2), (3, 4)], [(0, 4)]])
"""First and last block of each stage of two pipelines, before and after they are cut again."""


@pytest.mark.examples
def test_another_cut_at_an_average_changes_nothing(mlx: Mlx, experiment: Callable[[str], Path]) -> None:
    """Not even the outer momentum. Plain SGD has no states of its own, of which only those of rank 0 would be kept."""
    folder = experiment("shards")
    code = folder / "src" / "experiment.py"
    edit(code, "adam: torch.optim.AdamW = torch.optim.AdamW(", "adam: torch.optim.SGD = torch.optim.SGD(")
    edit(code, "        weights = {\n", "        return\n        weights = {\n")
    assert mlx(folder, "train", "bind").returncode == 0
    blocks = ["embed", "blocks.0", "blocks.1", "blocks.2", "norm"]
    for number, clusters in enumerate(CUTS):
        stages = [[{"first": first, "last": last} for first, last in cut] for cut in clusters]
        plan = {"model": "net", "blocks": blocks, "clusters": [{"stages": item} for item in stages]}
        (folder / f"plan_{number}.json").write_text(json.dumps(plan))
    options = ("cfg.strategy=pipeline", "cfg.start_workers=3", "cfg.fragments.microbatches=1")
    options += ("cfg.replicas.every=2", "cfg.replicas.lr=0.7", "cfg.replicas.momentum=0.9")
    train(mlx, folder, *options, "cfg.fragments.plan=plan_0.json", "cfg.max_steps=6")
    train(mlx, folder, *options, "cfg.fragments.plan=plan_0.json", "cfg.max_steps=4")
    again = ("--resume=run_002", "cfg.fragments.plan=plan_1.json", "cfg.max_steps=6")
    text = train(mlx, folder, *options, *again)
    assert "replicas  continue with the optimizer states of the first one" in text
    whole, resumed = (folder / "runs" / "shards" / f"run_00{number}" for number in (1, 2))
    assert differences(open_run(whole).state()["models"], open_run(resumed).state()["models"]) == []
    there_and_back, logits = 2 * 4 * (4 * 8 * 15), 4 * (4 * 8 * 32)  # each way, in float32
    shared = 2 * 4 * (32 * 15)  # the weight that the first stage of the first pipeline shares with the head
    sent = [line["fragments/bytes"] for line in reports(whole) if "fragments/bytes" in line]
    assert {*sent} == {there_and_back + shared + logits}


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
