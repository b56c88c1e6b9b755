"""`self.backward`: all rows or tokens of an update have the same weight, for any number of workers and steps."""

import contextlib
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import groups
import pytest
import torch
import torch.distributed as dist
from forkserver import Commands
from sessions import ALONE, Events, attach
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from mlx_runtime import BaseModule, MlxError, TrainConfig
from mlx_runtime.data.loaders import DatasetShard, DatasetShards, LoaderOptions
from mlx_runtime.data.sampling import ShardPlan
from mlx_runtime.distributed.topology import Topology
from mlx_runtime.events import Notice
from mlx_runtime.loop.strategies import strategy_of
from mlx_runtime.losses import Mean
from mlx_runtime.sections import Sharding

WORKERS = (1, 2, 4)

STEPS = (1, 4)
"""Steps of an update."""

IGNORED = -1


class Tokens(Dataset):
    """29 rows of four targets, of which most rows have few, and the first batch of a worker none."""

    batch_size = 3
    shuffle = False

    def __len__(self) -> int:
        return 29

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        numbers = torch.Generator().manual_seed(index)
        targets = torch.randint(5, (4,), generator=numbers)
        targets[index % 5 if index > 2 else 0 :] = IGNORED
        return torch.randn(4, 3, generator=numbers) * (1 + index), targets

    @staticmethod
    def ray_map_batches(batch: dict[str, list[Any]]) -> dict[str, torch.Tensor]:
        inputs, targets = zip(*batch["item"], strict=True)
        return {"x": torch.stack(inputs), "y": torch.stack(targets)}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).flatten(0, 1)


class Models:
    def __init__(self, net: nn.Module) -> None:
        self.net = net


NODE = {"_target_": f"{__name__}.Models", "net": {"_target_": f"{__name__}.Net"}}


Loss = Callable[[BaseModule, torch.Tensor, dict[str, torch.Tensor]], None]


