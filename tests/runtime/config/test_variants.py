"""Variants: named alternatives for nodes of conf.yaml, and partial configs."""

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from conftest import Mlx, edit
from omegaconf import OmegaConf
from torch import nn

from mlx_runtime import DUMMY_PARAMS, BaseModule, TrainConfig
from mlx_runtime.config.binding import origins
from mlx_runtime.config.binding.conf_file import bind
from mlx_runtime.config.binding.nodes import Description
from mlx_runtime.config.composition import Config, check, read
from mlx_runtime.config.constructors.signatures import settings_of
from mlx_runtime.driver.request import load_config
from mlx_runtime.errors import BindError, ConfigError, UsageError
from mlx_runtime.runs.snapshots import Upload

pytestmark = pytest.mark.pure

HERE = Path(__file__).stem
RELU = {"_target_": "torch.nn.modules.activation.ReLU", "inplace": False}


class Net(nn.Module):
    def __init__(self, width: int = 4):
        super().__init__()


class Deep(Net):
    def __init__(self, depth: int = 18, layer: nn.Module = nn.ReLU()):
        super().__init__()


class Needy(Net):
    def __init__(self, must: int):
        super().__init__()


class Other(nn.Module):
    def __init__(self) -> None:
        super().__init__()


class Untyped(Net):
    def __init__(self, parts, options, count=3):  # type: ignore[no-untyped-def]
        super().__init__()


@dataclass
class Models:
    net: Net = Net(width=8)
    spare: Net = Net()

    map_params_to_optimizers = {"net": "adam", "spare": "adam"}


@dataclass
class Optimizers:
    adam: torch.optim.Optimizer = torch.optim.Adam(DUMMY_PARAMS)


@dataclass
class Tools:
    name: str = "plain"


