"""What trains: frozen parameters, learning rates, and checkpoints without what never trains."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import Mlx, Script
from safetensors.torch import load_file
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import ExponentialLR

from mlx_runtime.companions.surgery.tuning import Tuner, problems
from mlx_runtime.config.building import build_optimizers
from mlx_runtime.distributed.topology import Topology
from mlx_runtime.errors import ConfigError
from mlx_runtime.loop.context import Groups
from mlx_runtime.loop.options import TrainConfig
from mlx_runtime.loop.resuming import set_group_values
from mlx_runtime.runs.checkpoints.groups import load_into, state_of

HERE = __name__


class Net(nn.Module):
    """A stem, three blocks with BatchNorm, one of them without parameters, and a head that is tied to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=i > 0)) for i in range(3))
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        result: torch.Tensor = self.head(x)
        return result


class Models:
    map_params_to_optimizers = {"net": "adam", "other": "adam"}

    def __init__(self) -> None:
        self.net, self.other = Net(), nn.Linear(1, 1)


class Optimizers:
    def __init__(self, adam: AdamW) -> None:
        self.adam = adam


def tuned(workers: int = 1, **settings: Any) -> tuple[SimpleNamespace, Tuner, SimpleNamespace]:
    """The groups of an experiment with this section for its `net`, the tuner, and its session."""
    torch.manual_seed(0)
    made = SimpleNamespace(models=Models())
    tuner = Tuner(TrainConfig(tuning={"net": settings}), made.models, Topology(0, workers, torch.device("cpu")))
    node = {"_target_": f"{HERE}.Optimizers", "adam": {"_target_": "torch.optim.AdamW", "lr": 0.1}}
    made.optimizers = build_optimizers(node, made.models, tuner.params_of)
    lines: list[str] = []
    session = SimpleNamespace(
        context=SimpleNamespace(groups=Groups(made)), reporter=SimpleNamespace(notice=lines.append), lines=lines
    )
    return made, tuner, session


@pytest.mark.pure
def test_groups_and_their_learning_rates() -> None:
    freeze = {"freeze": ["stem.*", "blocks.*"], "unfreeze": {"blocks.1.*": 0, "blocks.2.*": 3}}
    made, tuner, session = tuned(**freeze, layer_decay=0.5, learning_rates={"head.bias": 0.7, "*.2.1.*": 0.3})
    with contextlib.ExitStack() as stack:
        tuner.observe(session, stack)
    assert "\n".join(session.lines).splitlines() == [
        "tuning    adam[0]: net layer 2 of 4, 4 tensors, 28 parameters, lr 0.025",
        "          adam[1]: net layer 3 of 4, 2 tensors, 20 parameters, lr 0.05, frozen for 3 epochs",
        "          adam[2]: net *.2.1.*, 2 tensors, 8 parameters, lr 0.3, frozen for 3 epochs",
        "          adam[3]: net layer 4 of 4, 1 tensor, 8 parameters, lr 0.1",
        "          adam[4]: net head.bias, 1 tensor, 2 parameters, lr 0.7",
        "          adam[5]: other, 2 tensors, 2 parameters, lr 0.1",
        "          frozen: net, 4 tensors, 40 parameters",
    ]
    scheduler = ExponentialLR(made.optimizers.adam, 0.5)
    for _ in range(2):
        made.optimizers.adam.step()
        scheduler.step()
    set_group_values({"adam": made.optimizers.adam}, [scheduler], {"adam": {"lr": 0.1}}, {"adam": {"lr": 0.2}})
    rates = [0.05, 0.1, 0.3, 0.2, 0.7, 0.2]
    assert scheduler.base_lrs == pytest.approx(rates)
    assert [group["lr"] * 4 for group in made.optimizers.adam.param_groups] == pytest.approx(rates)


@pytest.mark.pure
def test_statistics_of_frozen_parts_stay() -> None:
    """The first BatchNorm has no parameters, and belongs to its block."""
    made, tuner, session = tuned(freeze=["blocks.0.*", "blocks.1.*"], unfreeze={"blocks.1.*": 2})
    net, seen = made.models.net, []
    with contextlib.ExitStack() as stack:
        tuner.observe(session, stack)
        for epoch in range(3):
            net.train()
            tuner.turn_to(epoch)  # at the first batch
            if epoch == 1:
                net.blocks.train()
            net(torch.randn(8, 4))
            seen.append([int(block[1].num_batches_tracked) for block in net.blocks])
    assert seen == [[0, 0, 1], [0, 0, 2], [0, 1, 3]]