def rows(module: BaseModule, outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> None:
    module.backward(outputs.square().mean())


def tokens(module: BaseModule, outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> None:
    module.backward(module.losses.tokens(outputs, batch["y"].flatten()))


def weights(module: BaseModule, outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> None:
    """A mean over nothing is NaN here."""
    losses = F.cross_entropy(outputs, batch["y"].flatten(), ignore_index=IGNORED, reduction="none")
    count = (batch["y"] != IGNORED).sum()
    module.backward(losses.sum() / count, weight=count.item())


LOSSES: dict[str, Loss] = {"rows": rows, "tokens": tokens, "weights": weights}


def expected(name: str, net: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    outputs, targets = net(batch["x"]), batch["y"].flatten()
    if name == "rows":
        return outputs.square().mean()
    total = F.cross_entropy(outputs, targets, ignore_index=IGNORED, reduction="sum")
    return total / max(1, (targets != IGNORED).sum())


def trained(rank: int, size: int, steps: int, strategy: str, name: str, folder: Path) -> tuple[float, int]:
    """Return the distance to a model that takes each update as one batch, and the collectives of one number."""
    settings: dict[str, Any] = {"strategy": strategy}
    if strategy == "hsdp":
        settings = {"strategy": "fsdp", "sharding": Sharding(size // 2)}
    cfg = TrainConfig(accumulate_grad_batches=steps, **settings)
    topology = Topology(rank, size, torch.device("cpu"))
    torch.manual_seed(0)
    spread = strategy_of(cfg, topology, NODE)
    models = spread.build(NODE)
    torch.manual_seed(0)
    alone = Net()
    optimizer = torch.optim.SGD(models.net.parameters(), lr=0.1)
    other = torch.optim.SGD(alone.parameters(), lr=0.1)
    losses = SimpleNamespace(tokens=Mean(F.cross_entropy, ignore_index=IGNORED))
    module = BaseModule(cfg=cfg, models=models, optimizers=SimpleNamespace(sgd=optimizer), losses=losses)
    session = attach(module, folder, topology=topology, strategy=spread)
    session.begin()
    if strategy == "ddp":
        models.net = DistributedDataParallel(models.net)
    shard = DatasetShard(
        "train", SimpleNamespace(train=Tokens()), topology, LoaderOptions(accumulate=steps), follow=session.watch
    )
    (loader,) = module.generate_loaders(DatasetShards({"train": shard}))
    numbers, reduce = 0, dist.all_reduce

    def counted(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        nonlocal numbers
        numbers += tensor.numel() == 1
        return reduce(tensor, *args, **options)

    dist.all_reduce, batches = counted, []
    try:
        for batch in loader:
            batches.append(batch)
            LOSSES[name](module, models.net(batch["x"]), batch)
            if module.optimizer_step():
                of_all: list[Any] = [None] * size
                dist.all_gather_object(of_all, batches)
                merged = {key: torch.cat([item[key] for part in of_all for item in part]) for key in batch}
                expected(name, alone, merged).backward()
                other.step()
                other.zero_grad()
                batches = []
    finally:
        dist.all_reduce = reduce
    ours = [getattr(param, "full_tensor", lambda param=param: param)() for param in models.net.parameters()]
    gaps = [(one - two).abs().max().item() for one, two in zip(ours, alone.parameters(), strict=True)]
    return (math.nan if any(map(math.isnan, gaps)) else max(gaps)), numbers


def work(rank: int, size: int, folder: Path) -> dict[str, tuple[float, int]]:
    found = {}
    for steps in STEPS:
        for strategy in ("ddp", "fsdp", "hsdp")[: 3 if size == 4 else 2]:
            for name in LOSSES if strategy == "ddp" else ("rows", "tokens"):
                found[f"{strategy} {steps} {name}"] = trained(rank, size, steps, strategy, name, folder)
    return found


@pytest.mark.examples
def test_updates_are_those_of_one_large_batch(commands: Commands, tmp_path: Path) -> None:
    """With short and unequal batches at the end of the pass, and workers that have nothing to learn from a batch."""
    works = {f"{size}": partial(work, size=size, folder=tmp_path) for size in WORKERS}
    found = groups.on_workers(commands, works, tmp_path, max(WORKERS), {f"{size}": size for size in WORKERS})
    results = {f"{size} {key}": item for size in works for rank in found[size] for key, item in rank.items()}
    assert len(results) == len(STEPS) * (5 + 5 + 7)
    assert {key: gap for key, (gap, _) in results.items() if not gap < 1e-5} == {}
    for key, (_, numbers) in results.items():
        size, _, steps, name = key.split()
        count = ShardPlan(29, int(size), 3).steps
        updates = [min(int(steps), count - first) for first in range(0, count, int(steps))]
        exchanges = sum(1 if item == 1 else 2 for item in updates)
        assert numbers == (0 if name == "rows" or size == "1" else exchanges), key


# -- in one process


@pytest.fixture
def begin(tmp_path: Path) -> Callable[..., tuple[BaseModule, Any, Events]]:
    """`begin(accumulate_grad_batches=2)`: an experiment with two models, its loader, and what it reports."""

    def begin(**settings: Any) -> tuple[BaseModule, Any, Events]:
        torch.manual_seed(0)
        models = SimpleNamespace(one=Net(), two=Net())
        optimizers = SimpleNamespace(
            one=torch.optim.SGD(models.one.parameters(), lr=0.1), two=torch.optim.SGD(models.two.parameters(), lr=0.1)
        )
        losses = SimpleNamespace(tokens=Mean(F.cross_entropy, ignore_index=IGNORED), error=Mean(F.mse_loss))
        module, events = (
            BaseModule(cfg=TrainConfig(**settings), models=models, optimizers=optimizers, losses=losses),
            Events(),
        )
        session = attach(module, tmp_path, events)
        session.begin()
        options = LoaderOptions(accumulate=module.cfg.accumulate_grad_batches)
        shard = DatasetShard("train", SimpleNamespace(train=Tokens()), ALONE, options, follow=session.watch)
        return module, module.generate_loaders(shard), events

    return begin


pytestmark = pytest.mark.pure

Begin = Callable[..., tuple[BaseModule, Any, Events]]


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [param.grad for param in model.parameters()]


def same(ours: nn.Module, theirs: nn.Module) -> bool:
    return all(torch.allclose(a, b, atol=1e-6) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


@pytest.mark.parametrize("steps", [1, 3])
def test_equal_batches_give_the_bits_of_plain_torch(begin: Begin, steps: int) -> None:
    module, loader, _ = begin(accumulate_grad_batches=steps)
    plain = Net()
    plain.load_state_dict(module.models.one.state_dict())
    for number, batch in enumerate(loader):
        if number == 3:
            break
        module.backward(module.models.one(batch["x"]).square().mean())
        (plain(batch["x"]).square().mean() / steps).backward()
    pairs = list(zip(gradients(module.models.one), gradients(plain), strict=True))
    assert all(torch.equal(one, two) for one, two in pairs)


def test_losses_of_one_step_add_up(begin: Begin) -> None:
    """In an update of one step, whatever they count."""
    module, loader, _ = begin()
    batch = next(iter(loader))
    plain = Net()
    plain.load_state_dict(module.models.one.state_dict())
    for weight in (None, 3.0, torch.tensor(4)):
        module.backward(module.models.one(batch["x"]).square().mean(), weight=weight)
    (3 * plain(batch["x"]).square().mean()).backward()
    pairs = zip(gradients(module.models.one), gradients(plain), strict=True)
    assert all(torch.allclose(one, two) for one, two in pairs)


@pytest.mark.parametrize(("weights", "refused"), [((3, 4), True), ((3, None), True), ((3, 3), False)])
def test_losses_that_no_single_number_can_divide_are_refused(begin: Begin, weights: Any, refused: bool) -> None:
    module, loader, _ = begin(accumulate_grad_batches=2)
    x = next(iter(loader))["x"]
    problem = "the losses of an update of several steps have different weights, or only some have one"
    module.backward(module.models.one(x).square().mean(), weight=weights[0])
    with pytest.raises(MlxError, match=f"^{problem}") if refused else contextlib.nullcontext():
        module.backward(module.models.one(x).square().mean(), weight=weights[1])
    assert refused or not module.optimizer_step("one")


def test_a_weight_that_is_none(begin: Begin) -> None:
    module, _, _ = begin()
    with pytest.raises(MlxError, match=r"^self.backward\(loss, weight=nan\): the weight is a number, 0 or more"):
        module.backward(module.models.one(torch.ones(1, 4, 3)).mean(), weight=math.nan)


def test_a_loss_that_counts_is_noticed_if_it_is_not_alone(begin: Begin) -> None:
    """Calls for an evaluation, or in a step before, do not matter."""
    module, loader, events = begin()
    for number, batch in enumerate(loader):
        outputs, targets = module.models.one(batch["x"]), batch["y"].flatten()
        loss = module.losses.tokens(outputs, targets)
        if number == 1:
            continue
        with torch.no_grad():
            module.losses.tokens(outputs, targets)
        if number == 3:
            loss = loss + module.losses.error(outputs, outputs.detach() + 1)
        module.backward(loss)
    (notice,) = [event.text for event in events if isinstance(event, Notice)]
    assert notice == (
        "self.backward weighs rows equally, not what losses.tokens counts, because several losses were called before "
        "it: tokens, error; pass weight=, or call self.backward after each"
    )
