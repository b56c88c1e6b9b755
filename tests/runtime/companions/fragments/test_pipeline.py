"""Models cut into stages train like whole ones, and their checkpoints are whole."""

import copy
import json
import os
import random
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import groups
import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, Mlx, bind, edit
from faults import differences
from forkserver import Commands
from torch import nn
from torch.nn.functional import cross_entropy

import mlx_runtime
from mlx_runtime import open_run
from mlx_runtime.companions.fragments.links import Links
from mlx_runtime.companions.fragments.planfile import read
from mlx_runtime.distributed.collectives import data_parallel_group
from mlx_runtime.distributed.topology import Topology
from mlx_runtime.errors import ConfigError, MlxError
from mlx_runtime.loop.options import strategy_problems
from mlx_runtime.loop.strategies import DDP, strategy_of
from mlx_runtime.loop.weighting import WeightedLosses
from mlx_runtime.sections import Fragments

pytestmark = pytest.mark.local

WORKS: dict[str, groups.Work] = {}

ROWS = 7  # not a multiple of the microbatches


def work(function: groups.Work) -> groups.Work:
    WORKS[function.__name__] = function
    return function


@pytest.fixture(scope="module")
def on_workers(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """The results of each of `WORKS` on each of two processes, by name."""
    folder = tmp_path_factory.mktemp("workers")
    on_four = ("in_replicas", "planned")
    sizes = {name: 2 for name in WORKS if name not in on_four} | {"queued": 3}
    return groups.on_workers(commands, WORKS, folder, 4, sizes)


class Block(nn.Module):
    """Returns a tuple with None, and takes a mask."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(width), nn.Linear(width, width)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> tuple[torch.Tensor, None]:
        mixed: torch.Tensor = self.mix(self.norm(x))
        return x + self.dropout(mixed if mask is None else torch.einsum("ij,bjk->bik", mask, mixed)), None


class Transformer(nn.Module):
    """A parameter and a buffer outside of blocks, tied weights, and a value that is used long after its block."""

    mask: torch.Tensor

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, width)
        self.positions = nn.Parameter(torch.randn(5, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, 12, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.tril(torch.ones(5, 5)))

    def forward(self, tokens: torch.Tensor) -> dict[str, Any]:
        length = tokens.shape[1]
        x = first = self.embed(tokens) + self.positions[:length]
        for block in self.blocks:
            x, _ = block(x, mask=self.mask[:length, :length])
        return {"logits": self.head(x + first), "length": length}


class Drawing(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        random.random(), np.random.rand(), torch.rand(())
        return super().forward(x)


class Choosy(Transformer):
    def forward(self, tokens: torch.Tensor) -> dict[str, Any]:
        x = self.embed(tokens)
        if x.sum() > 0:
            x = -x
        return {"logits": self.head(self.blocks[0](x)[0])}


class Filling(Transformer):
    """Collects the outputs of blocks in a tensor that all stages have."""

    def forward(self, tokens: torch.Tensor) -> dict[str, Any]:
        x = self.embed(tokens)
        found = torch.zeros(len(tokens), 3, 5, 6)
        for number, block in enumerate(self.blocks):
            x, _ = block(x)
            found[:, number] = x
        return {"logits": self.head(found.sum(1))}


def convolutions() -> nn.Sequential:
    layers = (nn.Conv2d(1, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten(), Drawing(16, 3))
    return nn.Sequential(*layers)


class Models:
    def __init__(self, net: nn.Module, small: nn.Module | None = None) -> None:
        self.net = net
        if small is not None:
            self.small = small


class OnLast(Models):
    strategies = {"small": "ddp"}


class CutNet(Models):
    strategies = {"net": "pipeline"}


def strategy(rank: int, **fragments: Any) -> DDP:
    size, cut = dist.get_world_size(), Fragments(**fragments)
    cfg = mlx_runtime.TrainConfig(strategy="pipeline", start_workers=size, fragments=cut)
    return strategy_of(cfg, Topology(rank, size, torch.device("cpu"), rank), None)


def node(net: Any, group: type = Models, **small: Any) -> dict[str, Any]:
    models = {name: {"_target_": f"{__name__}.{kind.__name__}"} for name, kind in {"net": net, **small}.items()}
    return {"_target_": f"{__name__}.{group.__name__}", **models}


def trained(model: Any, made: DDP | None, rows: torch.Tensor, *, clip: float = 1e9) -> torch.optim.Optimizer:
    """Train with momentum for three steps, each of which accumulates two batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if made is not None:
        made.prepare_optimizers({"sgd": optimizer})
    for step in range(3):
        optimizer.zero_grad()
        for last in (False, True):
            if made is not None:
                made.sync_gradients([model], last)
            logits = model(rows.roll(step, 0))["logits"]
            cross_entropy(logits.flatten(0, 1), rows.roll(int(last), 0).flatten()).backward()
        parameters = list(model.parameters())
        made.clip_grad_norm_(parameters, clip) if made else nn.utils.clip_grad_norm_(parameters, clip)
        optimizer.step()
    return optimizer


def tokens(count: int = ROWS) -> torch.Tensor:
    return torch.randint(12, (count, 5), generator=torch.Generator().manual_seed(1))


def whole_states(made: DDP, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    states = {"models": {"net": model.state_dict()}, "optimizers": {"sgd": optimizer.state_dict()}}
    return made.consolidate(copy.deepcopy(states))


def one_process(clip: float = 1e9) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    model = Transformer()
    optimizer = trained(model, None, tokens(), clip=clip)
    return model, {"models": {"net": model.state_dict()}, "optimizers": {"sgd": optimizer.state_dict()}}


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        return {path: value}
    return {name: leaf for key, item in items for name, leaf in leaves(item, f"{path}.{key}").items()}


@work
def stages(rank: int) -> Any:
    """Weights and optimizer state by number of microbatches; weights of this stage; a state loaded again."""
    found: dict[Any, Any] = {}
    for microbatches in (1, 3):
        torch.manual_seed(0)
        made = strategy(rank, microbatches=microbatches)
        model = made.build(node(Transformer)).net
        found["held"] = [name for name, item in model.named_parameters() if not item.is_meta]
        optimizer = trained(model, made, tokens(), clip=0.5)
        found[microbatches] = whole_states(made, model, optimizer)
    found["lines"] = tuple(made.described)
    torch.manual_seed(0)
    rounding = strategy(rank, microbatches=3, traffic="bf16")
    rounded = rounding.build(node(Transformer)).net
    found["bf16"] = whole_states(rounding, rounded, trained(rounded, rounding, tokens(), clip=0.5))
    found["alone"] = one_process(clip=0.5)
    states = [found[1] if rank == 0 else None]
    dist.broadcast_object_list(states)
    model.load_state_dict(states[0]["models"]["net"])
    optimizer.load_state_dict(states[0]["optimizers"]["sgd"])
    found["again"] = whole_states(made, model, optimizer)
    with torch.no_grad():
        found["evaluated"] = model.eval()(tokens())["logits"]
    return found if rank == 0 else {"held": found["held"], "evaluated": found["evaluated"]}


class Normed(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Embedding(12, 6), nn.BatchNorm1d(5), nn.Linear(6, 12))


@work
def in_replicas(rank: int) -> Any:
    """Running statistics of two pipelines with half of the rows each, before and after a checkpoint."""
    made = strategy(rank, stages=2, microbatches=1)
    model = made.build(node(Normed)).net
    rows = tokens(8).chunk(2)[made.topology.data_parallel_rank]
    cross_entropy(model(rows).flatten(0, 1), rows.flatten()).backward()
    held = {name: item for name, item in model.named_buffers() if not item.is_meta}
    before = {name: item.clone() for name, item in held.items()}
    whole_states(made, model, torch.optim.SGD(model.parameters()))
    return before, held


PLANS = {
    "other cuts": (((0, 0), (1, 3)), ((0, 2), (3, 3))),
    "other numbers of stages": (((0, 1), (2, 2), (3, 3)), ((0, 3),)),
}
"""First and last block of the stages of two pipelines, of `Transformer` without its tied head, by name."""

NODES = ("abcd", None)
"""Names of the nodes of the workers with each of these plans, which is for the nodes b, d, a and c."""


WEIGHTS = (1.0, 3.0)
"""Of the losses of two pipelines, like numbers of target tokens."""


def write_plan(file: Path, clusters: Any, nodes: str = "", **fields: Any) -> None:
    names = iter(nodes or "abcdefgh")
    stages = [[{"node": next(names), "first": first, "last": last} for first, last in item] for item in clusters]
    blocks = ["embed", "blocks.0", "blocks.1", "blocks.2"]
    document = {"model": "net", "blocks": blocks, "clusters": [{"stages": item} for item in stages], **fields}
    file.write_text(json.dumps(document))


@work
def planned(rank: int) -> Any:
    """By plan: whole states, the weights of all workers, and the process groups of two pipelines that differ.

    Then the gradients of weighted losses.
    """
    found: dict[str, Any] = {}
    for (name, clusters), nodes in zip(PLANS.items(), NODES, strict=True):
        file = Path(tempfile.gettempdir()) / f"plan-{os.getppid()}-{rank}.json"
        write_plan(file, clusters, nodes="bdac")
        if nodes:
            os.environ["MLX_NODE"] = nodes[rank]
        torch.manual_seed(0)
        made = strategy(rank, plan=str(file), microbatches=2)
        os.environ.pop("MLX_NODE", None)
        file.unlink()
        model = made.build(node(Transformer)).net
        rows = tokens(8)
        optimizer = trained(model, made, rows.chunk(2)[made.topology.data_parallel_rank], clip=0.5)
        held = {title: item.detach().clone() for title, item in model.named_parameters() if not item.is_meta}
        states = whole_states(made, model, optimizer)
        number = made.topology.data_parallel_rank
        with made.topology.entered():
            weight = torch.tensor(WEIGHTS[number], dtype=torch.float64)
            factor = WeightedLosses().factor(weight, alone=True).float()
        optimizer.zero_grad()
        part = rows.chunk(2)[number]
        (cross_entropy(model(part)["logits"].flatten(0, 1), part.flatten()) * factor).backward()
        gradients = {title: item.grad for title, item in model.named_parameters() if not item.is_meta}
        together = dist.get_process_group_ranks(data_parallel_group(made.topology))
        found[name] = {"states": states, "held": held, "replicas": made.topology.replicas, "together": together}
        found[name]["gradients"] = gradients
    return found


@work
def others(rank: int) -> Any:
    """A convolutional model, with a small one on the last stage; gradients of inputs; errors."""
    torch.manual_seed(0)
    made = strategy(rank, microbatches=2)
    models = made.build(node(convolutions, OnLast, small=convolutions))
    images = torch.randn(ROWS, 1, 6, 6, generator=torch.Generator().manual_seed(1)).requires_grad_()
    seeds = []
    for model in (models.net, models.small):
        model(images).square().sum().backward()
        seeds.append((float(torch.rand(())), random.random(), float(np.random.rand())))
    errors = []
    for kind, call in (
        (Choosy, lambda model: model(tokens())),
        (Transformer, lambda model: model.embed(tokens())),
        (Filling, lambda model: model(tokens())),
    ):
        try:
            call(strategy(rank).build(node(kind)).net)  # type: ignore[no-untyped-call]
        except MlxError as error:
            errors.append(str(error))
    linear = {"_target_": f"{__name__}.Models", "net": {"_target_": "torch.nn.Linear", **LINEAR}}
    cut = node(Transformer, CutNet)
    for given, cfg in (
        (linear, mlx_runtime.TrainConfig(strategy="pipeline")),
        (cut, mlx_runtime.TrainConfig(strategy="ddp", compile=True)),
        (cut, mlx_runtime.TrainConfig(strategy="ddp", activation_checkpointing="head*")),
        (cut, mlx_runtime.TrainConfig(strategy="pipeline", activation_checkpointing="embed")),
    ):
        try:
            strategy_of(cfg, made.topology, given).build(given)
        except ConfigError as error:
            errors.append(str(error))
    return {"input": images.grad, "errors": errors, "drawn": seeds, "lines": tuple(made.described)}


class Skipping(nn.Module):
    """Six blocks, of which the last also reads what the first returns."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x = self.blocks[0](x)
        for block in self.blocks[1:-1]:
            x = block(x)
        return self.blocks[-1](x + first)  # type: ignore[no-any-return]


@work
def queued(rank: int) -> Any:
    """Messages that a worker sends and receives, in their order, as (kind, peer): of two passes, by `Links.ahead`."""
    found = {}
    for ahead in (True, False):
        made = strategy(rank, microbatches=2)
        model = made.build(node(Skipping)).net.eval()
        next(item for item in vars(made).values() if isinstance(item, Links)).ahead = ahead
        begun: list[tuple[str, int]] = []
        kept = {name: getattr(dist, name) for name in ("isend", "irecv")}

        def noting(name: str, begun: Any = begun, kept: Any = kept) -> Any:
            def call(tensor: torch.Tensor, peer: int) -> Any:
                begun.append((name, peer))
                return kept[name](tensor, peer)

            return call

        for name in kept:
            setattr(dist, name, noting(name))
        try:
            with torch.no_grad():
                for _ in range(2):
                    model(torch.ones(4, 4))
        finally:
            for name, function in kept.items():
                setattr(dist, name, function)
        found[ahead] = begun
    return found


LINEAR = {"in_features": 2, "out_features": 2}


def test_stages_train_like_one_process(on_workers: dict[str, list[Any]]) -> None:
    """Bit for bit with one microbatch, in parts of 3, 3 and 1 rows within a tolerance; clipped by the same norm."""
    found, _ = on_workers["stages"]
    model, expected = found["alone"]
    wanted = leaves(expected)
    for microbatches, tolerance in ((1, 0.0), (3, 1e-6)):
        made = leaves(found[microbatches])
        assert made.keys() == wanted.keys()
        for name, item in wanted.items():
            if isinstance(item, torch.Tensor):
                assert torch.allclose(made[name], item, rtol=tolerance, atol=tolerance), (microbatches, name)
    errors = {
        name: (found["bf16"]["models"]["net"][name] - item).abs().max() for name, item in model.named_parameters()
    }
    assert 0 < max(errors.values()) < 0.01, errors
    expected_logits = model.eval()(tokens())["logits"]
    assert torch.allclose(on_workers["stages"][1]["evaluated"], expected_logits, atol=1e-5)
    assert found["lines"] == ("net: pipeline of 2 stages with 2 + 3 blocks; 624 bytes + 432 bytes",)


def drains(queues: list[list[tuple[str, int]]]) -> bool:
    """Return True if all messages arrive when each worker handles one at a time, in its order, as with NCCL."""
    left = [list(queue) for queue in queues]
    while ready := [(rank, queue[0][1]) for rank, queue in enumerate(left) if queue and queue[0][0] == "isend"]:
        arriving = [(rank, peer) for rank, peer in ready if left[peer][:1] == [("irecv", rank)]]
        if not arriving:
            return False
        for rank, peer in arriving:
            del left[rank][0], left[peer][0]
    return not any(left)


def test_no_message_waits_for_a_later_one(on_workers: dict[str, list[Any]]) -> None:
    """A tensor skips the second of three workers. Receiving ahead needs messages out of order."""
    queues = {ahead: [found[ahead] for found in on_workers["queued"]] for ahead in (True, False)}
    assert all(queues[False])
    assert drains(queues[False])
    assert not drains(queues[True])


def test_each_stage_holds_its_part_and_states_are_whole(on_workers: dict[str, list[Any]]) -> None:
    first, second = on_workers["stages"]
    names = [name for name, _ in Transformer().named_parameters()]
    assert sorted(first["held"] + second["held"]) == sorted(names)
    assert not {*first["held"]} & {*second["held"]}
    before, after = leaves(first[1]), leaves(first["again"])
    assert before.keys() == after.keys()
    assert all(torch.equal(item, after[name]) for name, item in before.items() if isinstance(item, torch.Tensor))


def averaged(clip: float = 1e9) -> nn.Module:
    """Train in one process on the rows of two pipelines."""
    torch.manual_seed(0)
    model = Transformer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        for part in tokens(8).chunk(2):
            for last in (False, True):
                logits = model(part.roll(step, 0))["logits"]
                (cross_entropy(logits.flatten(0, 1), part.roll(int(last), 0).flatten()) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model


def test_pipelines_of_a_plan_are_cut_differently(on_workers: dict[str, list[Any]]) -> None:
    """Weights equal those of one process, and those of all holders are equal bit for bit."""
    model = averaged(clip=0.5).state_dict()
    wanted = {"other cuts": ((0, 2), (1, 3)), "other numbers of stages": ((0, 1, 2), (3,))}
    for name in PLANS:
        ranks = [found[name] for found in on_workers["planned"]]
        assert ranks[0]["replicas"] == wanted[name]
        found = ranks[0]["states"]["models"]["net"]
        assert all(torch.allclose(found[title], item, atol=1e-6) for title, item in model.items())
        optimizers = ranks[0]["states"]["optimizers"]["sgd"]["state"]
        assert len(optimizers) == len([*Transformer().parameters()])
        for rank in ranks:
            assert all(torch.equal(found[title], item) for title, item in rank["held"].items())
        assert [len({*ranks[0]["together"]} & {*own}) for own in ranks[0]["replicas"]] == [1, 1]  # for its metrics


def test_losses_with_weights_count_once_per_pipeline(on_workers: dict[str, list[Any]]) -> None:
    """Also if more workers hold one of the pipelines."""
    for key in PLANS:
        ranks = [found[key] for found in on_workers["planned"]]
        model = Transformer()
        model.load_state_dict(ranks[0]["states"]["models"]["net"])
        for part, weight in zip(tokens(8).chunk(2), WEIGHTS, strict=True):
            loss = cross_entropy(model(part)["logits"].flatten(0, 1), part.flatten())
            (loss * weight / sum(WEIGHTS)).backward()
        wanted = {name: item.grad for name, item in model.named_parameters()}
        for rank in ranks:
            assert rank["gradients"]
            for name, item in rank["gradients"].items():
                assert torch.allclose(item, wanted[name], atol=1e-6), (key, name)


def test_checkpoints_reset_running_statistics_to_those_of_the_first_pipeline(on_workers: dict[str, list[Any]]) -> None:
    *first, third, fourth = on_workers["in_replicas"]
    wanted = {name: item for before, _ in first for name, item in before.items()}
    for before, after in (third, fourth):
        assert not any(torch.equal(before[name], wanted[name]) for name in before if name.endswith("running_mean"))
        assert all(torch.equal(item, wanted[name]) for name, item in after.items())


def test_inputs_get_gradients_and_the_loop_draws_the_same_numbers(on_workers: dict[str, list[Any]]) -> None:
    first, second = on_workers["others"]
    torch.manual_seed(0)
    images = torch.randn(ROWS, 1, 6, 6, generator=torch.Generator().manual_seed(1)).requires_grad_()
    for model in (convolutions(), convolutions()):
        model(images).square().sum().backward()
    assert torch.allclose(first["input"], images.grad, atol=1e-5)
    assert torch.equal(first["input"], second["input"])
    assert first["drawn"] == second["drawn"]
    assert first["lines"][1].startswith("small: whole on the last stage; ")


def test_what_cannot_be_cut_is_refused(on_workers: dict[str, list[Any]]) -> None:
    for found in on_workers["others"]:
        choice, part, filled, few, compiled, *recomputed = found["errors"]
        assert choice.startswith("the model cannot be cut at __bool__, which depends on values that only one stage has")
        assert part.startswith("models.net.embed was called outside of the forward pass of models.net")
        assert filled.startswith(
            "the model cannot be cut at __setitem__, which runs at one stage, and changes a tensor"
        )
        assert few.startswith("models.net cannot be cut into 2 stages: it has 0 blocks. Name smaller modules")
        assert compiled.endswith("cfg.compile compiles whole models; set it to false")
        assert ["models.net.head.weight" in recomputed[0], "models.net.embed.weight" in recomputed[1]] == [True, True]


@pytest.mark.pure
def test_settings_and_plans_that_are_refused(tmp_path: Path) -> None:
    cfg = mlx_runtime.TrainConfig(strategy="pipeline", fragments=Fragments(stages=1))
    assert strategy_problems(cfg)[0].endswith("cfg.fragments.stages=1 does not cut the models; use cfg.strategy=ddp")
    plan = tmp_path / "plan.json"
    for cuts, text in {
        ((0, 2), (3, 5)): None,
        ((0, 5), (6, 3)): "a stage with blocks 6 to 3; it must begin at 6, have at least one block, and end before 6",
        ((0, 2), (2, 5)): "a stage with blocks 2 to 5; it must begin at 3",
    }.items():
        stages = [{"first": first, "last": last} for first, last in cuts]
        plan.write_text(json.dumps({"model": "net", "blocks": [*"abcdef"], "clusters": [{"stages": stages}]}))
        if text is None:
            assert read(plan).clusters == [[("None", 2), ("None", 5)]]
            continue
        with pytest.raises(ConfigError, match=re.escape(text)):
            read(plan)
        assert text in strategy_problems(replace(cfg, fragments=Fragments(plan=str(plan))))[0]  # before machines join
    write_plan(plan, PLANS["other cuts"])
    cfg = mlx_runtime.TrainConfig(strategy="pipeline", start_workers=6, fragments=Fragments(plan=str(plan)))
    assert "is for 4 workers, but cfg.start_workers=6; set it to 4" in strategy_problems(cfg)[0]


@pytest.mark.examples
def test_other_strategies_that_continue_change_nothing(mlx: Mlx, experiment: Callable[[str], Path]) -> None:
    """Two stages train, then one process continues, and then three stages."""
    folder = experiment("shards")
    writing = "        self.cfg.out.mkdir(exist_ok=True)\n"
    edit(folder / "src" / "experiment.py", writing, f"        return\n{writing}")
    pipeline = ("cfg.strategy=pipeline", "cfg.fragments.microbatches=1", "cfg.checkpoint_every_steps=3")
    runs = [
        ("cfg.start_workers=1", "cfg.name=straight", "cfg.checkpoint_every_steps=3"),
        ("cfg.start_workers=2", "cfg.name=chain", "cfg.max_steps=7", *pipeline),
        ("cfg.start_workers=1", "cfg.name=chain", "--resume=run_001", "cfg.max_steps=10"),
        ("cfg.start_workers=3", "cfg.name=chain", "--resume=run_001", "cfg.max_steps=null", *pipeline),
    ]
    for overrides in runs:
        done = mlx(folder, "train", "run", *overrides)
        assert done.returncode == 0, done.stdout + done.stderr
    states = [open_run(folder / "runs" / name / "run_001").state() for name in ("straight", "chain")]
    wanted, found = (leaves({group: state[group] for group in ("models", "optimizers")}) for state in states)
    assert wanted.keys() == found.keys()
    assert all(torch.equal(found[name], item) for name, item in wanted.items() if isinstance(item, torch.Tensor))


@pytest.fixture
def sorter(mlx: Mlx, baked: Path, tmp_path: Path) -> Path:
    """An experiment that trains docs/examples/sorter.py."""
    folder = Path(shutil.copytree(baked, tmp_path / "sorter"))
    shutil.copy(ROOT / "docs" / "examples" / "sorter.py", folder / "src" / "experiment.py")
    return bind(mlx, folder)


def test_an_error_of_one_stage_ends_the_run_with_its_line(mlx: Mlx, sorter: Path) -> None:
    """The other stage, which loses its connection, does not hide it."""
    fail = 'if type(x) is torch.Tensor and torch.distributed.get_rank() == 1:\n            raise KeyError("mine")\n'
    line = "        return x + self.mlp("
    edit(sorter / "src" / "experiment.py", line, f"        {fail}{line}")
    done = mlx(sorter, "train", "run")
    assert done.returncode == 1
    error = done.stderr[done.stderr.index("error: ") :]
    assert error.startswith("error: KeyError: 'mine' (raised on rank 1)\n  src/experiment.py:")
    assert error.endswith(' in forward\n    raise KeyError("mine")\n')


@pytest.mark.examples
def test_a_run_in_half_precision_resumes_bit_for_bit(mlx: Mlx, sorter: Path) -> None:
    """With updates of two steps and a clipped norm."""
    fixed = ("cfg.accumulate_grad_batches=2", "cfg.precision=fp16", "cfg.debug.limit_batches=8")
    for words in (
        ("cfg.name=straight", "cfg.max_steps=4"),
        ("cfg.name=resumed", "cfg.max_steps=2"),
        ("cfg.name=resumed", "cfg.max_steps=4", "--resume=run_001"),
    ):
        done = mlx(sorter, "train", "run", *fixed, "cfg.checkpoint_every_steps=2", *words)
        assert done.returncode == 0, done.stdout + done.stderr
    straight, resumed = (open_run(sorter / "runs" / name / "run_001") for name in ("straight", "resumed"))
    assert differences(straight.state()["models"], resumed.state()["models"]) == []
