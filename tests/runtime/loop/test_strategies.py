"""Strategies prepare models before optimizers are built over their parameters."""

import contextlib
import copy
import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from sessions import ALONE
from torch import nn

from mlx_runtime import TrainConfig
from mlx_runtime.distributed.topology import Topology
from mlx_runtime.errors import ConfigError
from mlx_runtime.loop.assembly import build_experiment, dataset_shards
from mlx_runtime.loop.strategies.base import Strategy
from mlx_runtime.loop.strategies.blocks import planned_blocks, repeated_blocks, select_modules, without_shared
from mlx_runtime.loop.strategies.ddp import DDP
from mlx_runtime.loop.strategies.selection import strategy_class, strategy_of
from mlx_runtime.sections import Elastic, Fragments

pytestmark = pytest.mark.pure

CFG = TrainConfig()


class Models:
    map_params_to_optimizers = {"net": "sgd"}

    def __init__(self, net: nn.Module) -> None:
        self.net = net


class Optimizers:
    def __init__(self, sgd: torch.optim.SGD) -> None:
        self.sgd = sgd


class Experiment:
    def __init__(self, cfg: Any, models: Models, optimizers: Optimizers) -> None:
        self.models, self.optimizers = models, optimizers


class Replacing(DDP):
    """Replaces the parameters of a model, as sharding does."""

    def place(self, models: Mapping[str, nn.Module], deferred: Collection[str]) -> None:
        for model in models.values():
            for name, param in list(model.named_parameters()):
                setattr(model, name, nn.Parameter(param.detach().clone()))


TREE = {
    "cfg": {"_target_": "mlx_runtime.TrainConfig"},
    "models": {
        "_target_": f"{__name__}.Models",
        "net": {"_target_": "torch.nn.Linear", "in_features": 3, "out_features": 2},
    },
    "optimizers": {"_target_": f"{__name__}.Optimizers", "sgd": {"_target_": "torch.optim.SGD", "lr": 0.1}},
}


@pytest.mark.parametrize("strategy", [DDP(CFG, ALONE), Replacing(CFG, ALONE)], ids=lambda item: type(item).__name__)
def test_optimizers_hold_the_parameters_of_prepared_models(strategy: Strategy, tmp_path: Path) -> None:
    job = SimpleNamespace(experiment=f"{__name__}.Experiment", tree=TREE)
    with contextlib.ExitStack() as stack:
        _, experiment = build_experiment(cast(Any, job), ALONE, CFG, strategy, stack)
    held = [param for group in experiment.optimizers.sgd.param_groups for param in group["params"]]
    assert [id(param) for param in held] == [id(param) for param in experiment.models.net.parameters()]


def test_preparing_under_ddp_draws_no_random_numbers() -> None:
    model = nn.Linear(3, 2)
    before = torch.get_rng_state()
    DDP(CFG, ALONE).place({"net": model}, ())
    assert torch.equal(torch.get_rng_state(), before)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


