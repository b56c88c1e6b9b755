"""Library models as defaults: declared, pinned to commits, downloaded once, and built without weights."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hub_server import Hub
from tiny_bert import save_tiny_bert
from torch import nn

from mlx_runtime.companions.hub import pins
from mlx_runtime.companions.hub.pins import Pin, pin_defaults, pin_revisions, repositories_of
from mlx_runtime.config.binding.conf_file import bind
from mlx_runtime.config.binding.merging import commented_map
from mlx_runtime.config.building import build, built_to_be_restored, without_weights
from mlx_runtime.config.constructors.declarations import Declaration, defer_loading
from mlx_runtime.config.projects import project_module
from mlx_runtime.errors import ConfigError, MlxError

pytestmark = pytest.mark.process

BERT = "transformers.BertModel.from_pretrained"
COMMITS = {"org/bert": "b" * 40, "org/gpt": "a" * 40}


def found(pin: Pin) -> str:
    return pin.commit or COMMITS[pin.repository]


def conf(**net: Any) -> dict[str, Any]:
    return {"models": {"net": {"_target_": BERT, "pretrained_model_name_or_path": "org/bert", **net}}}


def missing(pin: Pin) -> str:
    raise ConfigError(f"{pin.key}: the Hub cannot be reached")


class TestPins:
    def test_names_of_repositories_are_found_in_the_whole_config(self, tmp_path: Path) -> None:
        source = {"_target_": "datasets.load.load_dataset", "path": "org/rows", "split": "train"}
        tree = {
            "models": {
                "seq": {"_target_": "torch.nn.Sequential", "_args_": [{"_target_": BERT, "_args_": ["org/bert"]}]}
            },
            "datasets": {"train": {"_target_": "mlx_runtime.datasets.Batched", "source": source}},
            "tools": {"local": {"_target_": BERT, "_args_": [str(tmp_path)]}, "json": source | {"path": "json"}},
        }
        assert [(pin.key, pin.repository, pin.kind) for pin in pins.pins(tree)] == [
            ("models.seq._args_[0]", "org/bert", "model"),
            ("datasets.train.source", "org/rows", "dataset"),
        ]

    def test_a_default_gets_the_commit_that_the_file_has_or_else_that_of_the_hub(self) -> None:
        tree, kept = conf(), conf(revision="c" * 40)
        assert pin_defaults(tree, {}, found) == []
        assert tree["models"]["net"]["revision"] == "b" * 40
        tree = conf(revision="main")
        assert pin_defaults(tree, kept, missing) == []  # the Hub is not asked
        assert tree == kept
        tree = conf()
        assert pin_defaults(tree, conf(revision="main"), missing) == []  # a choice of the user
        assert tree == conf(revision="main")

    def test_a_repository_that_the_user_chose_is_not_pinned_to_a_commit_of_the_default(self) -> None:
        tree = conf()
        pin_defaults(tree, conf(pretrained_model_name_or_path="org/gpt", revision="b" * 40), found)
        assert tree["models"]["net"]["revision"] == "a" * 40

    def test_tags_in_code_stay_and_an_unreachable_hub_is_a_notice(self) -> None:
        tree = conf(revision="v1.0")
        assert (pin_defaults(tree, {}, missing), tree) == ([], conf(revision="v1.0"))
        (notice,) = pin_defaults(conf(), {}, missing)
        assert notice == "models.net: the Hub cannot be reached"

    def test_a_run_is_pinned_even_to_the_commit_of_a_tag_and_keeps_it_when_it_resumes(self) -> None:
        for asked in ({}, {"revision": "v1.0"}, {"revision": None}):
            tree, unresolved = conf(**asked), conf(**asked)
            pin_revisions(tree, unresolved, conf(), find=found)
            assert tree == unresolved == conf(revision="b" * 40)
        tree = conf()
        pin_revisions(tree, conf(), conf(), conf(revision="d" * 40), found)
        assert repositories_of(tree) == {
            "models.net": {"repository": "org/bert", "kind": "model", "revision": "d" * 40}
        }
        with pytest.raises(ConfigError, match=r"models.net: the Hub cannot be reached"):
            pin_revisions(conf(), conf(), conf(), find=missing)
        with pytest.raises(ConfigError, match=r"models.net.revision is 5, which is no text; write it in quotes"):
            pin_revisions(conf(revision=5), conf(), conf())


SOURCE = """
from dataclasses import dataclass
from functools import partial

