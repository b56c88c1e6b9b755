"""What trains: frozen parameters, learning rates, and checkpoints without what never trains."""

import contextlib
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import Mlx, Script
from safetensors.torch import load_file
from sessions import ALONE, attach
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import ExponentialLR

from mlx_runtime import BaseModule
from mlx_runtime.companions.surgery.tuning import Tuner, hold_statistics
from mlx_runtime.config.building import build_cfg
from mlx_runtime.config.checks import problems_of
from mlx_runtime.distributed.topology import Topology
from mlx_runtime.errors import ConfigError
from mlx_runtime.loop.context import Groups
from mlx_runtime.loop.options import TrainConfig
from mlx_runtime.loop.resuming import set_group_values
from mlx_runtime.loop.strategies import DDP
from mlx_runtime.runs.checkpoints.groups import load_into, state_of
from mlx_runtime.sections import Tuning

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
    tuner = Tuner({"net": Tuning(**settings)}, made.models, Topology(0, workers, torch.device("cpu")))
    node = {"_target_": f"{HERE}.Optimizers", "adam": {"_target_": "torch.optim.AdamW", "lr": 0.1}}
    made.optimizers = tuner.optimizers(node, made.models)
    lines: list[str] = []
    session = SimpleNamespace(
        context=SimpleNamespace(groups=Groups(made)),
        reporter=SimpleNamespace(notice=lines.append),
        own_steps=None,
        lines=lines,
    )
    return made, tuner, session


@pytest.mark.pure
def test_groups_and_their_learning_rates() -> None:
    freeze = {"freeze": ["stem.*", "blocks.*"], "unfreeze": {"blocks.1.*": 0, "blocks.2.*": 3}}
    made, tuner, session = tuned(**freeze, layer_decay=0.5, learning_rates={"head.bias": 0.7, "*.2.1.*": 0.3})
    scheduler = ExponentialLR(made.optimizers.adam, 0.5)  # as in the constructor of an experiment
    with contextlib.ExitStack() as stack:
        tuner.observe(session, stack)
    assert "\n".join(session.lines).splitlines() == [
        "tuning    adam[0]: net layer 2 of 4, 4 tensors, 28 parameters, lr 0.025",
        "          adam[1]: net layer 3 of 4, 2 tensors, 20 parameters, lr 0.05, trains after pass 3",
        "          adam[2]: net *.2.1.*, 2 tensors, 8 parameters, lr 0.3, trains after pass 3",
        "          adam[3]: net layer 4 of 4, 1 tensor, 8 parameters, lr 0.1",
        "          adam[4]: net head.bias, 1 tensor, 2 parameters, lr 0.7",
        "          adam[5]: other, 2 tensors, 2 parameters, lr 0.1",
        "          frozen: net, 4 tensors, 40 parameters",
    ]
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
    copied = pickle.loads(pickle.dumps(net)).train()
    assert [block[1].training for block in copied.blocks] == [False, True, True]
    hold_statistics(frozen := nn.BatchNorm1d(1).requires_grad_(False), set())  # by its constructor
    assert frozen.training


@pytest.mark.pure
@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"freeze": ["block.*"]}, "freeze: 'block.*' matches no parameter. Did you mean 'blocks.*'?"),
        ({"unfreeze": {"head.*": 1}}, "unfreeze: 'head.*' matches no frozen parameter. There are none."),
        (
            {"freeze": ["*"], "unfreeze": {"head.*": 1, "*.bias": 2}},
            "unfreeze has two values for head.bias: 'head.*' and '*.bias' match it",
        ),
        (
            {"learning_rates": {"head.*": 0.1, "*.bias": 0.2}},
            "learning_rates has two values for head.bias: 'head.*' and '*.bias' match it",
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
        (3, " is 3, not settings of mlx_runtime.sections.Tuning"),
    ],
)
def test_other_values_are_refused(section: Any, problem: str) -> None:
    tree = {"cfg": {"_target_": "mlx_runtime.TrainConfig", "tuning": {"net": section}}}
    found = [item.text for item in problems_of(tree, {"cfg": TrainConfig}, TrainConfig)]
    found = found or TrainConfig.out_of_range(build_cfg(tree["cfg"], TrainConfig))
    assert found == [f"cfg.tuning.net{problem}"]


@pytest.mark.pure
def test_sections_are_data() -> None:
    """Nothing that they name is called, not even to check them."""
    called = {"_target_": "builtins.print", "_args_": ["called"]}
    for section in (called, {"freeze": ["a"], "layer_decay": called}):
        tree = {"cfg": {"_target_": "mlx_runtime.TrainConfig", "tuning": {"net": section}}}
        found = [item.text for item in problems_of(tree, {"cfg": TrainConfig}, TrainConfig)]
        assert len(found) == 1
        assert found[0].endswith("_target_ is 'builtins.print', not allowed in cfg.tuning; remove it")


