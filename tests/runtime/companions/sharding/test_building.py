"""What `Models` says about its models, and models that are initialized after they are built."""

import copy
from typing import Any

import pytest
import torch
from sessions import ALONE
from torch import nn

from mlx_runtime import TrainConfig
from mlx_runtime.errors import ConfigError
from mlx_runtime.loop.strategies import DDP, strategy_of
from mlx_runtime.sections import Fragments

pytestmark = pytest.mark.pure

CFG = TrainConfig()


class Models:
    map_params_to_optimizers = {"net": "sgd"}

    def __init__(self, net: nn.Module) -> None:
        self.net = net


NODE = {"net": {"_target_": "torch.nn.Linear", "in_features": 3, "out_features": 2}}


class Late(Models):
    deferred_init = ("net",)


def tree(**attributes: Any) -> dict[str, Any]:
    """The node of a group with these class attributes."""
    global Own
    Own = type("Own", (Models,), attributes)
    return NODE | {"_target_": f"{__name__}.Own"}


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
            ({"deferred_init": ("net",)}, "Models.deferred_init names 'net', but its class has no init_weights()"),
        ],
    )
    def test_names(self, attributes: dict[str, Any], message: str) -> None:
        node = tree(**attributes)
        with pytest.raises(ConfigError) as error:
            strategy_of(CFG, ALONE, node).build(node)
        assert str(error.value) == message

    @pytest.mark.parametrize(
        ("wanted", "message"),
        [
            (True, "cfg.activation_checkpointing is true, but no model has blocks that repeat; name them"),
            ("layer.*", "cfg.activation_checkpointing: 'layer.*' matches no module; print(model) shows"),
        ],
    )
    def test_activation_checkpointing(self, wanted: bool | str, message: str) -> None:
        with pytest.raises(ConfigError) as error:
            DDP(TrainConfig(activation_checkpointing=wanted), ALONE).build(NODE | {"_target_": f"{__name__}.Models"})
        assert str(error.value).startswith(message)


def test_settings_without_an_effect_are_noticed() -> None:
    strategy = strategy_of(TrainConfig(strategy="fsdp"), ALONE, {"_target_": "builtins.dict"})
    assert strategy.notice == "without workers, models are whole: fsdp has no effect"
    cfg = TrainConfig(fragments=Fragments(microbatches=2))
    assert strategy_of(cfg, ALONE, None).notice == "cfg.fragments has no effect without cfg.strategy=pipeline"


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
    with pytest.raises(ConfigError, match=r"init_weights\(\) of models.net does not initialize mask, turns"):
        DDP(CFG, ALONE).build(node)
    node["net"]["left"] = 0  # type: ignore[index]
    net = DDP(CFG, ALONE).build(node).net
    assert net.ids.tolist() == [0, 1, 2]
    assert net.mask.tolist() == torch.ones(3, 3).tril().bool().tolist()