import timm
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torchvision.models import ResNet18_Weights, resnet18
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer, BertModel, PreTrainedModel

import mlx_runtime
from mlx_runtime import BaseModule


FIRST = get_peft_model(AutoModel.from_pretrained("org/bert"), LoraConfig(r=4, target_modules=["query"]))
TOKENIZER = AutoTokenizer.from_pretrained("org/bert")


def words(text):
    return TOKENIZER(text)


class Mine(BertModel):
    pass


class Own(nn.Module):
    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, revision="main"):
        return cls()


class Net(nn.Module):
    def __init__(self, backbone: PreTrainedModel = BertModel.from_pretrained("org/bert"), classes: int = 3):
        super().__init__()
        self.backbone, self.head = backbone, nn.Linear(backbone.config.hidden_size, classes)


@dataclass
class Models:
    net: PreTrainedModel = AutoModelForSequenceClassification.from_pretrained("org/bert", num_labels=2)
    own: Net = Net(classes=4)
    row: nn.Module = nn.Sequential(AutoModel.from_pretrained("org/bert", revision="main"), nn.ReLU())
    image: nn.Module = timm.create_model("tiny", pretrained=True, width=3)
    script: torch.jit.ScriptModule = torch.jit.load("m.pt")
    seen: nn.Module = resnet18(weights="DEFAULT", width=3)
    named: nn.Module = resnet18(weights=ResNet18_Weights.IMAGENET1K_V1, width=3)
    mine: Mine = Mine.from_pretrained("org/bert")
    ordinary: Own = Own.from_pretrained("org/bert")
    adapted: nn.Module = FIRST


@dataclass
class Tools:
    tokens: object = AutoTokenizer.from_pretrained("org/bert", use_fast=True)
    later: object = partial(max, AutoTokenizer.from_pretrained("org/bert"))


@dataclass
class TrainConfig(mlx_runtime.TrainConfig):
    name: str = "pretrained"


class Experiment(BaseModule):
    cfg: TrainConfig
    models: Models
    tools: Tools
"""

TIMM = """
from torch import nn

made = []


def create_model(name, pretrained=False, **options):
    made.append((name, pretrained))
    return nn.Linear(options["width"], 1)
"""

PEFT = """
from dataclasses import dataclass, field
from typing import Optional, Union


@dataclass
class LoraConfig:
    r: int = field(default=8, metadata={"help": "rank"})
    target_modules: Optional[Union[list[str], str]] = None
    rank_pattern: Optional[dict] = field(default_factory=dict)

    def __post_init__(self):
        if isinstance(self.target_modules, list):
            self.target_modules = set(self.target_modules)


def get_peft_model(model, peft_config, adapter_name: str = "default"):
    return model.train()
"""

TORCHVISION_API = """
import enum


class WeightsEnum(enum.Enum):
    @classmethod
    def verify(cls, given):
        return cls[given.replace(f"{cls.__name__}.", "")] if isinstance(given, str) else given


def list_models():
    return ["resnet18"]
"""

TORCHVISION = """
import functools
from typing import Optional

from torch import nn

from ._api import WeightsEnum


class ResNet18_Weights(WeightsEnum):
    IMAGENET1K_V1 = 5  # classes
    DEFAULT = IMAGENET1K_V1


def legacy(function):
    @functools.wraps(function)
    def inner(*args, **kwargs):
        return function(*args, **kwargs)

    return inner


@legacy
def resnet18(*, weights: Optional[ResNet18_Weights] = None, progress: bool = True, **options):
    weights = ResNet18_Weights.verify(weights)
    return nn.Linear(options["width"], weights.value if weights else 1)