class Experiment(BaseModule):
    cfg: TrainConfig
    models: Models
    optimizers: Optimizers
    tools: Tools


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A conf.yaml with variants, all bound."""
    monkeypatch.delenv("MLX_STORAGE", raising=False)
    add(tmp_path, "models.net/deep", f"_target_: {HERE}.Deep  # of 2015\n")
    add(tmp_path, "models.net/small", f"_target_: {HERE}.Net\nwidth: 2\n")
    add(tmp_path, "optimizers.adam/sgd", "_target_: torch.optim.SGD\nlr: 0.1\n")
    add(tmp_path, "debug", "cfg:\n  num_epochs: 1\nmodels:\n  net: small\n  spare:\n    width: 3\n")
    bind(Experiment, tmp_path / "conf.yaml").write()
    return tmp_path / "conf.yaml"


def add(folder: Path, name: str, text: str) -> Path:
    file = folder / "variants" / f"{name}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def name_in(conf: Path, name: str) -> None:
    """Write the name of a variant in place of the node `models.net`."""
    edit(conf, f"  net:\n    _target_: {HERE}.Net\n    width: 8\n", f"  net: {name}  # mine\n")


def loaded(conf: Path, *overrides: str) -> Config:
    """Load as a run and as `show` do, which must agree."""
    looked = load_config(Experiment, overrides, conf, look=True)
    config = load_config(Experiment, overrides, conf)
    assert looked.tree == config.tree
    return config


def problems(conf: Path, *overrides: str) -> str:
    with pytest.raises((ConfigError, UsageError)) as caught:
        load_config(Experiment, overrides, conf)
    assert isinstance(caught.value, UsageError) == ("no variant" in str(caught.value))
    return str(caught.value).replace(f"{conf.parent}/", "")


class TestBinding:
    """`bind` does for variants what it does for conf.yaml."""

    def test_a_class_is_all_that_is_needed(self, conf: Path) -> None:
        text = (conf.parent / "variants" / "models.net" / "deep.yaml").read_text()
        assert text.startswith(f"_target_: {HERE}.Deep  # of 2015\n")
        assert OmegaConf.to_container(OmegaConf.create(text)) == {
            "_target_": f"{HERE}.Deep",
            "depth": 18,
            "layer": RELU,
        }

    def test_bound_again_nothing_changes(self, conf: Path) -> None:
        binding = bind(Experiment, conf)
        assert (binding.stale, binding.invalid, binding.diff()) == ([], [], "")

    def test_conf_yaml_keeps_the_name(self, conf: Path) -> None:
        name_in(conf, "deep")
        before = conf.read_text()
        binding = bind(Experiment, conf)
        assert (binding.stale, binding.after) == ([], before)
        assert "kept     models.net (your value; the code's default differs)" in binding.lines()

    def test_untouched_values_follow_the_code_and_edits_stay(self, conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        deep, small = (conf.parent / "variants" / "models.net" / f"{name}.yaml" for name in ("deep", "small"))
        monkeypatch.setattr(Deep.__init__, "__defaults__", (34, nn.ReLU()))
        monkeypatch.setattr(Net.__init__, "__defaults__", (5,))
        binding = bind(Experiment, conf)
        assert binding.stale == [conf, deep]  # conf.yaml shows the width of models.spare
        assert f"updated  models.net.depth (to the new default) in {deep}" in binding.lines()
        assert "-depth: 18\n+depth: 34\n" in binding.diff()
        binding.write()
        assert "depth: 34\n" in deep.read_text()
        assert "width: 2\n" in small.read_text()

    def test_what_is_no_argument_is_dropped_with_its_value(self, conf: Path) -> None:
        file = add(conf.parent, "models.net/deep", f"_target_: {HERE}.Deep\nwidth: 7  # wide\n")
        assert (
            f"dropped  models.net.width: 7  # wide (no longer an argument) in {file}" in bind(Experiment, conf).lines()
        )

    def test_what_has_no_type_or_signature_is_kept(self, conf: Path) -> None:
        text = f"_target_: {HERE}.Untyped\nparts: {{a: 1}}  # mine\noptions: ???\ncount: [2]\n"
        untyped = add(conf.parent, "models.net/untyped", text)
        new = add(conf.parent, "models.net/new", f"_target_: {HERE}.Untyped\n")
        plain = add(conf.parent, "tools.name/plain", "_target_: builtins.dict\nsize: 3\n")
        bind(Experiment, conf).write()
        assert (untyped.read_text(), plain.read_text()) == (text, "_target_: builtins.dict\nsize: 3\n")
        assert new.read_text() == f"_target_: {HERE}.Untyped\nparts: ???\noptions: ???\ncount: 3\n"

    def test_a_class_of_a_package_that_is_not_installed_is_kept(self, conf: Path) -> None:
        text = f"_target_: {HERE}.Deep\ndepth: 18\nlayer:\n  _target_: not_here.Gate\n  size: 7\n"
        file = add(conf.parent, "models.net/deep", text)
        with pytest.raises(BindError, match=r"_target_ is not_here\.Gate, which cannot be described"):
            bind(Experiment, conf)
        assert file.read_text() == text

    def test_a_partial_gets_no_argument_that_its_caller_gives(self, conf: Path) -> None:
        text = "_target_: torch.optim.lr_scheduler.OneCycleLR\n_partial_: true\nmax_lr: 0.1\n"
        file = add(conf.parent, "tools.name/cycle", text)
        bind(Experiment, conf).write()
        assert file.read_text() == text

    @pytest.mark.parametrize(
        ("name", "text", "message"),
        [
            (
                "models.net/deep",
                f"_target_: {HERE}.Deep\ndepth: far\n",
                f"models.net.depth is 'far'; {HERE}.Deep takes int",
            ),
            ("models.net/other", f"_target_: {HERE}.Other\n", f"models.net._target_ is {HERE}.Other, which is not a"),
            ("models.net/gone", f"_target_: {HERE}.Gone\n", f"models.net._target_ is '{HERE}.Gone', which cannot be"),
            ("models.net/lost", f"_target_: {HERE}.Deep\ndepth: ${{nope}}\n", "Interpolation key 'nope' not found"),
            ("debug", "cfg:\n  num_epoch: 1\n", "cfg.num_epoch: mlx_runtime.TrainConfig has no such argument. Did you"),
            (
                "debug",
                "models:\n  net: big\n",
                f"models.net is 'big'; {HERE}.Models takes Net, or one of the variants: deep",
            ),
        ],
    )
    def test_what_no_run_could_use_is_listed_with_its_file(
        self, conf: Path, name: str, text: str, message: str
    ) -> None:
        file = add(conf.parent, name, text)
        (line,) = bind(Experiment, conf).invalid
        assert line.startswith(f"{file}: {message}")

    def test_a_folder_for_no_key_is_listed(self, conf: Path) -> None:
        file = add(conf.parent, "models.nett/deep", f"_target_: {HERE}.Deep\n")
        line = f"{file.parent}: there is no key 'models.nett'. Did you mean 'models.net'?"
        assert bind(Experiment, conf).invalid == [line]
        add(conf.parent, "models.net.layer/gelu", "_target_: torch.nn.GELU\n")  # in the variant `deep`
        assert bind(Experiment, conf).invalid == [line]

    def test_what_is_still_open_is_not_wrong(self, conf: Path) -> None:
        add(conf.parent, "models.net/needy", f"_target_: {HERE}.Needy\n")
        binding = bind(Experiment, conf)
        assert binding.invalid == []
        binding.write()
        text = f"conf.yaml: models.net.must: ??? must be given a value; {HERE}.Needy has no default for it"
        assert problems(conf, "models.net=needy") == f"{text} (in variants/models.net/needy.yaml)"
        assert loaded(conf, "models.net=needy", "models.net.must=3").tree["models"]["net"]["must"] == 3

    def test_a_damaged_file_is_refused_and_kept(self, conf: Path) -> None:
        file = add(conf.parent, "models.net/deep", "_target_: [\n")
        with pytest.raises(BindError, match=r"deep.yaml is not valid YAML"):
            bind(Experiment, conf)
        assert file.read_text() == "_target_: [\n"
        assert problems(conf, "models.net=deep").startswith("variants/models.net/deep.yaml is not valid YAML: ")


class TestPatches:
    """A variant without `_target_` changes the arguments that it lists."""

    def test_it_changes_the_node_of_conf_yaml(self, conf: Path) -> None:
        file = add(conf.parent, "models.net/wide", "width: 64\n")
        add(conf.parent, "models/both", "net: wide\nspare: {width: 5}\n")
        assert bind(Experiment, conf).stale == []
        edit(conf, "    width: 8\n", "    width: 9\n")
        net = {"_target_": f"{HERE}.Net", "width": 64}
        assert loaded(conf, "models.net=wide").tree["models"]["net"] == net
        assert loaded(conf, "models.net.width=7", "models.net=wide").tree["models"]["net"] == net | {"width": 7}
        both = loaded(conf, "models=both").tree["models"]
        assert both == {"_target_": f"{HERE}.Models", "net": net, "spare": net | {"width": 5}}
        text = origins.dump(conf, Description(Experiment).tree, ["models.net=wide"], "models.net", as_json=False)
        assert f"width: 64 # {file} (default: 8)" in " ".join(text.split())

    def test_it_changes_a_variant_that_conf_yaml_names(self, conf: Path) -> None:
        add(conf.parent, "models.net/thick", "depth: 50\nlayer: {inplace: true}\n")
        name_in(conf, "deep")
        assert bind(Experiment, conf).invalid == []
        net = {"_target_": f"{HERE}.Deep", "depth": 50, "layer": RELU | {"inplace": True}}
        assert loaded(conf, "models.net=thick").tree["models"]["net"] == net

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("widht: 64\n", f"models.net.widht: {HERE}.Net has no such argument. Did you mean 'width'?"),
            ("width: far\n", f"models.net.width is 'far'; {HERE}.Net takes int"),
        ],
    )
    def test_what_its_node_does_not_take_is_invalid(self, conf: Path, text: str, message: str) -> None:
        file = add(conf.parent, "models.net/wide", text)
        binding = bind(Experiment, conf)
        assert binding.invalid == [f"{file}: {message}"]
        with pytest.raises(BindError, match="models.net.wid"):
            binding.write()
        assert file.read_text() == text
        assert problems(conf, "models.net=wide") == f"conf.yaml: {message} (in variants/models.net/wide.yaml)"

    def test_there_must_be_a_node(self, conf: Path) -> None:
        add(conf.parent, "models.net/wide", "width: 64\n")
        name_in(conf, "wide")
        why = "has no _target_, so it can only change a node, and models.net is 'wide'; choose it by models.net=wide"
        assert why in problems(conf)
        with pytest.raises(ConfigError, match="models.net is 'wide'"):
            bind(Experiment, conf)


class TestChoosing:
    DEEP = {"_target_": f"{HERE}.Deep", "depth": 18, "layer": RELU}

    def test_it_replaces_the_node(self, conf: Path) -> None:
        assert loaded(conf, "models.net=deep").tree["models"]["net"] == self.DEEP
        assert loaded(conf).tree["models"]["net"] == {"_target_": f"{HERE}.Net", "width": 8}

    @pytest.mark.parametrize("below", ["models.net.depth=50", "++models.net.depth=50"])
    def test_overrides_below_it_apply_after_the_choice(self, conf: Path, below: str) -> None:
        changed = self.DEEP | {"depth": 50}
        assert loaded(conf, below, "models.net=deep").tree["models"]["net"] == changed
        assert loaded(conf, "models.net=deep", below).tree["models"]["net"] == changed
        assert loaded(conf, below, "models.net=small", "models.net='deep'").tree["models"]["net"] == changed

    def test_conf_yaml_may_name_it(self, conf: Path) -> None:
        name_in(conf, "deep")
        assert loaded(conf, "models.net.depth=50").tree["models"]["net"] == self.DEEP | {"depth": 50}
        assert loaded(conf, "models.net=small").tree["models"]["net"] == {"_target_": f"{HERE}.Net", "width": 2}

    def test_a_variant_may_name_another(self, conf: Path) -> None:
        add(conf.parent, "models/both", f"_target_: {HERE}.Models\nnet: deep\n")
        bind(Experiment, conf).write()
        both = loaded(conf, "models=both").tree["models"]
        assert both == {
            "_target_": f"{HERE}.Models",
            "net": self.DEEP,
            "spare": {"_target_": f"{HERE}.Net", "width": 4},
        }
        small = loaded(conf, "models.net=small", "models=both").tree["models"]
        assert small["net"] == {"_target_": f"{HERE}.Net", "width": 2}

    def test_interpolations_see_the_whole_config(self, conf: Path) -> None:
        add(conf.parent, "models.net/small", f"_target_: {HERE}.Net\nwidth: ${{cfg.num_epochs}}\n")
        assert loaded(conf, "models.net=small", "cfg.num_epochs=6").tree["models"]["net"]["width"] == 6

    def test_any_other_string_is_a_string(self, conf: Path) -> None:
        add(conf.parent, "tools.name/long", "_target_: builtins.str\n")
        assert loaded(conf, "tools.name=deep", "cfg.name=deep").tree["tools"]["name"] == "deep"

    def test_below_a_value_there_is_nothing_to_choose(self, conf: Path) -> None:
        add(conf.parent, "tools.name.part/long", "_target_: builtins.str\n")
        assert problems(conf, "tools.name.part=long").startswith("override tools.name.part=long: ")

    def test_the_run_keeps_the_node(self, conf: Path, tmp_path: Path) -> None:
        """Strings in the conf.yaml of a run are no names, while overrides choose from the project."""
        config = loaded(conf, "models.net=deep", "tools.name=long")
        run = tmp_path / "runs" / "conf.yaml"
        run.parent.mkdir()
        run.write_text(config.yaml())
        assert OmegaConf.create(config.yaml()).models.net == self.DEEP
        add(conf.parent, "tools.name/long", "_target_: builtins.str\n")
        again = check(Experiment, read(run, [], settings_of(Experiment), project=conf))
        assert (again.tree["models"]["net"], again.tree["tools"]["name"]) == (self.DEEP, "long")
        changed = check(Experiment, read(run, ["models.net=small"], settings_of(Experiment), project=conf))
        assert changed.tree["models"]["net"] == {"_target_": f"{HERE}.Net", "width": 2}

    def test_a_cluster_gets_them(self, conf: Path) -> None:
        files = [str(path) for path, _ in Upload.of(conf.parent).files]
        assert "variants/models.net/deep.yaml" in files


class TestPartialConfigs:
    def test_values_and_names_apply(self, conf: Path) -> None:
        tree = loaded(conf, "--variant=debug").tree
        assert tree["cfg"]["num_epochs"] == 1
        assert tree["models"]["net"] == {"_target_": f"{HERE}.Net", "width": 2}
        assert tree["models"]["spare"] == {"_target_": f"{HERE}.Net", "width": 3}

    def test_a_new_class_is_a_new_node(self, conf: Path) -> None:
        add(conf.parent, "debug", f"models: {{net: {{_target_: {HERE}.Deep}}}}\n")
        assert loaded(conf, "--variant=debug").tree["models"]["net"] == {"_target_": f"{HERE}.Deep"}

    def test_the_command_line_wins_over_it_and_it_over_conf_yaml(
        self, conf: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        add(conf.parent, "other", "cfg:\n  num_epochs: 2\n  storage_path: there\n")
        tree = loaded(conf, "cfg.num_epochs=7", "models.net=deep", "--variant=debug", "--variant=other").tree
        assert (tree["cfg"]["num_epochs"], tree["models"]["net"]["depth"]) == (7, 18)
        assert loaded(conf, "--variant=debug", "--variant=other").cfg.num_epochs == 2
        assert loaded(conf, "--variant=other", "--variant=debug").cfg.num_epochs == 1
        monkeypatch.setenv("MLX_STORAGE", "/mnt/here")
        assert loaded(conf, "--variant=other").cfg.storage_path == "/mnt/here"

    def test_it_does_not_configure_hydra(self, conf: Path) -> None:
        add(conf.parent, "debug", "hydra: {searchpath: ['pkg://trap']}\n")
        assert "hydra: there is no such group" in problems(conf, "--variant=debug")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["models.net=dep"],
            f"override models.net=dep: models.net is 'dep'; {HERE}.Models takes Net, or one of the variants: "
            "deep, small",
        ),
        (
            ["models.net.width=3", "models.net=dep"],
            f"override models.net=dep: models.net is 'dep'; {HERE}.Models takes Net, or one of the variants: "
            "deep, small",
        ),
        (["models.spare=deep"], f"override models.spare=deep: models.spare is 'deep'; {HERE}.Models takes Net"),
        (["--variant=debu"], "there is no variant 'debu' in variants. Did you mean 'debug'?"),
        (["--variant=../conf"], "there is no variant '../conf' in variants. Available: debug."),
        (["models.net=../../conf"], "override models.net=../../conf: models.net is '../../conf'; "),
        (
            ["models.net=deep", "models.net.dept=3"],
            "override models.net.dept=3: there is no key 'models.net.dept' in conf.yaml. Did you mean",
        ),
        (
            ["models.net=deep", "models.net.depth=far"],
            f"override models.net.depth=far: models.net.depth is 'far'; {HERE}.Deep takes int",
        ),
    ],
)
def test_unknown_names_and_wrong_values(conf: Path, overrides: list[str], message: str) -> None:
    assert problems(conf, *overrides).replace(str(conf.parent / "variants"), "variants").startswith(message)


def test_problems_name_the_file_they_are_in(conf: Path) -> None:
    add(conf.parent, "models.net/deep", f"_target_: {HERE}.Deep\ndepth: far\n")
    message = f"models.net.depth is 'far'; {HERE}.Deep takes int (in variants/models.net/deep.yaml)"
    assert problems(conf, "models.net=deep") == f"conf.yaml: {message}"
    lines = [
        "conf.yaml has 2 problems:",
        "override cfg.seed=x: cfg.seed is 'x'; mlx_runtime.TrainConfig takes int",
        message,
    ]
    assert problems(conf, "models.net=deep", "cfg.seed=x") == "\n  ".join(lines)
    add(conf.parent, "debug", "cfg:\n  use_gpu: yes\n")
    message = 'conf.yaml: line 2: use_gpu: yes could be a word or a boolean; write "yes", true or false'
    assert problems(conf, "--variant=debug") == f"{message} (in variants/debug.yaml)"
    add(conf.parent, "debug", "cfg:\n  num_epochs: -1\n")
    message = "conf.yaml and variants/debug.yaml: cfg.num_epochs is -1; the minimum is 0"
    assert problems(conf, "--variant=debug") == message


class TestOrigins:
    def changed(self, conf: Path, *overrides: str) -> dict[str, Any]:
        text = origins.dump(conf, Description(Experiment).tree, overrides, None, as_json=True)
        return {
            name: entry["from"].replace(f"{conf.parent}/", "") for name, entry in json.loads(text)["changed"].items()
        }

    def test_each_value_names_its_variant(self, conf: Path) -> None:
        deep, small = ("variants/models.net/deep.yaml", "variants/models.net/small.yaml")
        changed = self.changed(conf, "models.net=deep", "models.net.depth=50", "cfg.seed=3")
        assert changed == {
            "models.net._target_": deep,
            "models.net.depth": "override",
            "models.net.layer._target_": deep,
            "models.net.layer.inplace": deep,
            "cfg.seed": "override",
        }
        name_in(conf, "deep")
        edit(conf, "  trackers:", "  seed: 4\n  trackers:")
        assert self.changed(conf, "--variant=debug") == {
            "cfg.num_epochs": "variants/debug.yaml",
            "cfg.seed": "file",
            "models.net._target_": small,
            "models.net.width": small,
            "models.spare.width": "variants/debug.yaml",
        }

    def test_a_value_comes_from_what_was_chosen_last_and_closest(self, conf: Path) -> None:
        text = f"_target_: {HERE}.Models\nnet: small\nspare: {{_target_: {HERE}.Net, width: 9}}\n"
        both = add(conf.parent, "models/both", text).relative_to(conf.parent)
        changed = self.changed(conf, "--variant=debug", "models=both")
        assert changed == {
            "cfg.num_epochs": "variants/debug.yaml",
            **dict.fromkeys(("models._target_", "models.spare._target_", "models.spare.width"), str(both)),
            **dict.fromkeys(("models.net._target_", "models.net.width"), "variants/models.net/small.yaml"),
        }

    def test_a_key_that_begins_like_another_has_its_own_source(self, conf: Path) -> None:
        add(conf.parent, "debug", "cfg:\n  cross_validation: {fold: 1}\n")
        edit(conf, "  trackers:", "  cross_validation: {folds: 3}\n  trackers:")
        assert self.changed(conf, "--variant=debug") == {
            "cfg.cross_validation.fold": "variants/debug.yaml",
            "cfg.cross_validation.folds": "file",
        }

    def test_as_comments(self, conf: Path) -> None:
        text = origins.dump(conf, Description(Experiment).tree, ["models.net=small"], "models.net", as_json=False)
        small = conf.parent / "variants" / "models.net" / "small.yaml"
        assert text.splitlines()[0] == f'_target_: {HERE}.Net  # {small} (default: "{HERE}.Net")'
        assert text.splitlines()[1].split() == ["width:", "2", "#", str(small), "(default:", "8)"]
        text = origins.dump(conf, Description(Experiment).tree, ["models.net=deep"], "models.net", as_json=False)
        assert text.splitlines()[1].split() == ["depth:", "18", "#", str(small.with_name("deep.yaml"))]


@pytest.mark.parametrize(
    ("key", "value", "valid"),
    [
        ("models.net", "deep", True),
        ("models.net", "dep", False),
        ("models.spare", "deep", False),
        ("models.net.width", "wide", False),
        ("optimizers.adam", "sgd", True),
        ("cfg.monitor", "loss", True),
    ],
)
def test_the_schema_completes_names(conf: Path, key: str, value: object, valid: bool) -> None:
    add(conf.parent, "cfg.monitor/loss", "_target_: builtins.str\n")
    bind(Experiment, conf).write()
    schema = json.loads(conf.with_name("conf.schema.json").read_text())
    jsonschema.Draft7Validator.check_schema(schema)
    edited: Any = copy.deepcopy(OmegaConf.to_container(OmegaConf.load(conf)))
    assert jsonschema.Draft7Validator(schema).is_valid(edited)
    *parents, last = key.split(".")
    node = edited
    for part in parents:
        node = node[part]
    node[last] = value
    assert jsonschema.Draft7Validator(schema).is_valid(edited) is valid
    net = schema["properties"]["models"]["then"]["properties"]["net"]
    assert {"enum": ["deep", "small"]} in net["anyOf"]


@pytest.mark.process
def test_the_commands(digits: Path, mlx: Mlx) -> None:
    file = add(digits / "src", "optimizers.adam/sgd", "_target_: torch.optim.SGD\nlr: 0.1\n")
    add(digits / "src", "debug", "cfg:\n  num_epochs: 1\n")
    done = mlx(digits, "train", "bind", "--check")
    stale = "error: src/variants/optimizers.adam/sgd.yaml is not up to date; run: mlx train bind\n  added    "
    assert (done.returncode, done.stderr[: len(stale)]) == (1, stale)
    lines = mlx(digits, "train", "bind").stdout.splitlines()
    assert lines[:2] == ["unchanged src/conf.yaml", "updated src/variants/optimizers.adam/sgd.yaml"]
    assert mlx(digits, "train", "bind", "--check").returncode == 0
    done = mlx(digits, "train", "show", "cfg", "--variant", "debug")
    assert "  # src/variants/debug.yaml (default: 30)\n" in done.stdout, done.stderr
    assert "# variants:" not in done.stdout  # of cfg
    assert mlx(digits, "train", "show").stdout.endswith("\n# variants: --variant debug, optimizers.adam=sgd\n")
    found = json.loads(mlx(digits, "train", "show", "optimizers", "--json").stdout)["variants"]
    assert found == {"optimizers.adam": ["sgd"]}
    edit(file, "lr: 0.1", "lr: fast")
    wrong = "optimizers.adam.lr is 'fast'; torch.optim.SGD takes "
    for command in (
        "bind",
        "bind --check",
        "show optimizers.adam=sgd",
        "run optimizers.adam=sgd",
        "prepare optimizers.adam=sgd",
    ):
        done = mlx(digits, "train", *command.split())
        assert (done.returncode, wrong in done.stderr, file.name in done.stderr) == (1, True, True), command
    assert not (digits / "runs").exists()
    for command in ("run", "show", "eval", "launch", "prepare"):
        shown = mlx(digits, "train", command, "--help").stdout
        assert "--variant NAME" in shown
        names = "Variants: --variant debug, optimizers.adam=sgd"
        assert (names in shown) == (command in ("run", "show"))


@pytest.mark.local
def test_a_run_outlives_its_variants(digits: Path, mlx: Mlx) -> None:
    """Its own conf.yaml holds the node, and `run.json` what was typed."""
    add(digits / "src", "models.net/light", "_target_: src.models.DigitsNet\ndropout: 0.5\n")
    add(digits / "src", "debug", "cfg:\n  start_workers: 0\n  num_epochs: 1\n  debug:\n    limit_batches: 2\n")
    assert mlx(digits, "train", "bind").returncode == 0
    done = mlx(digits, "train", "run", "models.net=light", "--variant", "debug")
    assert done.returncode == 0, done.stderr
    run = digits / "runs" / "digits" / "run_001"
    assert OmegaConf.load(run / "conf.yaml").models.net.dropout == 0.5
    assert json.loads((run / "run.json").read_text())["overrides"] == ["models.net=light", "--variant=debug"]
    for file in (digits / "src" / "variants").rglob("*.yaml"):
        file.unlink()
    done = mlx(digits, "train", "run", "--resume", "cfg.num_epochs=2")
    assert done.returncode == 0, done.stderr
    assert OmegaConf.load(run / "conf.yaml").models.net.dropout == 0.5
    done = mlx(digits, "train", "eval")
    assert done.returncode == 0, done.stderr
