"""Constructors → conf.yaml: the values of the code, the edits of the user."""

import copy
import functools
import inspect
import json
from dataclasses import dataclass
from pathlib import Path

import jsonschema
import pytest
import torch
import torchmetrics
from conftest import Mlx
from omegaconf import OmegaConf
from torch import nn

from mlx_runtime import DUMMY_PARAMS, BaseModule, TrainConfig
from mlx_runtime.config.binding.conf_file import FIRST_SETTINGS, bind, header
from mlx_runtime.config.binding.merging import Merge, commented_map, yaml_text
from mlx_runtime.config.binding.nodes import Description
from mlx_runtime.driver.request import load_config
from mlx_runtime.errors import BindError, ConfigError

pytestmark = pytest.mark.pure


class Block(nn.Module):
    def __init__(self, width: int = 8, *, scale: float = 1e-8):
        super().__init__()
        self.renamed = width  # does not keep its arguments under their names
        self.scale = scale * 2


class Net(nn.Module):
    def __init__(
        self,
        widths: tuple[int, ...] = (5, 10, 5),
        block: Block = Block(3),
        fc: nn.Linear = nn.Linear(32, 10),
        stack: nn.Sequential = nn.Sequential(*[nn.Linear(4, 4, bias=index > 0) for index in range(2)]),
        where: Path = Path("data"),
        dtype: torch.dtype = torch.float16,
        act: type[nn.Module] = nn.GELU,
        make: functools.partial = functools.partial(nn.Linear, 3, bias=False),
        word: str = "yes",
        plain: list[int] | None = None,
    ):
        super().__init__()
        self.given = (widths, where, dtype, act, make, word, plain)
        self.block, self.fc, self.stack = block, fc, stack


class Models:
    def __init__(self, net: Net = Net()) -> None:
        self.net = net


@dataclass
class Optimizers:
    adam: torch.optim.Adam = torch.optim.Adam(DUMMY_PARAMS, lr=0.5)


@dataclass
class Metrics:
    both: torchmetrics.MetricCollection = torchmetrics.MetricCollection([torchmetrics.MeanAbsoluteError()])


class Annotated(BaseModule):
    cfg: TrainConfig
    models: Models
    optimizers: Optimizers
    metrics: Metrics


class Initialised(BaseModule):
    def __init__(self, cfg: TrainConfig, models: Models, optimizers: Optimizers, metrics: Metrics):
        super().__init__(cfg=cfg, models=models, optimizers=optimizers, metrics=metrics)


def test_both_spellings_of_an_experiment_bind_alike() -> None:
    assert Description(Annotated).tree == Description(Initialised).tree
    assert list(Description(Annotated).tree) == ["cfg", "models", "optimizers", "metrics"]


class WithDefault(BaseModule):
    cfg: TrainConfig
    metrics: Metrics = Metrics()


@dataclass
class OwnConfig(TrainConfig):
    num_epochs: int = 3


class WithOwnConfig(BaseModule):
    cfg: OwnConfig
    metrics: Metrics


def test_conf_yaml_lists_few_settings_and_a_run_has_all(tmp_path: Path) -> None:
    """Those that every file has, what the experiment sets, and what is edited: the code knows the others."""
    path = tmp_path / "conf.yaml"
    bind(WithOwnConfig, path).write()
    listed = [*FIRST_SETTINGS - {"path", "overwrite"}, "_target_", "trackers", "callbacks"]
    assert set(OmegaConf.load(path).cfg) == set(listed)
    path.write_text(path.read_text().replace("  start_epoch:", "  seed: 3  # mine\n  start_epoch:"))
    binding = bind(WithOwnConfig, path)
    assert not binding.stale
    config = load_config(WithOwnConfig, ["cfg.precision=bf16", "cfg.num_epochs=4"], path)
    assert set(config.tree["cfg"]) == set(Description(Annotated).tree["cfg"])
    assert (config.cfg.seed, config.cfg.precision, config.cfg.num_epochs) == (3, "bf16", 4)
    path.write_text(path.read_text().replace("  num_epochs: 3\n", ""))
    assert load_config(WithOwnConfig, [], path).cfg.num_epochs == 3
    with pytest.raises(ConfigError, match=r"there is no key 'cfg.presision' in .*. Did you mean 'cfg.precision'\?"):
        load_config(WithOwnConfig, ["cfg.presision=bf16"], path)


def test_nested_calls_are_written_with_their_real_arguments() -> None:
    net = Description(Annotated).tree["models"]["net"]
    assert net["fc"] == {
        "_target_": "torch.nn.modules.linear.Linear",
        "in_features": 32,
        "out_features": 10,
        "bias": True,
        "device": None,
        "dtype": None,
    }
    assert (net["block"]["width"], net["block"]["scale"]) == (3, 1e-8)
    assert [layer["bias"] for layer in net["stack"]["_args_"]] == [False, True]
    assert net["widths"] == [5, 10, 5]