"""

LIBRARIES = {
    "peft.py": PEFT,
    "timm.py": TIMM,
    "torchvision/__init__.py": "",
    "torchvision/models/__init__.py": "from .resnet import ResNet18_Weights, resnet18",
    "torchvision/models/_api.py": TORCHVISION_API,
    "torchvision/models/resnet.py": TORCHVISION,
}
"""Libraries of the same shape as those that are not installed here."""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    """A Hub with a repository, which this process uses with an empty cache."""
    from huggingface_hub import constants, hf_api

    with Hub() as hub, pytest.MonkeyPatch.context() as patch:
        hub.create("org/bert", {"config.json": b"{}"}, private=False)
        patch.setattr(hf_api.api, "endpoint", hub.url)
        patch.setattr(constants, "HF_HUB_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield hub


@pytest.fixture(scope="module")
def source(hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    import importlib

    import torchmetrics  # noqa: F401 - before it finds this torchvision

    folder = tmp_path_factory.mktemp("source")
    (folder / "pretrained_source.py").write_text(SOURCE)
    for name, text in LIBRARIES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    defer_loading("pretrained_source")
    sys.path.insert(0, str(folder))
    installed = forgotten()  # another test may have imported them
    yield importlib.import_module("pretrained_source")
    sys.path.remove(str(folder))
    forgotten()
    sys.modules.update(installed)


def forgotten() -> dict[str, ModuleType]:
    """Remove the modules of `LIBRARIES` and of the source from those that are imported, and return them."""
    tops = ("peft", "pretrained_source", "timm", "torchvision")
    return {name: sys.modules.pop(name) for name in [*sys.modules] if name.partition(".")[0] in tops}


@pytest.fixture(autouse=True)
def nothing_made() -> Iterator[None]:
    """Forget the models that a test has made."""
    yield
    getattr(sys.modules.get("timm"), "made", []).clear()


def test_importing_and_binding_download_nothing(source: ModuleType, hub: Hub, tmp_path: Path) -> None:
    models = source.Models
    assert [name for name in models.__annotations__ if not isinstance(vars(models)[name], Declaration)] == ["ordinary"]
    bound = bind(source.Experiment, tmp_path / "conf.yaml")
    bound.write()
    tree = commented_map(bound.after, "conf.yaml")
    sha = hub.repositories["models/org/bert"].commits[-1].sha
    assert tree["models"]["net"]["revision"] == tree["models"]["own"]["backbone"]["revision"] == sha
    assert tree["models"]["row"]["_args_"][0]["revision"] == tree["tools"]["tokens"]["revision"] == sha
    assert tree["models"]["image"] == {
        "_target_": "timm.create_model",
        "name": "tiny",
        "pretrained": True,
        "width": 3,
    }
    assert tree["models"]["script"]["_target_"] == "torch.jit.load"
    assert tree["models"]["script"]["f"] == "m.pt"
    assert tree["models"]["net"]["pretrained_model_name_or_path"] == "org/bert"
    assert (tree["models"]["seen"]["weights"], tree["models"]["named"]["weights"]) == ("DEFAULT", "IMAGENET1K_V1")
    assert tree["models"]["seen"]["_target_"] == "torchvision.models.resnet.resnet18"
    assert tree["models"]["mine"]["_target_"] == "pretrained_source.Mine.from_pretrained"
    assert (tree["models"]["mine"]["revision"], tree["models"]["ordinary"]["revision"]) == (sha, "main")
    adapted = tree["models"]["adapted"]
    assert (adapted["_target_"], adapted["model"]["revision"]) == ("peft.get_peft_model", sha)
    assert adapted["peft_config"] == {
        "_target_": "peft.LoraConfig",
        "r": 4,
        "target_modules": ["query"],
        "rank_pattern": {},
    }
    assert bound.notices == sys.modules["timm"].made == []
    assert not [path for _, path in hub.requests if "/resolve/" in path]
    asked = len(hub.requests)
    again = bind(source.Experiment, tmp_path / "conf.yaml")
    assert (again.stale, again.lines(), len(hub.requests)) == (False, [], asked)


def test_what_is_declared_cannot_be_changed_silently(source: ModuleType) -> None:
    with pytest.raises(AttributeError, match="'Declaration' object has no attribute 'x'"):
        source.Models.net.x = 1
    with pytest.raises(
        AttributeError, match="is not constructed while src is imported, so it has no attribute 'config'"
    ):
        source.Models.net.config.x = 1
    with pytest.raises(
        AttributeError, match=r"so it cannot be called; make it a default .*, or call AutoTokenizer\.from_pr"
    ):
        source.words("a text")
    with pytest.raises(AttributeError, match="it has no items"):
        source.Models.net["x"]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_bert(tmp_path_factory.mktemp("bert"))


@pytest.mark.parametrize(
    "options",
    [
        {"_target_": "transformers.AutoModelForSequenceClassification.from_pretrained", "dtype": "bfloat16"},
        {"_target_": "transformers.BertModel.from_pretrained", "weights_only": True, "use_safetensors": None},
    ],
)
def test_a_model_of_transformers_is_built_without_its_weights(options: dict[str, Any], bert: Path) -> None:
    node = {**options, "_args_": [str(bert)]}
    whole = build(node)
    weights = bert / "model.safetensors"
    weights.rename(bert / "hidden")
    try:
        with without_weights():
            empty = build({"_target_": "torch.nn.Sequential", "_args_": [node]})[0]
        with pytest.raises(ConfigError, match="safetensors"):
            build(node)
    finally:
        (bert / "hidden").rename(weights)
    state, other = empty.state_dict(), whole.state_dict()
    assert {name: (value.dtype, value.shape) for name, value in state.items()} == {
        name: (value.dtype, value.shape) for name, value in other.items()
    }
    assert not torch.equal(state[next(iter(state))], other[next(iter(state))])
    assert type(empty) is type(whole)
    assert empty.training is whole.training is False
    assert empty.config.to_dict() == whole.config.to_dict()


class Adapted(nn.Module):
    """Saves only its adapter, like the models of peft."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone, self.adapter = backbone, nn.Linear(1, 1)

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:
        state = super().state_dict(*args, **options)
        return {name: value for name, value in state.items() if name.startswith("adapter.")}


