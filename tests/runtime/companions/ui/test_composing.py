"""A conf.yaml is edited node by node, with classes and values that fit the code, into one that a person would write."""

import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Mlx, edit

from mlx_runtime.companions.ui import composing
from mlx_runtime.companions.ui.composing import Draft, open_config
from mlx_runtime.config.interpolation import parse_config
from mlx_runtime.config.projects import CONF
from mlx_runtime.errors import MlxError

pytestmark = pytest.mark.process

TIMM = '''"""With the signature of the library, which imports a torchvision for GPUs."""

from torch import nn


def create_model(model_name: str, pretrained: bool = False, **kwargs) -> nn.Module: ...


def list_models(filter: str = "") -> list[str]: ...
'''

MORE = """
from dataclasses import dataclass

from torch import nn

from src.models import ConvBlock


class Wide(ConvBlock):
    def __init__(self, out_channels: int = 32, act: nn.Module | None = None):
        super().__init__(1, out_channels)


def half(width: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(2 * width, width))


class Evil:
    def __init__(self, path: str = "evil"):
        open(path, "w").close()
"""
"""A file of the project that the experiment does not import."""

COMPOSED = """\
models:
  _target_: src.experiment.Models
  # a plain network
  net:                               # of digits
    _target_: torch.nn.Sequential
    _args_:
      - _target_: torch.nn.Flatten
      - _target_: torch.nn.Linear
        in_features: 64
        out_features: 128
      - _target_: torch.nn.GELU
        approximate: tanh
      - _target_: torch.nn.Linear
        in_features: 128
        out_features: 10
optimizers:
  _target_: src.experiment.Optimizers
  adam:
    _target_: torch.optim.AdamW
    params: ???
    lr: 0.001 # tried 1e-2
    betas: [0.8, 0.99]
"""


