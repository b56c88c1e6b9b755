"""conf.yaml and overrides → checked config → objects; every problem is reported with its full key."""

import contextlib
import inspect
import random
import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, Protocol, cast

import pytest
import torch
import yaml
from omegaconf import OmegaConf
from ruamel.yaml import YAML
from torch import nn

from mlx_runtime import DUMMY_PARAMS, BaseModule, TrainConfig
from mlx_runtime.config.binding.conf_file import bind
from mlx_runtime.config.binding.nodes import Description
from mlx_runtime.config.building import build, build_optimizers
from mlx_runtime.config.interpolation import parse_config, unset_variables
from mlx_runtime.distributed.topology import Topology
from mlx_runtime.driver.request import load_config
from mlx_runtime.errors import ConfigError
from mlx_runtime.loop.assembly import build_experiment
from mlx_runtime.loop.strategies import DDP

pytestmark = pytest.mark.pure


class Net(nn.Module):
    def __init__(self, width: int = 4, kind: Literal["a", "b"] = "a", layer: nn.Linear = nn.Linear(1, 1)):
        super().__init__()
        self.layer = layer


@dataclass
class Models:
    net: Net = Net()
    other: Net = Net(2)

    map_params_to_optimizers = {"net": "adam"}


@dataclass
class Optimizers:
    adam: torch.optim.Adam = torch.optim.Adam(DUMMY_PARAMS)


class Needy:
    def __init__(self, must: int, may: float = 1.0):
        self.must = must


class Deep(Net):
    def __init__(self, depth: int, width: int = 9):
        super().__init__(width)


class Shape(Protocol):
    sides: int


class Drawing:
    def __init__(
        self,
        shape: Shape = Needy(3),
        parts: list[Needy] = [Needy(1)],
        by_name: dict[str, Needy] | None = None,
        time: str = "12:30",
    ): ...


@dataclass
class Tools:
    first: int = 1
    drawing: Drawing = Drawing()


class Experiment(BaseModule):
    cfg: TrainConfig
    models: Models
    optimizers: Optimizers
    tools: Tools


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("MLX_STORAGE", raising=False)
    bind(Experiment, tmp_path / "conf.yaml").write()
    return tmp_path / "conf.yaml"