@pytest.mark.parametrize(("wrap", "pretrained"), [(nn.Sequential, [False]), (Adapted, [False, True])])
def test_weights_that_no_checkpoint_overwrites_are_loaded(
    wrap: type, pretrained: list[bool], source: ModuleType
) -> None:
    node = {"_target_": "timm.create_model", "name": "tiny", "pretrained": True, "width": 3}
    sys.modules["timm"].made.clear()
    built_to_be_restored(lambda: SimpleNamespace(net=wrap(build(node))))
    assert sys.modules["timm"].made == [("tiny", one) for one in pretrained]


@pytest.mark.parametrize(
    ("name", "token", "message"),
    [
        ("org/nothing", "token-bob", "is not on the Hub, or not visible with this token; check its name, and if"),
        ("org/bert", "wrong", "cannot be read, because the Hub does not accept the token; set HF_TOKEN to a valid one"),
        ("org/bert", "", "has no revision 'v9' on the Hub; name another, or none for the latest"),
    ],
)
def test_what_cannot_be_looked_up_is_one_line(
    hub: Hub, name: str, token: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(ConfigError) as caught:
        pins.commit_of(Pin("tools.it", {"revision": "v9"}, name, "model"))
    assert str(caught.value).startswith(f"tools.it: the model {name} {message}")
    assert "\n" not in str(caught.value)


def test_a_library_that_is_not_installed_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "without_library.py").write_text("from transformers import AutoModel\n")
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MlxError, match=r'ModuleNotFoundError: .*; type: pip install "mlx-runtime\[text\]"$'):
        project_module("without_library", tmp_path)