@pytest.mark.pure
def test_models_without_layers_and_parameters_of_two_models() -> None:
    group = SimpleNamespace(one=nn.Linear(2, 2), two=nn.Sequential(nn.Linear(2, 2)))
    group.two[0].weight = group.one.weight
    group.one.quantized = nn.Parameter(torch.zeros(2, dtype=torch.int8), requires_grad=False)
    Tuner({"one": Tuning(freeze=("*",)), "two": Tuning()}, group, ALONE)
    assert not group.one.weight.requires_grad
    Tuner({"one": Tuning(unfreeze={"*": 0})}, group, ALONE)
    assert [param.requires_grad for param in group.one.parameters()] == [True, True, False]
    for sections, problem in (
        ({"one": Tuning(layer_decay=0.5)}, "cfg.tuning.one.layer_decay needs two layers or more; one has 1"),
        (
            {name: Tuning(("*",), {"*weight": passes}) for name, passes in (("one", 3), ("two", 5))},
            "cfg.tuning.two and another section disagree about one.weight",
        ),
    ):
        with pytest.raises(ConfigError) as error:
            Tuner(sections, group, ALONE)
        assert str(error.value) == problem


@pytest.mark.pure
def test_optimizers_that_hold_frozen_parameters() -> None:
    """Those that never train stay equal; DDP would not know those that train later."""
    made, tuner, session = tuned(2, freeze=["stem.*", "head.*"], unfreeze={"head.*": 1})
    before = made.models.net.stem.weight.clone()
    with contextlib.ExitStack() as stack:
        tuner.observe(session, stack)
        SGD(made.models.net.stem.parameters(), lr=1, weight_decay=1).step()
        with pytest.raises(ConfigError, match=r"net\.head\.weight trains later, and DDP would not synchronize it"):
            made.optimizers.adam.step()
    assert torch.equal(made.models.net.stem.weight, before)


@pytest.mark.pure
def test_a_loop_without_passes_cannot_unfreeze(tmp_path: Path) -> None:
    """It is refused before its first update."""
    made, tuner, _ = tuned(freeze=["head.*"], unfreeze={"head.*": 1})
    module = BaseModule(cfg=TrainConfig(), models=made.models, optimizers=made.optimizers)
    session, before = attach(module, tmp_path), made.models.net.stem.weight.clone()
    with contextlib.ExitStack() as stack:
        tuner.observe(session, stack)
        session.begin()
        made.models.net(torch.ones(2, 4)).sum().backward()
        with pytest.raises(ConfigError, match="counts passes over training loaders, and the loop reads none"):
            made.optimizers.adam.step()
    assert torch.equal(made.models.net.stem.weight, before)


@pytest.mark.pure
def test_states_without_frozen_parameters() -> None:
    made, tuner, _ = tuned(freeze=["stem.*"], save="trained")
    states = tuner.without_frozen(state_of(made.models)[0])
    assert {name for name, item in states["net"].items() if isinstance(item, dict)} == {"stem.weight", "stem.bias"}
    other, _, _ = tuned(freeze=["stem.*"])
    load_into(other.models, states, "models")
    other.models.net.stem.bias.data[0] += 1  # as teachers are updated, without a new version of the tensor
    made.models.net.stem.bias.data[0] += 1
    with pytest.raises(ConfigError, match=r"models\.net in the checkpoint .* stem\.bias was frozen and is not in the"):
        load_into(other.models, states, "models")
    with pytest.raises(ConfigError, match=r"models\.net\.stem\.bias is frozen, and not as its constructor builds it"):
        tuner.without_frozen(state_of(made.models)[0])


@pytest.mark.pure
def test_a_checkpoint_has_the_passes_that_count(tmp_path: Path) -> None:
    """Another loader may lead after a restart, and has not made them."""
    checkpoints, tuners = [], []
    for _ in range(2):
        made, tuner, _ = tuned(freeze=["head.*"], unfreeze={"head.*": 3}, save="trained")
        strategy = DDP(TrainConfig(), ALONE)
        strategy.tuning = tuner
        module = BaseModule(cfg=TrainConfig(), models=made.models, optimizers=made.optimizers)
        checkpoints.append(attach(module, tmp_path, strategy=strategy).checkpoints)
        tuners.append(tuner)
    tuners[0].passes = 2
    checkpoints[0].save(0, finished=True)
    checkpoints[0].wait()
    checkpoints[1].restore()
    assert tuners[1].passes == 2


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
        assert torch.equal(sharded[name], item), name  # a sum of two gradients has no order