def test_groups_and_their_members_have_the_order_of_their_classes(conf: Path) -> None:
    node = f"{{_target_: {__name__}.Net, width: 3}}"
    config = load_config(Experiment, ["~models.net", f"+models.net={node}"], conf)
    assert list(config.tree["models"]) == ["_target_", "net", "other"]
    groups = re.split(r"^(?=\w)", conf.read_text(), flags=re.MULTILINE)
    conf.write_text("".join(reversed(groups)))
    config = load_config(Experiment, path=conf)
    assert list(config.tree) == ["cfg", "models", "optimizers", "tools"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["cfg.num_epoch=3"],
            "there is no key 'cfg.num_epoch' in {conf}. Did you mean 'cfg.num_epochs'? "
            "To add it: +KEY=..., or mlx train bind if the code has it",
        ),
        (["cfg.start_workers=-1"], "cfg.start_workers is -1; the minimum is 0"),
        (
            ["cfg.precision=16"],
            "cfg.precision is 16; mlx_runtime.TrainConfig takes Literal[32, 'bf16', 'fp16']",
        ),
        (["optimizers.adam.lr=fast"], "optimizers.adam.lr is 'fast'; torch.optim.adam.Adam takes float | torch.Tensor"),
        (
            ["models.net.width=???"],
            "models.net.width: ??? must be given a value or removed, as {here}.Net has a default",
        ),
        (
            ["cfg.seed=${oc.env:NO_SUCH}"],
            "cfg.seed: KeyError raised while resolving interpolation: \"Environment variable 'NO_SUCH' not found\"; "
            "for a literal ${, write \\${",
        ),
        (["+models.net.widht=3"], "models.net.widht: {here}.Net has no such argument. Did you mean 'width'?"),
        (
            ["models.net._target_={here}.Gone"],
            "models.net._target_ is '{here}.Gone', which cannot be imported: module '{here}' has no attribute 'Gone'",
        ),
        (
            ["models.net.layer._target_=torch.nn.Identity"],
            "models.net.layer._target_ is torch.nn.Identity, which is not a torch.nn.modules.linear.Linear, "
            "as {here}.Net wants",
        ),
        (["~tools"], "tools: missing; bind again, or put a good copy of the file back"),
        (["+cfgs.x=1"], "cfgs: there is no such group. Did you mean 'cfg'?"),
        (
            ["tools.drawing.parts=[{must: 1}]"],
            "tools.drawing.parts is [{'must': 1}]; {here}.Drawing takes list[{here}.Needy]",
        ),
        (
            ["tools.drawing.parts=[{_target_: {here}.Needy, must: 1, mayb: 2}]"],
            "tools.drawing.parts[0].mayb: {here}.Needy has no such argument. Did you mean 'may'?",
        ),
        (
            ["tools.drawing.by_name={a: {_target_: {here}.Net}}"],
            "tools.drawing.by_name.a._target_ is {here}.Net, which is not a {here}.Needy, as {here}.Drawing wants",
        ),
        (
            ["tools.drawing.time=1.10"],
            "tools.drawing.time is 1.1; {here}.Drawing takes str; for text, write 'tools.drawing.time=\"1.10\"'",
        ),
    ],
)
def test_a_wrong_config_is_one_clear_line_per_problem(conf: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(Experiment, [item.replace("{here}", __name__) for item in overrides], conf)
    text = f"override {overrides[0]}: {message}"
    assert str(caught.value) == text.replace("{here}", __name__).replace("{conf}", str(conf))


def test_another_class_has_its_own_defaults_and_what_is_typed_for_it(conf: Path) -> None:
    deep = f"models.net._target_={__name__}.Deep"
    config = load_config(Experiment, [deep, "models.net.depth=3"], conf)
    assert config.tree["models"]["net"] == {"_target_": f"{__name__}.Deep", "depth": 3}
    again = load_config(Experiment, [deep, "models.net.depth=3", "~models.net.width=4"], conf)  # it is left out anyway
    assert again.tree["models"] == config.tree["models"]
    left_out = f"width, kind, layer of models.net in {conf}, set for the class that was replaced"
    assert config.notes == (f"note      ignoring {left_out}",)
    conf.write_text(config.yaml())
    assert load_config(Experiment, [deep], conf).tree["models"] == config.tree["models"]  # as on resume
    with pytest.raises(ConfigError, match="models.net._target_ is .*Needy, which is not a "):
        load_config(Experiment, [f"models.net._target_={__name__}.Needy"], conf)


@pytest.mark.parametrize("value", ["workers=2", "s3://bucket/a?region=b&scheme=http"])
def test_a_value_with_an_equals_sign_needs_no_quotes(conf: Path, value: str) -> None:
    assert load_config(Experiment, [f"cfg.loader={value}"], conf).cfg.loader == value
    assert load_config(Experiment, [f"cfg.loader='{value}'"], conf).cfg.loader == value


@pytest.mark.parametrize("text", ["12:30", "1.10", "007", "true"])
def test_what_is_no_text_without_quotes_is_shown_as_typed(conf: Path, text: str) -> None:
    conf.write_text(conf.read_text().replace('"12:30"', text))
    with pytest.raises(ConfigError, match=f'tools.drawing.time is .*; .*Drawing takes str; for text, write "{text}"'):
        load_config(Experiment, path=conf)


def test_all_problems_are_told_at_once(conf: Path) -> None:
    overrides = ["cfg.num_epochs=x", "models.net.width=y", "cfg.seed=???", "cfg.sed=3"]
    with pytest.raises(ConfigError) as caught:
        load_config(Experiment, overrides, conf)
    lines = str(caught.value).splitlines()
    assert lines[0] == "the overrides have 4 problems:"
    keys = ["cfg.sed=3", "cfg.num_epochs=x: cfg.num_epochs is 'x'", "cfg.seed", "models.net.width=y: "]
    assert [line.startswith(f"  override {key}") for line, key in zip(lines[1:], keys, strict=True)] == [True] * 4
    conf.write_text(conf.read_text().replace("start_workers: 2", "start_workers: x"))
    with pytest.raises(ConfigError) as caught:
        load_config(Experiment, ["cfg.num_epochs=x"], conf)
    title, *lines = str(caught.value).splitlines()
    assert title == f"{conf} has 2 problems:"
    assert lines[0].startswith("  override cfg.num_epochs=x: cfg.num_epochs is 'x'; ")
    assert lines[1].startswith("  cfg.start_workers is 'x'; ")


def test_a_missing_argument_names_the_cure(conf: Path) -> None:
    with pytest.raises(ConfigError, match=r"tools\.first\.must: missing, and .*Needy has no default for it; bind"):
        load_config(Experiment, [f"tools.first={{_target_:{__name__}.Needy}}"], conf)


def test_no_file_and_no_yaml(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no .*conf.yaml; write it with: mlx train bind"):
        load_config(Experiment, path=tmp_path / "conf.yaml")
    (tmp_path / "conf.yaml").write_text("cfg: [1,\n")
    with pytest.raises(
        ConfigError, match=r"conf\.yaml is not valid YAML: while parsing a flow node .* in line 2, column 1$"
    ):
        load_config(Experiment, path=tmp_path / "conf.yaml")


class TestOptimizers:
    """Optimizers receive the parameters of the models that are mapped to them."""

    node = Description(Experiment).tree["optimizers"]

    def models(self, **mapping: str) -> Models:
        models = Models(Net(), Net())
        models.map_params_to_optimizers = mapping
        return models

    def test_two_models_may_share_one(self) -> None:
        models = self.models(net="adam", other="adam")
        made = build_optimizers(self.node, models).adam
        ids = {id(item) for item in made.param_groups[0]["params"]}
        assert ids == {id(item) for model in (models.net, models.other) for item in model.parameters()}
        assert made.param_groups[0]["betas"] == (0.9, 0.999)

    @pytest.mark.parametrize(
        ("mapping", "message"),
        [
            ({"nett": "adam"}, "names the model 'nett', which does not exist. Did you mean 'net'?"),
            ({"net": "adamw"}, "names the optimizer 'adamw', which does not exist. Did you mean 'adam'?"),
            ({}, "optimizers.adam trains no model; give it one in Models.map_params_to_optimizers, or remove it"),
        ],
    )
    def test_a_wrong_map_is_named(self, mapping: dict[str, str], message: str) -> None:
        with pytest.raises(ConfigError) as caught:
            build_optimizers(self.node, self.models(**mapping))
        assert message in str(caught.value)


def test_an_override_that_is_none_is_told(conf: Path) -> None:
    with pytest.raises(ConfigError, match="the override 'cfg.seed' is not understood; write key=value without"):
        load_config(Experiment, ["cfg.seed"], conf)
    for value in ("[1", "{a", '"x', "f(1,2", "x[0]"):
        with pytest.raises(ConfigError) as caught:
            load_config(Experiment, [f"cfg.name={value}"], conf)
        assert str(caught.value).startswith(f"the override 'cfg.name={value}' is not understood; write key=value")


def test_several_values_are_for_a_sweep(conf: Path) -> None:
    with pytest.raises(ConfigError, match="'cfg.seed=1,2' has several values, which need: mlx train sweep"):
        load_config(Experiment, ["cfg.num_epochs=1", "cfg.seed=1,2"], conf)
    assert load_config(Experiment, ["cfg.name='a,b'"], conf).cfg.name == "a,b"


def test_one_node_interpolated_twice_is_two_objects(conf: Path) -> None:
    """Weights are tied in code, as docs/guides/config.md shows; interpolation repeats values, not objects."""
    text = conf.read_text()
    start, end = text.index("  other:\n"), text.index("optimizers:\n")
    conf.write_text(text[:start] + "  other: ${models.net}\n" + text[end:])
    models = build(load_config(Experiment, path=conf).tree["models"], "models")
    assert models.net is not models.other
    assert models.net.layer.weight is not models.other.layer.weight


def test_a_model_refers_to_a_fact_of_the_data(conf: Path) -> None:
    """As docs/guides/config.md shows: one number for both, which binding keeps and the command line changes."""
    conf.write_text(conf.read_text().replace("    width: 2\n", "    width: ${tools.first}\n"))
    bind(Experiment, conf).write()
    assert "    width: ${tools.first}\n" in conf.read_text()
    assert load_config(Experiment, ["tools.first=7"], conf).tree["models"]["other"]["width"] == 7
    with pytest.raises(ConfigError, match="models.other.width is 'many'"):
        load_config(Experiment, ["+tools.text=many", "models.other.width=${tools.text}"], conf)


class TestWithoutTheCode:
    """With `keys_only`, as on a machine without torch, nothing that conf.yaml names is imported."""

    @pytest.mark.parametrize(
        ("override", "problem"),
        [
            ("cfg.num_epochs=many", "cfg.num_epochs is 'many'; mlx_runtime.TrainConfig takes int"),
            ("cfg.start_workers=-1", "cfg.start_workers is -1; the minimum is 0"),
            ("models.net.widht=3", "Did you mean 'models.net.width'?"),
        ],
    )
    def test_keys_and_settings_are_checked(self, conf: Path, override: str, problem: str) -> None:
        conf.write_text(conf.read_text().replace("_target_: ", "_target_: nowhere."))
        assert load_config(Experiment, ["cfg.num_epochs=3"], conf, keys_only=True).cfg.num_epochs == 3
        with pytest.raises(ConfigError, match=re.escape(problem)):
            load_config(Experiment, [override], conf, keys_only=True)


class TestTargets:
    def test_hydra_imports_nothing(self, conf: Path) -> None:
        conf.write_text("hydra: {searchpath: ['pkg://trap']}\ndefaults: [some: thing, _self_]\n" + conf.read_text())
        with pytest.raises(ConfigError, match="hydra: there is no such group"):
            load_config(Experiment, [], conf)


@dataclass
class OwnSettings:
    """Has no base class."""

    name: str = "own"
    num_epochs: int = 3
    pace: float = 0.5
    mode: str = "min"  # wider than the runtime's


class WithOwnSettings(BaseModule):
    cfg: OwnSettings
    models: Models


class TestSettingsThatInheritNothing:
    """Settings that a class lacks have the runtime's defaults, and can be set like the others."""

    @pytest.fixture
    def path(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.delenv("MLX_STORAGE", raising=False)
        bind(WithOwnSettings, tmp_path / "conf.yaml").write()
        return tmp_path / "conf.yaml"

    def test_missing_fields_take_the_runtimes_defaults(self, path: Path) -> None:
        cfg = load_config(WithOwnSettings, path=path).cfg
        assert type(cfg) is OwnSettings
        own = {"name": "own", "num_epochs": 3, "pace": 0.5, "mode": "min"}
        assert vars(cfg) == vars(TrainConfig()) | own

    def test_all_of_them_can_be_overridden_and_are_checked(self, path: Path) -> None:
        cfg = load_config(WithOwnSettings, ["cfg.use_gpu=true", "cfg.pace=2.5", "cfg.secrets=[A]"], path).cfg
        assert (cfg.use_gpu, cfg.pace, cfg.secrets) == (True, 2.5, ("A",))
        with pytest.raises(ConfigError, match=r"cfg\.mode is 'maximum'; .*TrainConfig takes "):
            load_config(WithOwnSettings, ["cfg.mode=maximum"], path)
        with pytest.raises(ConfigError) as caught:
            load_config(WithOwnSettings, ["cfg.seed=x", "cfg.pace=x", "+cfg.nope=1"], path)
        lines = str(caught.value).splitlines()[1:]
        assert [line.split()[1].rstrip(":") for line in lines] == ["cfg.pace=x", "+cfg.nope=1", "cfg.seed=x"]


@pytest.mark.parametrize("asked", [True, False, None])
def test_a_worker_that_was_promised_a_gpu_does_not_train_on_a_cpu(conf: Path, asked: bool | None) -> None:
    tree = load_config(Experiment, path=conf).tree
    job, cfg = SimpleNamespace(experiment=f"{__name__}.Experiment", tree=tree), TrainConfig(use_gpu=asked)
    refused = pytest.raises(ConfigError, match="cfg.use_gpu=true, but rank 0 has no GPU that torch can use; mlx doctor")
    alone = Topology(0, 1, torch.device("cpu"))
    strategy = DDP(cfg, alone)
    with refused if asked else contextlib.nullcontext(), strategy.connected():
        build_experiment(cast(Any, job), alone, cfg, strategy)


RNG = random.Random(0)
LETTERS = [*"${}\\ :#'\"\n-?.0e1xoyn~=<>,[]&*!|%@`\t_+", "${", "\\${", "\x85", "\u2028", "\x00", "\r", "é"]
TEXTS = [
    *("… ${", "${x}", r"\${x}", r"a\\${x}", "${oc.env:HOME}", "x???", "12:30", "1e-08", "007", "yes", "2020-01-01"),
    *("1_000", "~", "<<", "null", "", ".inf", "x " * 99, "a\nb", "---"),
    *("".join(RNG.choices(LETTERS, k=RNG.randint(0, 8))) for _ in range(120)),
]


class Texts:
    def __init__(
        self,
        texts: list = TEXTS,
        keys: dict = {text: [{text: 1e-08}] for text in TEXTS},
        numbers: dict = {1e-08: 1e20, 2: -1e-300, "inf": float("inf")},
    ): ...


@dataclass
class TextTools:
    all: Texts = Texts()


class TextExperiment(BaseModule):
    cfg: TrainConfig
    tools: TextTools


def test_every_reader_of_yaml_finds_the_text_of_the_code_wherever_it_is_written(tmp_path: Path) -> None:
    conf = tmp_path / "conf.yaml"
    bind(TextExperiment, conf).write()
    config = load_config(TextExperiment, path=conf)
    assert config.tree["tools"]["all"]["texts"] == TEXTS
    for text in (conf.read_text(encoding="utf-8"), config.yaml()):
        node = parse_config(text)["tools"]["all"]
        for name in ("texts", "keys", "numbers"):
            assert node[name] == inspect.signature(Texts).parameters[name].default
        assert yaml.safe_load(text) == YAML(typ="safe").load(text) == OmegaConf.to_container(OmegaConf.create(text))


def test_a_reference_to_the_environment_stays_one_and_a_text_like_it_a_text(
    conf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLACE", "there")
    paths = ["++cfg.storage_path='${oc.env:PLACE}'", "++cfg.name='\\${oc.env:PLACE}'"]
    conf.write_text(load_config(Experiment, paths, conf).yaml())
    monkeypatch.setenv("PLACE", "elsewhere")
    cfg = load_config(Experiment, [], conf).cfg
    assert (cfg.storage_path, cfg.name) == ("elsewhere", "${oc.env:PLACE}")
    monkeypatch.delenv("PLACE")
    assert unset_variables(parse_config(conf.read_text())["cfg"]["name"]) == set()
    monkeypatch.setenv("MLX_STORAGE", "/mnt/${PLACE}")
    assert load_config(Experiment, [], conf).cfg.storage_path == "/mnt/${PLACE}"


def test_a_dollar_and_a_brace_alone_are_named_with_their_key_and_the_cure(conf: Path) -> None:
    text = conf.read_text()
    conf.write_text(text.replace("name: experiment", 'name: "a ${"'))
    told = re.escape("cfg.name: no viable alternative at input '${'; for a literal ${, write \\${")
    with pytest.raises(ConfigError, match=told):
        load_config(Experiment, path=conf)