@pytest.mark.pure
@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"freeze": ["block.*"]}, "freeze: 'block.*' matches no parameter. Did you mean 'blocks.*'?"),
        ({"unfreeze": {"head.*": 1}}, "unfreeze: 'head.*' matches no frozen parameter. There are none."),
        (
            {"freeze": ["*"], "unfreeze": {"head.*": 1, "*.bias": 2}},
            "unfreeze has two patterns for head.bias: 1 and 2 epochs",
        ),
        (
            {"learning_rates": {"head.*": 0.1, "*.bias": 0.2}},
            "learning_rates has two rates for head.bias: 'head.*' and '*.bias' match it",
        ),
        (
            {"freeze": ["stem.*"], "learning_rates": {"stem.bias": 0.1}},
            "learning_rates: 'stem.bias' matches no parameter that trains. Did you mean 'head.bias'?",
        ),
    ],
)
def test_patterns_that_contradict_each_other_are_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        tuned(**settings)
    assert str(error.value) == f"cfg.tuning.net.{problem}"


@pytest.mark.pure
@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ({"frezee": ["a"]}, ".frezee: mlx_runtime.sections.Tuning has no such argument. Did you mean 'freeze'?"),
        ({"freeze": "a"}, ".freeze is 'a'; mlx_runtime.sections.Tuning takes tuple[str, ...]"),
        ({"layer_decay": 2}, ".layer_decay is 2; write (0, 1]"),
        ({"unfreeze": {"a": -1}}, ".unfreeze is -1; write 0 or more"),
        ({"learning_rates": {"a": 0.0}}, ".learning_rates is 0.0; write above 0"),
        (3, " is 3; mlx_runtime.sections.Tuning takes Tuning"),
    ],
)
def test_other_values_are_refused(section: Any, problem: str) -> None:
    cfg = TrainConfig(tuning={"net": section})
    assert problems(cfg) == TrainConfig.out_of_range(cfg) == [f"cfg.tuning.net{problem}"]


@pytest.mark.pure
def test_optimizers_that_hold_frozen_parameters() -> None:
    """Those that never train stay equal, with a notice; DDP would not know those that train later."""
    made, tuner, session = tuned(2, freeze=["stem.*", "head.*"], unfreeze={"head.*": 1})
    with contextlib.ExitStack() as stack:
        tuner.observe(session, stack)
        SGD(made.models.net.stem.parameters(), lr=1, weight_decay=1).step()
        assert session.lines[1] == (
            "an optimizer of the loop holds 2 parameters that cfg.tuning freezes, like net.stem.weight"
        )
        with pytest.raises(ConfigError, match=r"net\.head\.weight trains later, and DDP would not synchronize it"):
            made.optimizers.adam.step()
    torch.manual_seed(0)
    assert torch.equal(made.models.net.stem.weight, Net().stem.weight)


@pytest.mark.pure
def test_states_without_frozen_parameters() -> None:
    made, tuner, _ = tuned(freeze=["stem.*"], save="trained")
    states = tuner.without_frozen(state_of(made.models)[0])
    assert {name for name, item in states["net"].items() if isinstance(item, dict)} == {"stem.weight", "stem.bias"}
    other, _, _ = tuned(freeze=["stem.*"])
    load_into(other.models, states, "models")
    with torch.no_grad():
        other.models.net.stem.bias[0] += 1
        made.models.net.stem.bias[0] += 1
    with pytest.raises(ConfigError, match=r"models\.net in the checkpoint .* stem\.bias was frozen and is not in the"):
        load_into(other.models, states, "models")
    with pytest.raises(ConfigError, match=r"models\.net\.stem\.bias is frozen, and not as its constructor builds it"):
        tuner.without_frozen(state_of(made.models)[0])


DIGITS = """
cfg:
  num_epochs: 3
  checkpoint_every_steps: 7
  gradient_clip: 1.0
  tuning:
    net:
      freeze: ["layers.0.*", "layers.1.*"]
      unfreeze: {"layers.1.*": 1}
      learning_rates: {"layers.4.*": 0.01}
optimizers:
  adam:
    weight_decay: 0.1
"""


@pytest.mark.kills
def test_a_run_that_begins_to_train_a_part_is_exact_on_two_workers(mlx: Mlx, digits: Path) -> None:
    """Workers and drivers are killed before and after that part begins to train."""
    (digits / "src" / "variants").mkdir()
    (digits / "src" / "variants" / "tuned.yaml").write_text(DIGITS)
    done = mlx(digits, "train", "prove", "--json", "--kills=2", "--seed=2", "--variant=tuned")
    found = json.loads(done.stdout)
    assert [check["holds"] for check in found["checks"]] == [True, True, True], found
    done = mlx(digits, "train", "run", "--variant=tuned")
    assert done.returncode == 0, done.stderr
    first, last = (states_of(digits / "runs/digits/run_001", number)["net"] for number in (1, 3))
    assert [name for name in last if torch.equal(first[name], last[name])] == [
        name for name in last if name.startswith("layers.0.")
    ]
    norms = [last[f"layers.{number}.layers.1.num_batches_tracked"] for number in (0, 1)]
    assert norms == [0, 40]
    assert first["layers.1.layers.1.num_batches_tracked"] == 0
    torch.manual_seed(0)
    assert torch.equal(first["layers.1.layers.1.weight"], torch.ones(64))  # without weight decay