ADAPTERS = """
cfg:
  tuning:
    net:
      unfreeze: {"*norm.*": 2}
      layer_decay: 0.5
"""


@pytest.mark.process
def test_checkpoints_of_adapters(mlx: Mlx, script: Script, experiment: Callable[[str], Path]) -> None:
    """They are small, fit only the weights that they were trained on, and exports merge them.

    The second run is interrupted in the last pass before its BatchNorm begins to train.
    """
    folder = experiment("adapters")
    (folder / "src" / "variants").mkdir()
    (folder / "src" / "variants" / "tuned.yaml").write_text(ADAPTERS)
    trained_only = "+cfg.tuning.net.save=trained"
    for words in (
        ("cfg.name=all",),
        (trained_only, "cfg.max_steps=5"),
        (trained_only, "--resume=run_001", "cfg.max_steps=null"),
    ):
        done = mlx(folder, "train", "run", "--variant=tuned", *words)
        assert done.returncode == 0, done.stderr
    checkpoints = [
        next((folder / "runs" / name / "run_001" / "checkpoints").glob("epoch_*4")) for name in ("all", "adapters")
    ]
    saved = [torch.load(path / "state.pt", weights_only=True) for path in checkpoints]
    one, other = (state["models"]["net"] for state in saved)
    trained = [name for name in one if any(part in name for part in ("lora", "num_", "running_", "norm.", "calls"))]
    assert [name for name, item in other.items() if isinstance(item, torch.Tensor)] == trained
    assert all(torch.equal(one[name], other[name]) for name in trained)
    assert one["base_model.model.norm.num_batches_tracked"] == 3
    rates = [[group["lr"] for group in state["optimizers"]["adam"]["param_groups"]] for state in saved]
    assert rates[0] == rates[1] == [0.01 * 0.5**3, 0.01 * 0.5**2, 0.01 * 0.5]
    sizes = [(path / "state.pt").stat().st_size for path in checkpoints]
    assert sizes[1] < sizes[0] / 5

    path = f"cfg.restore_checkpoint_path={checkpoints[1]}"
    done = mlx(folder, "train", "run", "--variant=tuned", path, "cfg.seed=1", trained_only, "cfg.num_epochs=4")
    assert done.returncode == 1
    assert "error: models.net in the checkpoint does not fit the config: base_model.model." in done.stderr

    done = mlx(folder, "xp", "export", "adapters/run_001")
    assert done.returncode == 0, done.stderr
    assert "merged    adapters of net" in done.stderr
    weights = load_file(folder / "adapters_run_001_epoch_0004" / "weights.safetensors")
    assert "net.second.weight" in weights
    assert not any("lora" in name for name in weights)
    found = script(
        folder,
        "import json, pathlib, torch, mlx_runtime\n"
        "from mlx_runtime.companions.hub.contents import stage_run\n"
        "from mlx_runtime.companions.serving.exports.artifact import export\n"
        "from mlx_runtime.runs.queries.lookup import resolve_run\n"
        "rows = [{'x': [0.1 * number] * 8} for number in range(5)]\n"
        "run = mlx_runtime.open_run('adapters/run_001')\n"
        "net = run.load_models().net\n"
        "export_ = mlx_runtime.load_export('adapters_run_001_epoch_0004')(rows)['y']\n"
        "with_adapters = run.predictor()(rows)['y']\n"
        "net.eval(), net.disable_adapter_layers()\n"
        "plain = net(torch.tensor([row['x'] for row in rows]))\n"
        "others = {'adapters': with_adapters, 'plain': plain}\n"
        "found = {name: (export_ - other).abs().max().item() for name, other in others.items()}\n"
        "found['mirror'] = []\n"
        "with stage_run(resolve_run('adapters', 'run_001'), weights=True, report=found['mirror'].append) as staged:\n"
        "    found['mirror'].append('model.safetensors' in staged.files)\n"
        "export(resolve_run('all', 'run_001'), pathlib.Path('all'), formats=['safetensors'])\n"
        "print(json.dumps(found))\n",
    )
    assert found["adapters"] < 1e-5 < 1e-2 < found["plain"]
    assert found["mirror"] == [
        "without   model.safetensors: adapters/run_001 epoch_0004 has only trained weights "
        "(cfg.tuning.*.save=trained); mlx xp export --format safetensors builds the others",
        False,
    ]
    weights = load_file(folder / "all" / "weights.safetensors")
    assert weights.keys() == {f"net.{name}" for name in one}
    assert all(torch.equal(weights[f"net.{name}"], item) for name, item in one.items())  # also the counted calls