@pytest.fixture(scope="module")
def project(bound: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An experiment, shared by the tests that do not write to it."""
    folder = Path(shutil.copytree(bound, tmp_path_factory.mktemp("composing") / "digits"))
    (folder / "src" / "more.py").write_text(MORE)
    (folder / "timm.py").write_text(TIMM)
    return folder


@pytest.fixture
def restored(project: Path) -> Iterator[Path]:
    """The same, for a test that writes to conf.yaml and to files outside of `src`."""
    files = {
        file: file.read_bytes() for file in (project / CONF, project / "src" / "conf.schema.json", project / "main.py")
    }
    yield project
    for file, content in files.items():
        file.write_bytes(content)
    shutil.rmtree(project / "src" / "variants", ignore_errors=True)


@pytest.fixture(scope="module")
def opened(project: Path) -> Draft:
    return open_config(project)


@pytest.fixture(scope="module")
def stacked(opened: Draft) -> Draft:
    """A draft with a network of four blocks."""
    return stack(opened)


def stack(draft: Draft) -> Draft:
    draft = draft.edit("replace", "models.net", "torch.nn.Sequential")
    for number, name in ((0, "Linear"), (0, "Flatten"), (2, "ReLU"), (3, "Dropout"), (4, "Linear")):
        draft = draft.edit("add", "models.net", number, f"torch.nn.{name}")
    draft = draft.edit("remove", "models.net", 3)
    draft = draft.edit("replace", "models.net._args_[2]", "torch.nn.GELU")
    values = {"[1]": (64, 128), "[3]": (128, 10)}
    for block, sizes in values.items():
        for name, size in zip(("in_features", "out_features"), sizes, strict=True):
            draft = draft.edit("set", f"models.net._args_{block}", {name: str(size)})
    return draft.edit("set", "models.net._args_[2]", {"approximate": "tanh"})


def test_a_composed_config_is_one_that_a_person_would_write_and_bind_keeps(mlx: Mlx, restored: Path) -> None:
    conf = restored / CONF
    edit(conf, "  net:\n", "  # a plain network\n  net:                               # of digits\n")
    edit(conf, "lr: 0.003", "lr: 0.003 # tried 1e-2")
    before = conf.read_text()
    draft = stack(open_config(restored)).edit("replace", "optimizers.adam", "torch.optim.AdamW")
    draft = draft.edit("set", "optimizers.adam", {"lr": "1e-3"}).edit(
        "set", "optimizers.adam", {"betas": "[0.8, 0.99]"}
    )
    assert composing.check(draft)["problems"] == []
    assert conf.read_text() == before
    changed = [line for line in composing.diff(draft).splitlines() if line[0] in "+-"]
    assert "+    lr: 0.001 # tried 1e-2" in changed
    assert not [line for line in changed if "cfg" in line or "datasets" in line]

    saved = composing.save(draft)
    assert composing.diff(saved) == ""
    after = conf.read_text()
    assert COMPOSED in after
    assert after.partition("models:")[0] == before.partition("models:")[0]
    schema = conf.with_name("conf.schema.json").read_text()
    for arguments in (["--check"], []):
        done = mlx(restored, "train", "bind", *arguments)
        assert done.returncode == 0, done.stderr
    assert (conf.read_text(), conf.with_name("conf.schema.json").read_text()) == (after, schema)
    back = composing.save(open_config(restored).edit("replace", "models.net", "src.models.DigitsNet"))
    assert {"models.net.first", "models.net.head"} <= back.nodes.keys()
    assert mlx(restored, "train", "bind", "--check").returncode == 0


def with_blocks(conf: Path, blocks: str) -> tuple[str, str]:
    """Write a network of blocks, and return what is above and below them."""
    before, _, rest = conf.read_text().partition("  net:\n")
    after = rest.partition("optimizers:\n")[2]
    top, end = f"{before}  net:\n    _target_: torch.nn.Sequential\n    _args_:\n", f"# below\noptimizers:\n{after}"
    conf.write_text(top + blocks + end)
    return top, end


def test_blocks_keep_their_lines_and_comments(restored: Path) -> None:
    front = "      # the front\n      - {_target_: torch.nn.Flatten}  # to rows\n"
    middle = "      # the middle\n      - _target_: torch.nn.Linear\n        in_features: 64 # 8 x 8\n\n"
    last = "      - _target_: torch.nn.ReLU # at last\n"
    more = "      # - _target_: torch.nn.GELU\n"
    top, end = with_blocks(restored / CONF, front + middle + last + more)
    draft = open_config(restored)
    assert composing.diff(draft) == ""
    assert draft.edit("remove", "models.net", 0).text == top + middle + last + more + end
    assert draft.edit("remove", "models.net", 2).text == top + front + middle.rstrip("\n") + "\n\n" + more + end
    new = "      - _target_: torch.nn.Dropout\n"
    assert draft.edit("add", "models.net", 3, "torch.nn.Dropout").text == top + front + middle + last + new + more + end
    assert draft.edit("add", "models.net", 1, "torch.nn.Dropout").text == top + front + new + middle + last + more + end
    for _ in range(3):
        draft = draft.edit("remove", "models.net", 0)
    assert (
        draft.text.partition("optimizers:")[0]
        == top.replace("    _args_:\n", "") + more + end.partition("optimizers:")[0]
    )
    for action, *arguments in (("remove", 0), ("add", 1, "torch.nn.ReLU"), ("move", 0, 0)):
        with pytest.raises(MlxError, match=f"cannot {action} {arguments[0]}"):
            draft.edit(action, "models.net", *arguments)


@pytest.mark.parametrize(
    "blocks",
    [
        "      -\n        _target_: torch.nn.Flatten\n      -\n        _target_: torch.nn.ReLU\n",
        "      -   _target_: torch.nn.Flatten\n      -   _target_: torch.nn.ReLU\n",
        "      - &front\n        _target_: torch.nn.Flatten\n      - _target_: torch.nn.ReLU\n",
        "      [{_target_: torch.nn.Flatten}, {_target_: torch.nn.ReLU}]\n",
        "      - _target_: torch.nn.Flatten\n      - {_target_: torch.nn.ReLU,\n   inplace: true}\n",
    ],
)
def test_blocks_in_another_layout_are_edited_or_refused(restored: Path, blocks: str) -> None:
    with_blocks(restored / CONF, blocks)
    draft = open_config(restored)
    assert len(draft.nodes["models.net"]["blocks"]) == 2
    flatten, relu, gelu = "torch.nn.Flatten", "torch.nn.ReLU", "torch.nn.GELU"
    refused = "models.net cannot be changed here, as src/conf.yaml is written; edit the file"
    assert blocks_after(draft, "remove", 0) in ([relu], refused)
    assert blocks_after(draft, "remove", 1) in ([flatten], refused)
    assert blocks_after(draft, "add", 2, gelu) in ([flatten, relu, gelu], refused)


def blocks_after(draft: Draft, action: str, *arguments: object) -> object:
    try:
        text = draft.edit(action, "models.net", *arguments).text
    except MlxError as error:
        return str(error)
    return [block["_target_"] for block in parse_config(text)["models"]["net"]["_args_"]]


def test_values_keep_the_comments_around_them(restored: Path) -> None:
    conf = restored / CONF
    edit(conf, "lr: 0.003", "lr: 0.003 # tried 1e-2")
    draft = open_config(restored)
    old = draft.nodes["optimizers.adam"]["fields"]["betas"]["value"]
    written = next(
        item for item in (f"    betas: {old}\n", "    betas:\n      - 0.9\n      - 0.999\n") if item in draft.text
    )
    text = draft.text.replace(written, "    betas:\n      - 0.9\n      - 0.999 # slow\n      # - 0.99\n    # below\n")
    conf.write_text(text)
    after = open_config(restored).edit("set", "optimizers.adam", {"betas": "[.inf, 0.9]", "lr": "0.1"}).text
    wanted = text.replace("    betas:\n      - 0.9\n      - 0.999 # slow\n", "    betas: [.inf, 0.9] # slow\n")
    assert after == wanted.replace("lr: 0.003 #", "lr: 0.1   #")


def test_classes_that_fit_the_annotation_are_offered(opened: Draft, stacked: Draft) -> None:
    models, none = opened.offered("models.net")
    assert none == []
    assert models[0] == "src.models.DigitsNet"
    own = {"src.more.Wide", "src.more.half", "src.models.ConvBlock"}
    assert own | {"torch.nn.Sequential", "torch.nn.Conv2d", "timm.create_model"} <= {*models}
    named = opened.edit("replace", "models.net", "timm.create_model").nodes["models.net"]["fields"]
    assert (named["model_name"]["value"], named["pretrained"]["value"]) == ("", "false")
    assert not {"src.more.Evil", "torch.nn.Module", "torch.nn.Parameter", "torch.optim.SGD"} & {*models}
    assert opened.offered("models.net.first")[0] == ["src.models.ConvBlock", "src.more.Wide"]
    optimizers, _ = opened.offered("optimizers.adam")
    assert "torch.optim.SGD" in optimizers
    assert {name.rpartition(".")[0] for name in optimizers} == {"torch.optim", "torch.optim.adam"}
    schedules, _ = opened.offered("tools.schedule")
    assert {"src.tools.warmup_cosine", "torch.optim.lr_scheduler.CosineAnnealingLR"} <= {*schedules}
    assert "torch.nn.Linear" not in schedules
    assert "torch.nn.Linear" in stacked.offered("models.net")[1]
    wide = opened.edit("replace", "models.net.first", "src.more.Wide")
    assert wide.nodes["models.net.first"]["fields"]["out_channels"]["value"] == "32"
    assert wide.nodes["models.net.first"]["fields"]["act"]["value"] == "null"


def test_fields_have_types_defaults_and_texts(opened: Draft) -> None:
    fields = opened.nodes["tools.early_stopping"]["fields"]
    assert fields["patience"]["type"] == "int"
    assert fields["patience"]["default"] == fields["patience"]["value"] == "5"
    assert fields["mode"]["type"] == "Literal['min', 'max']"
    assert "minimum improvement" in fields["min_delta"]["help"]
    assert "params" not in opened.nodes["optimizers.adam"]["fields"]
    cleared = opened.edit("set", "tools.early_stopping", {"patience": "7"}).edit(
        "set", "tools.early_stopping", {"patience": ""}
    )
    assert cleared.text == opened.text


def test_problems_are_shown_at_their_node(opened: Draft, stacked: Draft) -> None:
    assert composing.check(stacked)["problems"] == []
    wrong = composing.check(stacked.edit("set", "models.net._args_[3]", {"in_features": "100"}))
    assert wrong["problems"][0].startswith("models.net._args_[3]: ")
    assert "shapes cannot be multiplied" in wrong["problems"][0]
    missing = composing.check(stacked.edit("add", "models.net", 4, "torch.nn.Conv2d"))["problems"]
    assert {line.partition(": ")[0].rpartition(".")[0] for line in missing} == {"models.net._args_[4]"}
    (unbuilt,) = composing.check(opened.edit("set", "tools.early_stopping", {"patience": "0"}))["problems"]
    assert unbuilt.startswith("tools.early_stopping")
    assert "patience is 0; the minimum is 1" in unbuilt


def test_shapes_and_parameters_are_counted(stacked: Draft) -> None:
    (model,) = composing.check(stacked)["models"]
    found = [(row["class"], row["shape"], row["parameters"], row["node"]) for row in model["modules"]]
    assert found == [
        ("Flatten", "(n, 64)", 0, "models.net._args_[0]"),
        ("Linear", "(n, 128)", 8320, "models.net._args_[1]"),
        ("GELU", "(n, 128)", 0, "models.net._args_[2]"),
        ("Linear", "(n, 10)", 1290, "models.net._args_[3]"),
    ]


@pytest.mark.parametrize(
    ("key", "name", "typed"),
    [
        ("tools.early_stopping", "patience", "five"),
        ("tools.early_stopping", "patience", "{_target_: src.more.Evil}"),
        ("tools.early_stopping", "patience", "1\nevil: {_target_: src.more.Evil}"),
        ("tools.early_stopping", "mode", "max "),
        ("optimizers.adam", "betas", "[0.9, {_target_: src.more.Evil}]"),
        ("optimizers.adam", "foreach", '{"_target_": "src.more.Evil"}'),
        ("models.net.head", "device", "{_target_: src.more.Evil}"),
        ("models.net.head", "device", '"\\x24{oc.env:HOME}"'),
        ("cfg", "name", "${oc.env:HOME}"),
        ("cfg", "name", "${oc.env:HOME} ${cfg.mode}"),
    ],
)
def test_a_hostile_text_is_refused(opened: Draft, key: str, name: str, typed: str) -> None:
    with pytest.raises(MlxError, match=rf"{re.escape(f'{key}.{name}')}\S* is .*(not of type|which )"):
        opened.edit("set", key, {name: typed})
    assert not (opened.project / "evil").exists()


@pytest.mark.parametrize(
    ("key", "name", "typed"),
    [
        ("tools.early_stopping", "_target_", "src.more.Evil"),
        ("tools.early_stopping", "other", "1"),
        ("optimizers.adam", "params", "[1]"),
        ("models.net", "first", "{_target_: src.more.Evil}"),
        ("models.nothing", "first", "1"),
    ],
)
def test_what_is_no_field_cannot_be_set(opened: Draft, key: str, name: str, typed: str) -> None:
    with pytest.raises(MlxError):
        opened.edit("set", key, {name: typed})


@pytest.mark.parametrize("path", ["os.system", "src.more.Evil", "torch.hub.load", "builtins.eval", "torch.nn.Linear"])
def test_a_class_that_was_not_offered_is_refused(opened: Draft, path: str) -> None:
    with pytest.raises(MlxError, match="not one of the"):
        opened.edit("replace", "optimizers.adam", path)
    assert not (opened.project / "evil").exists()


def test_references_and_texts_are_kept_as_typed(opened: Draft) -> None:
    draft = opened.edit("set", "datasets.val", {"batch_size": "${datasets.train.batch_size}"}).edit(
        "set", "cfg", {"name": "1.10"}
    )
    draft = draft.edit("set", "cfg", {"num_epochs": "3"})
    for line in ("    batch_size: ${datasets.train.batch_size}\n", '  name: "1.10"\n', "  num_epochs: 3\n"):
        assert line in draft.text
    assert composing.check(draft)["problems"] == []


def test_a_config_that_changed_meanwhile_is_not_overwritten(restored: Path) -> None:
    draft = open_config(restored).edit("set", "cfg", {"num_epochs": "3"})
    edit(restored / CONF, "num_epochs: 30", "num_epochs: 31")
    with pytest.raises(MlxError, match="has been changed"):
        composing.save(draft)
    assert "num_epochs: 31" in (restored / CONF).read_text()
    (restored / CONF).unlink()
    with pytest.raises(MlxError, match="has been changed"):
        composing.save(draft)
    with pytest.raises(MlxError, match="mlx train bind"):
        open_config(restored)


def test_a_draft_becomes_a_variant(mlx: Mlx, restored: Path, stacked: Draft) -> None:
    draft = stacked.edit("set", "optimizers.adam", {"lr": "0.01"})
    for name in ("../evil", "", ".hidden", "a/b"):
        with pytest.raises(MlxError, match="not a valid"):
            composing.save_variant(draft, name)
    file = composing.save_variant(draft, "plain")
    assert file.read_text().startswith("models:\n  net:\n    _target_: torch.nn.Sequential\n    _args_:\n")
    assert file.read_text().endswith("optimizers:\n  adam:\n    lr: 0.01\n")
    with pytest.raises(MlxError, match="there is a variant"):
        composing.save_variant(draft, "plain")
    done = mlx(restored, "train", "show", "models.net", "--variant", "plain")
    assert done.returncode == 0, done.stderr
    assert "torch.nn.Sequential" in done.stdout
    assert "DigitsNet" in (restored / CONF).read_text()


def test_a_run_is_started_in_a_storage(
    restored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    for name, value in (environment | {"MLX_CACHE": str(tmp_path / "cache")}).items():
        monkeypatch.setenv(name, value)
    seen = "import os\nopen('seen', 'w').write(str(os.getsid(0)))\n"
    (restored / "main.py").write_text(seen + (restored / "main.py").read_text())
    edited = open_config(restored).edit("set", "cfg", {"num_epochs": "1"})
    with pytest.raises(MlxError, match="the draft is not saved"):
        composing.start(edited)
    draft = composing.save(edited)
    edit(restored / CONF, "num_epochs: 1\n", "num_epochs: 2\n")
    with pytest.raises(MlxError, match="has been changed"):
        composing.start(draft)
    log = composing.start(open_config(restored), str(tmp_path / "runs"))
    deadline = time.monotonic() + 120
    while not any("SUCCEEDED" in file.read_text() for file in (tmp_path / "runs").rglob("run.json")):
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)
    assert (restored / "seen").read_text() != str(os.getsid(0))