def states_of(run: Path, epoch: int) -> dict[str, dict[str, Any]]:
    found = torch.load(run / "checkpoints" / f"epoch_{epoch:04d}" / "state.pt", weights_only=True)
    models: dict[str, dict[str, Any]] = found["models"]
    return models


SHARDS = """
cfg:
  num_epochs: 3
  start_workers: 2
  checkpoint_every_steps: 3
  tuning:
    net:
      freeze: ["*"]
      unfreeze: {"blocks.1.*": 1, "blocks.2.mlp.*": 0, "norm.*": 2}
      layer_decay: 0.5
"""


@pytest.mark.kills
def test_sharded_models_begin_to_train_parts_like_replicas(mlx: Mlx, experiment: Callable[[str], Path]) -> None:
    """The sharded run is interrupted in the epoch in which the second block begins to train, and resumed."""
    folder = experiment("shards")
    (folder / "src" / "variants").mkdir()
    (folder / "src" / "variants" / "tuned.yaml").write_text(SHARDS)

    def trained(*words: str) -> dict[str, torch.Tensor]:
        done = mlx(folder, "train", "run", "--variant=tuned", *words)
        assert done.returncode == 0, done.stderr
        weights = (
            torch.load(folder / "seen" / "weights.pt", weights_only=True) if "cfg.max_steps=6" not in words else {}
        )
        return {name.removeprefix("module."): item for name, item in weights.items()}

    trained("cfg.strategy=fsdp", "cfg.max_steps=6")
    sharded = trained("cfg.strategy=fsdp", "cfg.max_steps=null", "--resume=run_001")
    replicated = trained("cfg.name=replicated")
    assert sharded.keys() == replicated.keys()
    for name, item in replicated.items():
        assert torch.allclose(sharded[name], item, atol=1e-3), name


@pytest.mark.process
def test_checkpoints_of_adapters(mlx: Mlx, script: Script, experiment: Callable[[str], Path]) -> None:
    """They are small, fit only the weights that they were trained on, and exports merge them."""
    folder = experiment("adapters")
    for words in (("cfg.name=all",), ("cfg.num_epochs=1",), ("--resume=run_001", "cfg.num_epochs=2")):
        done = mlx(
            folder, "train", "run", "+cfg.tuning.net.save=" + ("all" if "all" in words[0] else "trained"), *words
        )
        assert done.returncode == 0, done.stderr
    one, other = (states_of(folder / "runs" / name / "run_001", 2)["net"] for name in ("all", "adapters"))
    trained = [name for name in one if "lora" in name or "num_" in name or "running_" in name]
    assert [name for name, item in other.items() if isinstance(item, torch.Tensor)] == trained
    assert all(torch.equal(one[name], other[name]) for name in trained)
    sizes = [
        (folder / "runs" / name / "run_001/checkpoints/epoch_0002/state.pt").stat().st_size
        for name in ("adapters", "all")
    ]
    assert sizes[0] < sizes[1] / 5

    path = "cfg.restore_checkpoint_path=runs/adapters/run_001/checkpoints/epoch_0002"
    done = mlx(folder, "train", "run", path, "cfg.seed=1", "+cfg.tuning.net.save=trained", "cfg.num_epochs=3")
    assert done.returncode == 1
    assert "error: models.net in the checkpoint does not fit the config: base_model.model." in done.stderr
    done = mlx(folder, "xp", "consolidate", "adapters/run_001")
    assert "adapters/run_001 epoch_0002 has only trained weights" in done.stderr

    done = mlx(folder, "xp", "export", "adapters/run_001")
    assert done.returncode == 0, done.stderr
    assert "merged    adapters of net" in done.stderr
    weights = load_file(folder / "adapters_run_001_epoch_0002" / "weights.safetensors")
    assert "net.second.weight" in weights
    assert not any("lora" in name for name in weights)
    answers = script(
        folder,
        "import json, torch, mlx_runtime\n"
        "rows = [{'x': [0.1 * number] * 8} for number in range(5)]\n"
        "run = mlx_runtime.open_run('adapters/run_001')\n"
        "net = run.load_models().net\n"
        "export = mlx_runtime.load_export('adapters_run_001_epoch_0002')(rows)['y']\n"
        "with_adapters = run.predictor()(rows)['y']\n"
        "net.eval(), net.disable_adapter_layers()\n"
        "plain = net(torch.tensor([row['x'] for row in rows]))\n"
        "others = {'adapters': with_adapters, 'plain': plain}\n"
        "print(json.dumps({name: (export - other).abs().max().item() for name, other in others.items()}))\n",
    )
    assert answers["adapters"] < 1e-5 < 1e-2 < answers["plain"]