class Deep(nn.Module):
    """Its head is tied to its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.layers = nn.ModuleList([Layer(), Layer(), nn.Dropout(), nn.Dropout()])
        self.stages = nn.ModuleList([nn.ModuleList([Layer(), Layer()]), nn.ModuleList([Layer()])])
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.embed.weight


class TestBlocks:
    def test_by_default_they_are_what_repeats(self) -> None:
        """Neither what is inside them, nor what has no parameters, nor containers that are never called."""
        single = ["stages.1.0.mlp.0", "stages.1.0.mlp.2"]
        assert repeated_blocks(Deep()) == ["layers.0", "layers.1", "stages.0.0", "stages.0.1", *single]
        assert repeated_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.ReLU())) == ["0", "2"]
        assert repeated_blocks(nn.Linear(2, 2)) == []

    def test_a_star_is_one_part_of_a_path(self) -> None:
        assert select_modules(Deep(), "layers.*") == ["layers.0", "layers.1", "layers.2", "layers.3"]
        assert select_modules(Deep(), "stages.?.[01].mlp") == ["stages.0.0.mlp", "stages.0.1.mlp", "stages.1.0.mlp"]

    def test_a_plan_selects_by_patterns_or_by_a_function(self) -> None:
        assert planned_blocks(Deep(), ["head", "layers.[01]", "layers.0"], "plan") == ["head", "layers.0", "layers.1"]
        assert planned_blocks(Deep(), lambda model: [model.embed, model.layers[1]], "plan") == ["embed", "layers.1"]

    @pytest.mark.parametrize(
        ("plan", "message"),
        [
            (["layer.*"], "plan: 'layer.*' matches no module. Did you mean 'layers.*'"),
            (["zzz"], "plan: 'zzz' matches no module. Modules: embed, layers, layers.*, "),
            (["layers"], "plan: layers is a ModuleList, which is never called; write 'layers.*'"),
            (lambda model: [nn.Linear(1, 1)], "plan returned a Linear that is not in the model"),
        ],
    )
    def test_plans_that_do_not_fit(self, plan: Any, message: str) -> None:
        with pytest.raises(ConfigError) as error:
            planned_blocks(Deep(), plan, "plan")
        assert str(error.value).startswith(message)

    def test_tied_weights_are_in_one_group(self) -> None:
        model = Deep()
        model.layers[1] = model.layers[0]
        assert without_shared(model, ["layers.0", "layers.1", "head", "stages.1.0"]) == ["stages.1.0"]
        assert without_shared(Deep(), ["layers.0", "head"]) == ["layers.0"]


def tree(**attributes: Any) -> dict[str, Any]:
    """The node of a group with these class attributes."""
    global Own
    Own = type("Own", (Models,), attributes)
    return TREE["models"] | {"_target_": f"{__name__}.Own"}


Own: type = Models


class TestErrors:
    """Of what `Models` says about its models."""

    @pytest.mark.parametrize(
        ("attributes", "message"),
        [
            (
                {"strategies": {"nett": "ddp"}},
                "Models.strategies names 'nett', which is not a model. Did you mean 'net'?",
            ),
            ({"strategies": {"net": "fspd"}}, "Models.strategies['net'] is 'fspd'. Did you mean 'fsdp'?"),
            (
                {"strategies": {"net": "hsdp"}},
                "Models.strategies['net'] is 'hsdp', which needs cfg.strategy=hsdp and cfg.sharding.shard_size; "
                "name the others instead",
            ),
            (
                {"deferred_init": ("nte",)},
                "Models.deferred_init names 'nte', which is not a model. Did you mean 'net'?",
            ),
            ({"deferred_init": ("net",)}, "Models.deferred_init names 'net', but its class has no init_weights()"),
            ({"shard_plan": {"ner": []}}, "Models.shard_plan names 'ner', which is not a model. Did you mean 'net'?"),
        ],
    )
    def test_names(self, attributes: dict[str, Any], message: str) -> None:
        cfg, node = TrainConfig(activation_checkpointing="shard_plan" in attributes), tree(**attributes)
        with pytest.raises(ConfigError) as error:
            strategy_of(cfg, ALONE, node).build(node)
        assert str(error.value) == message

    @pytest.mark.parametrize(
        ("wanted", "message"),
        [
            (
                True,
                "cfg.activation_checkpointing is true, but no model has blocks that repeat; name them",
            ),
            ("layer.*", "cfg.activation_checkpointing: 'layer.*' matches no module."),
        ],
    )
    def test_activation_checkpointing(self, wanted: bool | str, message: str) -> None:
        with pytest.raises(ConfigError) as error:
            DDP(TrainConfig(activation_checkpointing=wanted), ALONE).build(TREE["models"])
        assert str(error.value).startswith(message)


class Copied(Models):
    deferred_init = ("net",)

    def __init__(self, net: nn.Module) -> None:
        self.net, self.average = net, copy.deepcopy(net)


def test_a_copy_of_a_deferred_model_has_no_values() -> None:
    node = {"_target_": f"{__name__}.Copied", "net": {"_target_": f"{__name__}.Later"}}
    with pytest.raises(ConfigError, match=r"models.average has no values, .* self.models.average.load_state_dict"):
        DDP(CFG, ALONE).build(node)


class Later(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)

    def init_weights(self) -> None:
        self.reset_parameters()


class Positioned(Later):
    """`init_weights` sets one of its buffers in place, replaces one, and forgets those that are `left`."""

    def __init__(self, left: int) -> None:
        super().__init__()
        self.left = left
        self.register_buffer("ids", torch.arange(3))
        self.register_buffer("mask", torch.ones(3, 3, dtype=torch.bool))
        self.register_buffer("turns", torch.ones(3, dtype=torch.complex64))

    def init_weights(self) -> None:
        super().init_weights()
        self.ids = torch.arange(3)
        if self.left < 2:
            self.get_buffer("mask").fill_(True).tril_()
        if self.left < 1:
            self.get_buffer("turns").zero_()


def test_deferred_initialization_covers_buffers_of_any_type() -> None:
    node = {"_target_": f"{__name__}.Late", "net": {"_target_": f"{__name__}.Positioned", "left": 2}}
    with pytest.raises(ConfigError, match=r"init_weights\(\) of models.net does not initialize mask and 1 more"):
        DDP(CFG, ALONE).build(node)
    node["net"]["left"] = 1  # type: ignore[index]
    with pytest.raises(ConfigError, match=r"does not initialize turns$"):
        DDP(CFG, ALONE).build(node)
    node["net"]["left"] = 0  # type: ignore[index]
    net = DDP(CFG, ALONE).build(node).net
    assert net.ids.tolist() == [0, 1, 2]
    assert net.mask.tolist() == torch.ones(3, 3).tril().bool().tolist()


class Late(Models):
    deferred_init = ("net",)


def test_without_workers_models_are_not_sharded() -> None:
    strategy = strategy_of(TrainConfig(strategy="fsdp"), ALONE, TREE["models"])
    assert isinstance(strategy, DDP)
    assert strategy.notice == "without workers, models are whole: fsdp has no effect"
    cfg = TrainConfig(fragments=Fragments(schedule="1f1b"))
    assert strategy_of(cfg, ALONE, None).notice == "cfg.fragments has no effect without cfg.strategy=pipeline"


@pytest.mark.parametrize(("stages", "pipelines"), [(None, 1), (2, 2)])
def test_the_global_batch_counts_the_pipelines_of_all_workers(stages: int | None, pipelines: int) -> None:
    """Without `cfg.fragments.stages`, two of four workers form one pipeline, as all four did."""
    cut, elastic = Fragments(stages=stages), Elastic(min_workers=2, keep_global_batch=True)
    cfg = TrainConfig(strategy="pipeline", start_workers=4, elastic=elastic, fragments=cut)
    kind = strategy_class("pipeline")
    left = Topology(0, 2, torch.device("cpu"), model_parallel_size=kind.model_parallel_size(cfg, 2))  # type: ignore[call-arg, arg-type]
    strategy: Any = SimpleNamespace(topology=left, model_parallel_size=kind.model_parallel_size)
    job: Any = SimpleNamespace(
        tree={"datasets": {"train": {"_target_": "builtins.dict"}}},
        project=None,
        prepared={},
        subsets={},
        cluster=SimpleNamespace(in_driver=False),
    )
    shards = dataset_shards(cfg, SimpleNamespace(train={}), job, strategy, lambda loader: loader)
    assert shards.train.options.wanted_workers == pipelines


def test_sharding_is_imported_only_by_runs_that_shard() -> None:
    script = "import mlx_runtime.workers.worker, sys; print([name for name in sys.modules if 'fsdp' in name])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