def test_binding_again_keeps_values_comments_and_order(tmp_path: Path) -> None:
    path = tmp_path / "conf.yaml"
    first = bind(Annotated, path)
    assert not first.lines()
    first.write()
    assert path.read_text().startswith(header(path))
    text = path.read_text().replace("lr: 0.5", "lr: 0.25  # found by hand").replace("  name: experiment\n", "")
    path.write_text(text.replace("num_epochs: 10", "num_epochs: 10\n  gone: 3"))
    again = bind(Annotated, path)
    again.write()
    assert again.changes.kept == ["optimizers.adam.lr"]
    assert again.changes.added == ["cfg.name"]
    assert again.changes.dropped == {"cfg.gone": "3"}
    assert "lr: 0.25  # found by hand" in path.read_text()
    assert path.read_text().startswith(header(path))
    assert not bind(Annotated, path).stale


def test_a_file_whose_comments_would_damage_it_is_refused_and_kept(tmp_path: Path) -> None:
    """ruamel joins the lines after a comment in this list, so `_target_: torch.nn.Tanh inplace: 3` would be written."""
    path, start = tmp_path / "conf.yaml", "      _args_:\n"
    bind(Annotated, path).write()
    item = "        # why\n        - {_target_: torch.nn.Tanh}  # first\n        # second\n"
    text = path.read_text().replace(start, start + item).replace("lr: 0.5", "lr: 0.5\n    gone: 3")
    path.write_text(text)
    with pytest.raises(BindError, match="cannot be written with its comments in lists"):
        bind(Annotated, path)
    assert path.read_text() == text


class Untyped(BaseModule):
    def __init__(self, cfg: TrainConfig, models):
        super().__init__(cfg=cfg, models=models)


@dataclass
class Lambdas:
    act: object = lambda x: x


class WithLambda(BaseModule):
    cfg: TrainConfig
    models: Lambdas


CHANGED = Block(3)
CHANGED.renamed = 4


@dataclass
class Constants:
    block: Block = CHANGED


class WithConstant(BaseModule):
    cfg: TrainConfig
    models: Constants


