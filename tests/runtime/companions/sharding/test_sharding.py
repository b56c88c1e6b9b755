"""Two workers that share the parameters of a model train it like one process."""

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import groups
import pytest
import torch
import torch.distributed as dist
from forkserver import Commands
from ray.train.torch import prepare_model  # bound before anything is sharded, as in user code
from sessions import ALONE
from torch import nn

import mlx_runtime
from mlx_runtime import TrainConfig
from mlx_runtime.distributed.topology import Topology
from mlx_runtime.distributed.wrapping import raised_by_sharded_tensors
from mlx_runtime.errors import MlxError
from mlx_runtime.loop.optimization import check_finite, prepare_models
from mlx_runtime.loop.strategies import DDP, strategy_of
from mlx_runtime.sections import Sharding

pytestmark = pytest.mark.local

WORLD = 2

WORKS: dict[str, groups.Work] = {}


def work(function: groups.Work) -> groups.Work:
    """Run a function on both workers, in a process group of its own."""
    WORKS[function.__name__] = function
    return function


@pytest.fixture(scope="module")
def on_workers(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """The results of each of `WORKS` on each of two processes, by name."""
    folder = tmp_path_factory.mktemp("workers")
    return groups.on_workers(commands, WORKS, folder, WORLD)


# -- models


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return x + self.mlp(self.norm(x))


class Net(nn.Module):
    """Its width is odd, its head is tied, one parameter is frozen, and one buffer is not part of its state."""

    offset: torch.Tensor

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 12, bias=False)
        self.head.weight = self.embed.weight
        self.norm.bias.requires_grad_(False)
        self.register_buffer("offset", torch.randn(width), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.offset
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


class Attentive(nn.Module):
    """Initializes itself late, in ways that look at parts of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 6, padding_idx=3)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.qkv = nn.Parameter(torch.empty(9, 6))
        self.register_buffer("angles", torch.empty(4))
        self.head = nn.Linear(6, 12, bias=False)
        self.head.weight = self.embed.weight

    def init_weights(self) -> None:
        self.embed.reset_parameters()  # zeros one row
        for layer in self.layers:
            assert isinstance(layer, nn.Linear)
            nn.init.orthogonal_(layer.weight)
            nn.init.zeros_(layer.bias)
        with torch.no_grad():
            self.qkv[:5].normal_(std=0.1)
            self.qkv.data[5:].copy_(torch.randn(4, 6))
            first, second = self.qkv.chunk(2)
            nn.init.trunc_normal_(self.embed.weight[4:], std=0.02)
            first.add_(1)
            second.sub_(1)
            self.get_buffer("angles").copy_(torch.rand(4))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers(x)
        return y


class Models:
    def __init__(self, net: nn.Module, small: nn.Module | None = None) -> None:
        self.net, self.small = net, small


class WithAverage:
    def __init__(self, net: nn.Module) -> None:
        self.net, self.average = net, copy.deepcopy(net).requires_grad_(False)


class Late(Models):
    deferred_init = ("net",)


class Different(Models):
    strategies = {"small": "ddp"}


class Planned(Models):
    shard_plan = {"net": ["blocks.1", "norm", "head"]}


class Tied:
    def __init__(self, net: Net) -> None:
        self.net, self.head = net, nn.Linear(7, 12)
        self.head.weight = net.embed.weight


class Scalar(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.scale = nn.Parameter(torch.tensor(1.0))


def node(group: type, **models: type) -> dict[str, Any]:
    """The group `models` of conf.yaml."""
    paths = {name: {"_target_": f"{__name__}.{model.__name__}"} for name, model in models.items()}
    return {"_target_": f"{__name__}.{group.__name__}"} | paths


class Small(nn.Linear):
    def __init__(self) -> None:
        super().__init__(7, 5)


def sharded(tree: Mapping[str, Any], **settings: Any) -> tuple[DDP, Any]:
    """The strategy and the models of this worker."""
    cfg = TrainConfig(**{"strategy": "fsdp", **settings})
    topology = Topology(dist.get_rank(), WORLD, torch.device("cpu"))
    torch.manual_seed(0)
    strategy = strategy_of(cfg, topology, tree)
    return strategy, strategy.build(tree)


def alone(tree: Mapping[str, Any], **settings: Any) -> Any:
    """The models of one process."""
    torch.manual_seed(0)
    return DDP(TrainConfig(**settings), ALONE).build(tree)


def whole(tensor: Any) -> torch.Tensor:
    full: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach()


def distance(one: nn.Module, other: nn.Module) -> float:
    """The maximum difference between two models that have the same parameters and buffers."""
    assert list(one.state_dict()) == list(other.state_dict())
    ours, theirs = ({**dict(model.named_parameters()), **dict(model.named_buffers())} for model in (one, other))
    assert list(ours) == list(theirs)
    return max(float((whole(ours[name]) - whole(theirs[name])).abs().max()) for name in ours)


def loss_of(net: nn.Module, step: int, *ranks: int) -> torch.Tensor:
    """The loss of the rows of some ranks, by default of this one."""
    rows = [
        torch.randint(12, (4, 6), generator=torch.Generator().manual_seed(10 * step + rank))
        for rank in ranks or [dist.get_rank()]
    ]
    tokens = torch.cat(rows)
    return nn.functional.cross_entropy(net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def train(net: nn.Module, optimizer: torch.optim.Optimizer, *ranks: int, steps: Iterable[int] = range(3)) -> None:
    for step in steps:
        loss_of(net, step, *ranks).backward()
        optimizer.step()
        optimizer.zero_grad()


def trained(net: nn.Module) -> list[nn.Parameter]:
    return [param for param in net.parameters() if param.requires_grad]


def error_of(action: Callable[[], object]) -> str:
    try:
        action()
    except MlxError as error:
        return str(error)
    return "no error"


# -- what both workers do


@work
def values(rank: int) -> dict[str, Any]:
    tree = node(Models, net=Net)
    _, ours = sharded(tree)
    drawn, theirs = torch.rand(1).item(), alone(tree)
    locally = {name: item.to_local().numel() for name, item in ours.net.named_parameters()}
    return {
        "distance": distance(ours.net, theirs.net),
        "next number": drawn == torch.rand(1).item(),
        "tied": ours.net.head.weight is ours.net.embed.weight,
        "elements": locally["embed.weight"],
    }


@work
def deferred(rank: int) -> dict[str, Any]:
    tree = node(Late, net=Attentive)
    _, ours = sharded(tree)
    theirs = alone(tree)
    return {
        "distance": distance(ours.net, theirs.net),
        "tied": ours.net.head.weight is ours.net.embed.weight and theirs.net.head.weight is theirs.net.embed.weight,
        "row": theirs.net.embed.weight[3].abs().sum().item(),
    }


TRAINED: dict[str, dict[str, Any]] = {
    "fsdp": {},
    "replicas of one worker": {"sharding": Sharding(1)},
    "one replica of two workers": {"sharding": Sharding(2)},
    "recomputed": {"activation_checkpointing": True},
    "recomputed by a pattern": {"activation_checkpointing": "blocks.1"},
    "compiled": {"compile": "aot_eager", "activation_checkpointing": True},
}


@work
def training(rank: int) -> dict[str, float]:
    tree, found = node(Models, net=Net), {}
    theirs = alone(tree).net
    train(theirs, torch.optim.AdamW(trained(theirs), lr=0.01), *range(WORLD))
    for name, settings in TRAINED.items():
        _, ours = sharded(tree, **settings)
        train(ours.net, torch.optim.AdamW(trained(ours.net), lr=0.01))
        found[name] = distance(ours.net, theirs)
    strategy, ours = sharded(node(Planned, net=Net))
    train(ours.net, torch.optim.AdamW(trained(ours.net), lr=0.01))
    assert ", 2 blocks;" in strategy.described[0]  # the head is tied
    return {**found, "planned": distance(ours.net, theirs)}


@work
def recomputation(rank: int) -> list[int]:
    """How often each block runs in a step."""
    found = []
    for settings in ({}, {"activation_checkpointing": True}, {"activation_checkpointing": "blocks.1"}):
        _, ours = sharded(node(Models, net=Net), **settings)
        loss_of(ours.net, 0).backward()
        found += [block.runs for block in ours.net.blocks]
    return found


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "Adam": {"fused": True},
    "AdamW": {"foreach": True},
    "Adagrad": {},
}


@work
def optimizers(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, settings in OPTIMIZERS.items():
        strategy, ours = sharded(node(Models, net=Net))
        theirs = alone(node(Models, net=Net))
        optimizer = getattr(torch.optim, name)(trained(ours.net), **settings)
        strategy.prepare_optimizers({"it": optimizer})
        train(ours.net, optimizer)
        train(theirs.net, getattr(torch.optim, name)(trained(theirs.net), **settings), *range(WORLD))
        found[name] = distance(ours.net, theirs.net)
    for name in ("Adafactor", "Rprop"):
        strategy, ours = sharded(node(Models, net=Net))
        optimizer = getattr(torch.optim, name)(trained(ours.net))
        strategy.prepare_optimizers({"it": optimizer})
        with pytest.raises(RuntimeError) as caught:
            train(ours.net, optimizer)
        found[name] = raised_by_sharded_tensors(caught.value)
    return found


@work
def accumulation(rank: int) -> float:
    """Updates of three steps, after one that is abandoned; with clipping and an average of weights."""
    strategy, ours = sharded(node(WithAverage, net=Net))
    theirs = alone(node(WithAverage, net=Net))
    optimizer, other = (torch.optim.SGD(trained(item.net), lr=0.3) for item in (ours, theirs))
    strategy.sync_gradients([ours.net], False)
    loss_of(ours.net, 99).backward()
    assert all(param.grad is None for param in ours.net.parameters())
    strategy.drop_gradients([ours.net])
    for update in range(2):
        for step in range(3):
            strategy.sync_gradients([ours.net], step == 2)
            (loss_of(ours.net, 3 * update + step) / 3).backward()
            (loss_of(theirs.net, 3 * update + step, *range(WORLD)) / 3).backward()
        norm = strategy.clip_grad_norm_(ours.net.parameters(), 0.1)
        assert torch.allclose(norm, nn.utils.clip_grad_norm_(theirs.net.parameters(), 0.1))
        for item in (ours, theirs):
            with torch.no_grad():
                loss_of(item.average, 0, 0)  # as an evaluation does before the average changes
                for average, param in zip(item.average.parameters(), item.net.parameters(), strict=True):
                    average.lerp_(param, 0.5)
        for item in (optimizer, other):
            item.step()
            item.zero_grad()
    return max(distance(ours.net, theirs.net), distance(ours.average, theirs.average))


@work
def one_optimizer_for_both(rank: int) -> dict[str, Any]:
    """A model that is sharded, and one that is not."""
    strategy, ours = sharded(node(Different, net=Net, small=Small), precision="fp16")
    params = [*ours.small.parameters(), *trained(ours.net)]
    optimizer = torch.optim.AdamW(params, foreach=True)
    strategy.prepare_optimizers({"it": optimizer})
    scaler, before = strategy.scaler(enabled=True), [whole(param).clone() for param in params]
    scaler.load_state_dict(scaler.state_dict() | {"scale": 8.0})

    def step(broken: bool) -> bool:
        loss = loss_of(ours.net, 0) + ours.small(torch.ones(2, 7)).square().mean()
        scaler.scale(loss).backward()
        if broken and rank == 1:
            ours.net.embed.weight.grad.to_local()[0, 0] = torch.inf  # on one worker only
        scaler.unscale_(optimizer)
        norm = strategy.clip_grad_norm_(params, 0.5)
        assert type(norm) is torch.Tensor
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return all(torch.equal(whole(param), old) for param, old in zip(params, before, strict=True))

    skipped = step(broken=True), scaler.get_scale()
    return {"skipped": skipped, "then": (step(broken=False), scaler.get_scale())}


@work
def half_precision(rank: int) -> list[Any]:
    _, ours = sharded(node(Models, net=Normed), precision="bf16")
    inside: list[torch.dtype] = []
    ours.net.layers[2].register_forward_pre_hook(lambda _, args: inside.append(args[0].dtype))
    output = ours.net(torch.randn(8, 4))
    output.sum().backward()
    weight = ours.net.layers[0].weight
    prepare_models([ours.net], TrainConfig(precision="bf16"), torch.device("cpu"))  # in autocast, if it is not sharded
    return [*inside, output.dtype, weight.dtype, weight.grad.dtype, "forward" in vars(ours.net)]


@work
def gradients(rank: int) -> str:
    """The error about a NaN in the part of one worker."""
    _, ours = sharded(node(Models, net=Net))
    loss_of(ours.net, 0).backward()
    if rank == 1:
        ours.net.embed.weight.grad.to_local()[0] = torch.nan
    return error_of(lambda: check_finite({"net": ours.net}, ours.net.parameters(), 4))


@work
def preparation(rank: int) -> list[Any]:
    from mlx_runtime.companions.ray.private import enter_ray_train

    topology = Topology(rank, WORLD, torch.device("cpu"))
    enter_ray_train("it", topology, quiet=True)
    _, ours = sharded(node(Different, net=Net, small=Small))
    optimizer = torch.optim.SGD(trained(ours.net), lr=0.1)
    with topology.entered():
        net, small = prepare_model(ours.net), prepare_model(ours.small)
        kept, wrapped = mlx_runtime.prepare_model(net), mlx_runtime.prepare_model(ours.small, {"bucket_cap_mb": 3})
    assert kept is net
    assert (type(wrapped), wrapped.module, wrapped.bucket_bytes_cap) == (type(small), ours.small, 3 << 20)
    before = whole(net.embed.weight).clone()
    train(net, optimizer)
    return [net is ours.net, type(small).__name__, torch.equal(whole(net.embed.weight), before)]


@work
def refused(rank: int) -> list[str]:
    trees = (node(Tied, net=Net), node(Models, net=Scalar))
    return [error_of(functools.partial(sharded, tree)) for tree in trees]


# -- what they found


def everywhere(results: list[Any]) -> Iterator[Any]:
    assert len(results) == WORLD
    yield from results


class TestValues:
    def test_they_are_those_of_a_model_that_is_not_sharded(self, on_workers: dict[str, Any]) -> None:
        for found in everywhere(on_workers["values"]):
            assert (found["distance"], found["next number"], found["tied"]) == (0, True, True)
        assert [found["elements"] for found in on_workers["values"]] == [42, 42]

    def test_deferred_initialization_draws_the_same_numbers(self, on_workers: dict[str, Any]) -> None:
        for found in everywhere(on_workers["deferred"]):
            assert (found["distance"], found["tied"], found["row"]) == (0, True, 0)


class TestTraining:
    @pytest.mark.parametrize("name", [*TRAINED, "planned"])
    def test_it_ends_at_the_weights_of_one_process(self, on_workers: dict[str, Any], name: str) -> None:
        for found in everywhere(on_workers["training"]):
            assert found[name] < 1e-5

    def test_blocks_run_again_where_they_should(self, on_workers: dict[str, Any]) -> None:
        assert on_workers["recomputation"] == [[1, 1, 2, 2, 1, 2]] * WORLD

    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_optimizers(self, on_workers: dict[str, Any], name: str) -> None:
        for found in everywhere(on_workers["optimizers"]):
            assert found[name] < 1e-5

    @pytest.mark.parametrize("name", ["Adafactor", "Rprop"])
    def test_optimizers_that_cannot_take_shards(self, on_workers: dict[str, Any], name: str) -> None:
        for found in everywhere(on_workers["optimizers"]):
            assert found[name] is True

    def test_an_abandoned_update_accumulation_clipping_and_an_average(self, on_workers: dict[str, Any]) -> None:
        assert all(found < 1e-5 for found in everywhere(on_workers["accumulation"]))

    def test_all_workers_skip_a_step_that_overflows_on_one(self, on_workers: dict[str, Any]) -> None:
        for found in everywhere(on_workers["one_optimizer_for_both"]):
            assert found == {"skipped": (True, 4.0), "then": (False, 4.0)}

    def test_half_precision_is_that_of_the_shards(self, on_workers: dict[str, Any]) -> None:
        half, full = torch.bfloat16, torch.float32
        assert on_workers["half_precision"] == [[half, full, full, full, False]] * WORLD

    def test_all_workers_stop_at_a_nan_on_one(self, on_workers: dict[str, Any]) -> None:
        for found in everywhere(on_workers["gradients"]):
            assert found == "the gradient of net.embed.weight is not finite at step 4 (cfg.debug.stop_on_nan)"


class TestUserCode:
    def test_prepare_model_returns_a_sharded_model_as_it_is(self, on_workers: dict[str, Any]) -> None:
        assert on_workers["preparation"] == [[True, "DistributedDataParallel", False]] * WORLD

    def test_models_that_cannot_be_sharded(self, on_workers: dict[str, Any]) -> None:
        tied, scalar = on_workers["refused"][0]
        assert tied.startswith("models.head shares parameters with models.net, so neither can be sharded; Models.")
        assert scalar.startswith("models.net cannot be sharded: fully_shard doesn't support scalar parameters. Change")
        assert scalar.endswith('\nModels.strategies = {"name": "ddp"} replicates a model on all workers')
