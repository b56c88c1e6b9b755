"""A conf.yaml is edited node by node, with classes and values that fit the code, into one that a person would write."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Mlx, edit

from mlx_runtime.companions.ui import composing
from mlx_runtime.companions.ui.composing import Draft, open_config
from mlx_runtime.config.projects import CONF
from mlx_runtime.errors import MlxError

pytestmark = pytest.mark.process

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
    draft = draft.replace("models.net", "torch.nn.Sequential")
    for name in ("Linear", "Flatten", "ReLU", "Dropout", "Linear"):
        draft = draft.add_block("models.net", f"torch.nn.{name}")
    draft = draft.move_block("models.net", 1, 0).remove_block("models.net", 3)
    draft = draft.replace("models.net._args_[2]", "torch.nn.GELU")
    values = {"[1]": (64, 128), "[3]": (128, 10)}
    for block, sizes in values.items():
        for name, size in zip(("in_features", "out_features"), sizes, strict=True):
            draft = draft.set(f"models.net._args_{block}", name, str(size))
    return draft.set("models.net._args_[2]", "approximate", "tanh")


def lines_of(draft: Draft) -> list[str]:
    return [line for _, line in composing.check(draft)["problems"]]


def test_a_composed_config_is_one_that_a_person_would_write_and_bind_keeps(mlx: Mlx, restored: Path) -> None:
    conf = restored / CONF
    edit(conf, "  net:\n", "  # a plain network\n  net:                               # of digits\n")
    edit(conf, "lr: 0.003", "lr: 0.003 # tried 1e-2")
    before = conf.read_text()
    draft = stack(open_config(restored)).replace("optimizers.adam", "torch.optim.AdamW")
    draft = draft.set("optimizers.adam", "lr", "1e-3").set("optimizers.adam", "betas", "[0.8, 0.99]")
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
    back = composing.save(open_config(restored).replace("models.net", "src.models.DigitsNet"))
    assert {"models.net.first", "models.net.head"} <= back.nodes.keys()
    assert mlx(restored, "train", "bind", "--check").returncode == 0


def test_blocks_are_moved_with_their_comments(restored: Path) -> None:
    conf = restored / CONF
    before, _, rest = conf.read_text().partition("  net:\n")
    _, _, after = rest.partition("optimizers:\n")
    top = f"{before}  net:\n    _target_: torch.nn.Sequential\n    _args_:\n"
    front = "      # the front\n      - {_target_: torch.nn.Flatten}  # to rows\n"
    middle = "      # the middle\n      - _target_: torch.nn.Linear\n        in_features: 64 # 8 x 8\n\n"
    last = "      - _target_: torch.nn.ReLU # at last\n"
    end = f"# below\noptimizers:\n{after}"
    conf.write_text(top + front + middle + last + end)
    draft = open_config(restored)
    assert composing.diff(draft) == ""
    assert draft.move_block("models.net", 2, 1).text == top + front + last + middle + end
    assert draft.remove_block("models.net", 0).text == top + middle + last + end
    new = "      - _target_: torch.nn.Dropout\n"
    assert draft.add_block("models.net", "torch.nn.Dropout").text == top + front + middle + last + new + end
    for _ in range(3):
        draft = draft.remove_block("models.net", 0)
    assert draft.text == top.replace("    _args_:\n", "") + end
    with pytest.raises(MlxError, match="cannot remove 0"):
        draft.remove_block("models.net", 0)


def test_classes_that_fit_the_annotation_are_offered(opened: Draft, stacked: Draft) -> None:
    models, none = opened.offered("models.net")
    assert none == []
    assert models[0] == "src.models.DigitsNet"
    assert {"src.more.Wide", "src.more.half", "src.models.ConvBlock", "torch.nn.Sequential", "torch.nn.Conv2d"} <= {
        *models
    }
    assert not {"src.more.Evil", "torch.nn.Module", "torch.nn.Parameter", "torch.optim.SGD"} & {*models}
    assert opened.offered("models.net.first")[0] == ["src.models.ConvBlock", "src.more.Wide"]
    optimizers, _ = opened.offered("optimizers.adam")
    assert "torch.optim.SGD" in optimizers
    assert {name.rpartition(".")[0] for name in optimizers} == {"torch.optim", "torch.optim.adam"}
    schedules, _ = opened.offered("tools.schedule")
    assert {"src.tools.warmup_cosine", "torch.optim.lr_scheduler.CosineAnnealingLR"} <= {*schedules}
    assert "torch.nn.Linear" not in schedules
    assert "torch.nn.Linear" in stacked.offered("models.net")[1]
    wide = opened.replace("models.net.first", "src.more.Wide")
    assert wide.nodes["models.net.first.act"]["target"] is None
    act = wide.replace("models.net.first.act", "torch.nn.ReLU")
    assert act.nodes["models.net.first.act"]["target"] == "torch.nn.ReLU"
    assert act.nodes["models.net.first"]["fields"]["out_channels"]["value"] == "32"


def test_fields_have_types_defaults_and_texts(opened: Draft) -> None:
    fields = opened.nodes["tools.early_stopping"]["fields"]
    assert fields["patience"]["type"] == "int"
    assert fields["patience"]["default"] == fields["patience"]["value"] == "5"
    assert fields["mode"]["choices"] == ["min", "max"]
    assert "minimum improvement" in fields["min_delta"]["help"]
    assert "params" not in opened.nodes["optimizers.adam"]["fields"]
    cleared = opened.set("tools.early_stopping", "patience", "7").set("tools.early_stopping", "patience", "")
    assert cleared.text == opened.text


def test_problems_are_shown_at_their_node(opened: Draft, stacked: Draft) -> None:
    assert composing.check(stacked)["problems"] == []
    wrong = composing.check(stacked.set("models.net._args_[3]", "in_features", "100"))
    assert [key for key, _ in wrong["problems"]] == ["models.net._args_[3]"]
    assert "shapes cannot be multiplied" in wrong["problems"][0][1]
    missing = composing.check(stacked.add_block("models.net", "torch.nn.Conv2d"))
    assert {key for key, _ in missing["problems"]} == {"models.net._args_[4]"}
    unbuilt = composing.check(opened.set("tools.early_stopping", "patience", "0"))
    assert unbuilt["problems"][0][0] == "tools.early_stopping"
    assert "patience is 0; the minimum is 1" in unbuilt["problems"][0][1]


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
def test_a_hostile_text_is_refused_and_nothing_is_saved(opened: Draft, key: str, name: str, typed: str) -> None:
    draft = opened.set(key, name, typed).set("tools.early_stopping", "min_delta", "0.5")
    assert "min_delta: 0.5" in draft.text
    assert "Evil" not in draft.text
    assert draft.refused[f"{key}.{name}"][0] == typed
    before = (opened.project / CONF).read_text()
    for save in (lambda: composing.save(draft), lambda: composing.save_variant(draft, "evil")):
        with pytest.raises(MlxError, match="nothing is saved: "):
            save()
    assert lines_of(draft)
    assert (opened.project / CONF).read_text() == before
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
        opened.set(key, name, typed)


@pytest.mark.parametrize("path", ["os.system", "src.more.Evil", "torch.hub.load", "builtins.eval", "torch.nn.Linear"])
def test_a_class_that_was_not_offered_is_refused(opened: Draft, path: str) -> None:
    with pytest.raises(MlxError, match="not one of the"):
        opened.replace("optimizers.adam", path)
    assert not (opened.project / "evil").exists()


def test_references_and_texts_are_kept_as_typed(opened: Draft) -> None:
    draft = opened.set("datasets.val", "batch_size", "${datasets.train.batch_size}").set("cfg", "name", "1.10")
    draft = draft.set("cfg", "num_epochs", "3")
    for line in ("    batch_size: ${datasets.train.batch_size}\n", '  name: "1.10"\n', "  num_epochs: 3\n"):
        assert line in draft.text
    assert lines_of(draft) == []


def test_a_config_that_changed_meanwhile_is_not_overwritten(restored: Path) -> None:
    draft = open_config(restored).set("cfg", "num_epochs", "3")
    edit(restored / CONF, "num_epochs: 30", "num_epochs: 31")
    with pytest.raises(MlxError, match="has been changed"):
        composing.save(draft)
    assert "num_epochs: 31" in (restored / CONF).read_text()
    (restored / CONF).unlink()
    with pytest.raises(MlxError, match="has been changed"):
        composing.save(draft)
    with pytest.raises(MlxError, match="mlx train bind"):
        open_config(restored)


def test_a_draft_becomes_a_variant(mlx: Mlx, restored: Path) -> None:
    draft = stack(open_config(restored)).set("optimizers.adam", "lr", "0.01")
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


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("models.net._target_=src.more.Evil", "the overrides name 'src.more.Evil'"),
        ("'+cfg.callbacks.x={_target_: src.more.Evil}'", "the overrides name 'src.more.Evil'"),
        ("--resume", "only new runs start here"),
        ("--from run_001", "only new runs start here"),
        ("--detach", "there is no option --detach"),
        ("cfg.num_epochs=no", "takes int"),
        ("'cfg.num_epochs=1", "is not understood"),
    ],
)
def test_arguments_that_do_more_than_train_are_refused(project: Path, arguments: str, line: str) -> None:
    with pytest.raises(MlxError) as raised:
        composing.start(project, arguments)
    assert line in str(raised.value)
    assert not (project / "evil").exists()


def test_a_run_is_started_in_a_storage(
    restored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    for name, value in (environment | {"MLX_UI_TOKEN": "secret", "MLX_CACHE": str(tmp_path / "cache")}).items():
        monkeypatch.setenv(name, value)
    seen = "import os\nopen('seen', 'w').write(os.environ.get('MLX_UI_TOKEN', 'none'))\n"
    (restored / "main.py").write_text(seen + (restored / "main.py").read_text())
    run = composing.start(restored, "cfg.start_workers=0 cfg.num_epochs=1", str(tmp_path / "runs"))
    assert os.getsid(run.process.pid) != os.getsid(0)
    assert run.process.wait(120) == 0, run.state()
    assert "ended with exit code 0" in run.state()
    assert (restored / "seen").read_text() == "none"
    assert "status" in json.loads(next((tmp_path / "runs").rglob("run.json")).read_text())