@pytest.mark.parametrize(
    ("experiment", "message"),
    [
        (Untyped, "Untyped.__init__: 'models' has no type; write models: Models"),
        (WithDefault, "WithDefault: 'metrics' has a default; write the defaults of its arguments in Metrics"),
        (WithLambda, "models.act: <function <lambda> at 0x"),
        (WithConstant, "models.block: conf.yaml would not re-create this default: renamed is 4 and would be 3"),
    ],
)
def test_what_cannot_be_written_is_refused_by_name(experiment: type, message: str, tmp_path: Path) -> None:
    with pytest.raises(BindError) as caught:
        bind(experiment, tmp_path / "conf.yaml")
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("content", "problem"), [(b"cfg: [1,\n", "is not valid YAML"), (b"\xff\xfe", "conf.yaml is not UTF-8 text: ")]
)
def test_a_damaged_file_is_refused_and_kept(content: bytes, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "conf.yaml"
    path.write_bytes(content)
    with pytest.raises(BindError, match=problem):
        bind(Annotated, path)
    assert path.read_bytes() == content


class TestAgainstTheFormerDefaults:
    """A value that only was the default follows the code; an edited one stays."""

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        bind(Annotated, tmp_path / "conf.yaml").write()
        return tmp_path / "conf.yaml"

    def test_a_new_default_reaches_an_untouched_value(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path.write_text(path.read_text().replace("start_workers: 2", "start_workers: 5"))
        monkeypatch.setattr(TrainConfig, "num_epochs", 77)
        monkeypatch.setattr(TrainConfig.__init__, "__defaults__", changed(TrainConfig, num_epochs=77, start_workers=6))
        binding = bind(Annotated, path)
        assert (binding.changes.updated, binding.changes.kept) == (["cfg.num_epochs"], ["cfg.start_workers"])
        assert "num_epochs: 77" in binding.after
        assert "start_workers: 5" in binding.after
        assert "updated  cfg.num_epochs (to the new default)" in binding.lines()

    def test_another_class_is_the_users_with_its_arguments(self, path: Path) -> None:
        text = path.read_text().replace("_target_: torch.optim.adam.Adam\n", "_target_: torch.optim.sgd.SGD\n")
        path.write_text(text)
        binding = bind(Annotated, path)
        assert binding.changes.kept[0] == "optimizers.adam._target_"
        assert binding.changes.added[:1] == ["optimizers.adam.momentum"]
        assert set(binding.changes.dropped) >= {"optimizers.adam.betas", "optimizers.adam.eps"}
        assert "_target_: torch.optim.sgd.SGD" in binding.after
        assert binding.changes.updated == ["optimizers.adam.lr"]
        assert "lr: 0.001" in binding.after  # of SGD; 0.5 was the default of the code, not the user's value
        binding.write()
        assert not bind(Annotated, path).stale

        path.write_text(path.read_text().replace("lr: 0.001", "lr: 0.5"))  # for SGD, so it stays
        assert not bind(Annotated, path).stale
        path.write_text(path.read_text().replace("sgd.SGD", "adagrad.Adagrad"))
        another = bind(Annotated, path)
        assert "lr: 0.5" in another.after
        assert "optimizers.adam.momentum" in another.changes.dropped
        assert "optimizers.adam.lr" in another.changes.kept

    def test_a_class_that_the_code_has_left_is_replaced(self, path: Path) -> None:
        known = path.with_name("conf.schema.json")
        path.write_text(path.read_text().replace("test_binding.Block", "test_binding.Gone"))
        with pytest.raises(BindError, match="test_binding.Gone, which cannot be described .it cannot be imported: "):
            bind(Annotated, path)  # the user's choice
        known.write_text(known.read_text().replace("test_binding.Block", "test_binding.Gone"))
        binding = bind(Annotated, path)
        assert binding.changes.updated == ["models.net.block._target_"]
        assert "_target_: test_binding.Block" in binding.after


def changed(cls: type, **values: object) -> tuple[object, ...]:
    """The defaults of a dataclass's constructor with some changed, as if its source had been edited."""
    items = inspect.signature(cls).parameters.values()
    return tuple(values.get(item.name, item.default) for item in items)


class TestAChangedClass:
    """What the user has set does not disappear in silence, nor a comment that belongs to another key."""

    FORMER = """\
models:
  _target_: builtins.dict
  net:
    _target_: test_binding.Net
    width: 64
    dropout: 0.4  # found by hand
    # layers
    depth: 3
  # the critic
  other: 1
"""
    DEFAULTS = {"models.net.width": 8, "models.net.dropout": 0.1, "models.net.depth": 2}

    def merged(self, **arguments: object) -> tuple[list[str], str]:
        """Return the lines and the text of the merged file."""
        merge, file = Merge(self.DEFAULTS, lambda path, key: {}), commented_map(self.FORMER, "conf.yaml")
        node = {"_target_": "test_binding.Net", **arguments}
        merge.into(file, {"models": {"_target_": "builtins.dict", "net": node, "other": 1}})
        return merge.changes.lines(), yaml_text(file)

    def test_what_the_code_no_longer_has_is_dropped_with_its_value(self) -> None:
        lines, after = self.merged(width=8, drop_rate=0.1, depth=2)  # perhaps the same under another name
        assert "dropped  models.net.dropout: 0.4  # found by hand (no longer an argument)" in lines
        assert "    # layers\n    depth: 3\n" in after

    @pytest.mark.parametrize("gone", ["width", "dropout", "depth"])
    def test_comments_of_other_keys_stay(self, gone: str) -> None:
        arguments = {"width": 8, "dropout": 0.1, "depth": 2}
        _, after = self.merged(**{name: value for name, value in arguments.items() if name != gone})
        assert after == "".join(line for line in self.FORMER.splitlines(keepends=True) if f" {gone}:" not in line)


class Loaded(nn.Module):
    """Like `PreTrainedModel` of transformers: subclasses inherit the method that makes them."""

    @classmethod
    def from_pretrained(cls, name: str = "base", revision: str = "main", dropout: float = 0.1):
        return cls()


class LoadedBert(Loaded):
    pass


class Small(nn.Module):
    def __init__(self, width: int = 8, dropout: float = 0.2):
        super().__init__()


@dataclass
class Pretrained:
    net: nn.Module = LoadedBert.from_pretrained("bert")


@dataclass
class Fresh:
    net: nn.Module = Small()


class WithPretrained(BaseModule):
    cfg: TrainConfig
    models: Pretrained


class WithFresh(BaseModule):
    cfg: TrainConfig
    models: Fresh


class TestAnotherClass:
    """The code's default is of another class than the file's."""

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        path = tmp_path / "conf.yaml"
        bind(WithPretrained, path).write()
        assert "_target_: test_binding.LoadedBert.from_pretrained" in path.read_text()
        edited = path.read_text().replace("dropout: 0.1", "dropout: 0.4  # mine").replace("main", "v2")
        path.write_text(edited.replace("start_workers: 2", "start_workers: 5"))
        return path

    def test_it_replaces_a_class_method_and_keeps_what_was_edited(self, path: Path) -> None:
        binding = bind(WithFresh, path)
        assert binding.changes.updated == ["models._target_", "models.net._target_"]
        assert binding.changes.dropped == {"models.net.name": '"bert"', "models.net.revision": '"v2"'}
        node = "  net:\n    _target_: test_binding.Small\n    dropout: 0.4  # mine\n    width: 8\n"
        assert node in binding.after
        assert "start_workers: 5" in binding.after
        binding.write()
        assert not bind(WithFresh, path).stale


class TestSchema:
    """What an editor is told."""

    @pytest.fixture(scope="class")
    def checked(self, tmp_path_factory: pytest.TempPathFactory) -> tuple[jsonschema.Draft7Validator, dict]:
        path = tmp_path_factory.mktemp("schema") / "conf.yaml"
        bind(Annotated, path).write()
        schema = json.loads(path.with_name("conf.schema.json").read_text())
        jsonschema.Draft7Validator.check_schema(schema)
        assert path.read_text().startswith("# yaml-language-server: $schema=conf.schema.json\n")
        return jsonschema.Draft7Validator(schema), OmegaConf.to_container(OmegaConf.load(path))

    @pytest.mark.parametrize(
        ("key", "value", "valid"),
        [
            ("cfg.num_epochs", "many", False),
            ("cfg.mode", "max", True),
            ("cfg.monitor", None, True),
            ("cfg.nope", 1, False),
        ],
    )
    def test_edits_are_judged(self, checked: tuple, key: str, value: object, valid: bool) -> None:
        validator, tree = checked
        assert list(validator.iter_errors(tree)) == []  # what bind has written
        edited = copy.deepcopy(tree)
        *parents, name = key.split(".")
        functools.reduce(lambda node, part: node[part], parents, edited)[name] = value
        assert validator.is_valid(edited) is valid


def test_what_losses_and_metrics_would_never_record_is_noticed(tmp_path: Path) -> None:
    lines = [line for line in bind(Judges, tmp_path / "conf.yaml").lines() if "TorchMetrics" in line]
    assert [line.partition(",")[0] for line in lines] == [
        f"notice   {group}.{kind}"
        for group in ("losses", "metrics")
        for kind in ("bce is a BCEWithLogitsLoss", "net is a Block")
    ]
    assert 'record them with self.log({"train/bce": value})' in lines[0]


@dataclass
class Criteria:
    mean: torchmetrics.MeanMetric = torchmetrics.MeanMetric()
    both: torchmetrics.MetricCollection = torchmetrics.MetricCollection([torchmetrics.MeanMetric()])
    bce: torch.nn.Module = torch.nn.BCEWithLogitsLoss()
    net: Block = Block(1)


class Judges(BaseModule):
    cfg: TrainConfig
    losses: Criteria
    metrics: Criteria


@dataclass
class Forgotten:
    mae: torchmetrics.Metric = torchmetrics.MeanAbsoluteError()
    mse = torchmetrics.MeanSquaredError()


class Forgets(BaseModule):
    cfg: TrainConfig
    metrics: Forgotten


class WithoutCfg(BaseModule):
    models: Models


@pytest.mark.parametrize(
    ("experiment", "message"),
    [
        (Forgets, "metrics.mse has no type, so it would be left out; write mse: MeanSquaredError = ..."),
        (WithoutCfg, "WithoutCfg has no cfg; write cfg: TrainConfig, and declare the other groups the same way"),
    ],
)
def test_what_would_be_forgotten_is_refused(experiment: type, message: str, tmp_path: Path) -> None:
    with pytest.raises(BindError) as caught:
        bind(experiment, tmp_path / "conf.yaml")
    assert str(caught.value) == message


@pytest.mark.process
def test_binding_needs_no_memory_for_the_weights_of_default_networks(mlx: Mlx, tmp_path: Path) -> None:
    """On the meta device a layer of 4 TB is free."""
    source = tmp_path / "src"
    source.mkdir()
    (source / "models.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self, width: int = 1_000_000):\n"
        "        super().__init__()\n"
        "        self.layer = torch.nn.Linear(width, width)\n"
    )
    (source / "experiment.py").write_text(
        "from dataclasses import dataclass\n"
        "from mlx_runtime import BaseModule, TrainConfig\n"
        "from src.models import Net\n"
        "@dataclass\n"
        "class Models:\n"
        "    net: Net = Net()\n"
        "class Experiment(BaseModule):\n"
        "    cfg: TrainConfig\n"
        "    models: Models\n"
    )
    done = mlx(tmp_path, "train", "bind")
    assert (done.returncode, done.stdout, done.stderr) == (0, "wrote src/conf.yaml\n", "")
    assert "_target_: src.models.Net" in (source / "conf.yaml").read_text()
