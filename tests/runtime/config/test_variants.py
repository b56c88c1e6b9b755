"""Variants: files with values for any keys, which `--variant` merges into conf.yaml; and the source of each value."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Mlx
from omegaconf import OmegaConf
from torch import nn

from mlx_runtime import DUMMY_PARAMS, BaseModule, TrainConfig
from mlx_runtime.config.binding.conf_file import bind
from mlx_runtime.config.composition import Config, read
from mlx_runtime.config.constructors.signatures import settings_of
from mlx_runtime.driver.request import load_config
from mlx_runtime.errors import ConfigError, UsageError

pytestmark = pytest.mark.pure

HERE = Path(__file__).stem


class Net(nn.Module):
    def __init__(self, width: int = 4):
        super().__init__()


class Deep(Net):
    def __init__(self, depth: int = 18, layer: nn.Module = nn.ReLU()):
        super().__init__()


@dataclass
class Models:
    net: Net = Net(width=8)
    spare: Net = Net()

    map_params_to_optimizers = {"net": "adam", "spare": "adam"}


@dataclass
class Optimizers:
    adam: torch.optim.Optimizer = torch.optim.Adam(DUMMY_PARAMS)


class Experiment(BaseModule):
    cfg: TrainConfig
    models: Models
    optimizers: Optimizers


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A conf.yaml with two variants."""
    monkeypatch.delenv("MLX_STORAGE", raising=False)
    add(tmp_path, "debug", "cfg:\n  num_epochs: 1\nmodels:\n  spare:\n    width: 3\n")
    add(tmp_path, "deep", f"models: {{net: {{_target_: {HERE}.Deep}}}}\n")
    bind(Experiment, tmp_path / "conf.yaml").write()
    return tmp_path / "conf.yaml"


def add(folder: Path, name: str, text: str) -> Path:
    file = folder / "variants" / f"{name}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def loaded(conf: Path, *overrides: str) -> Config:
    return load_config(Experiment, overrides, conf)


def problems(conf: Path, *overrides: str) -> str:
    with pytest.raises((ConfigError, UsageError)) as caught:
        load_config(Experiment, overrides, conf)
    assert isinstance(caught.value, UsageError) == ("no variant" in str(caught.value))
    return str(caught.value).replace(f"{conf.parent}/", "")


def test_values_change_and_nodes_with_a_class_are_replaced(conf: Path) -> None:
    tree = loaded(conf, "--variant=debug", "--variant=deep", "models.net.depth=50").tree
    assert tree["cfg"]["num_epochs"] == 1
    assert tree["models"]["net"] == {"_target_": f"{HERE}.Deep", "depth": 50}
    assert tree["models"]["spare"] == {"_target_": f"{HERE}.Net", "width": 3}
    assert loaded(conf).tree["models"]["net"] == {"_target_": f"{HERE}.Net", "width": 8}


def test_the_command_line_wins_over_it_and_it_over_conf_yaml(conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add(conf.parent, "other", "cfg:\n  num_epochs: 2\n  storage_path: there\n")
    assert loaded(conf, "cfg.num_epochs=7", "--variant=debug", "--variant=other").cfg.num_epochs == 7
    assert loaded(conf, "--variant=debug", "--variant=other").cfg.num_epochs == 2
    assert loaded(conf, "--variant=other", "--variant=debug").cfg.num_epochs == 1
    monkeypatch.setenv("MLX_STORAGE", "/mnt/here")
    assert loaded(conf, "--variant=other").cfg.storage_path == "/mnt/here"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models: {net: {width: far}}\n", f"conf.yaml: models.net.width is 'far'; {HERE}.Net takes int (in "),
        (
            "cfg: {num_epoch: 1}\n",
            "conf.yaml: cfg.num_epoch: mlx_runtime.TrainConfig has no such argument. Did you mean 'num_epochs'? (in ",
        ),
        ("cfg: [\n", "variants/wrong.yaml is not valid YAML: "),
    ],
)
def test_problems_name_the_file_they_are_in(conf: Path, text: str, message: str) -> None:
    add(conf.parent, "wrong", text)
    found = problems(conf, "--variant=wrong")
    assert found.startswith(message)
    assert not message.endswith("(in ") or found.endswith("(in variants/wrong.yaml)")


@pytest.mark.parametrize(("name", "cure"), [("debu", "Did you mean 'debug'?"), ("../conf", "Available: debug, deep.")])
def test_an_unknown_name_is_refused(conf: Path, name: str, cure: str) -> None:
    text = problems(conf, f"--variant={name}").replace(str(conf.parent / "variants"), "variants")
    assert text == f"there is no variant {name!r} in variants. {cure}"


def test_each_value_has_a_source(conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_STORAGE", "/mnt/here")
    same = f"models.spare._target_={HERE}.Net"
    typed = ["--variant=debug", "--variant=deep", "cfg.seed=3", "models.net.depth=50", same]
    composed = read(conf, typed, settings_of(Experiment))
    debug, deep = (str(conf.parent / "variants" / f"{name}.yaml") for name in ("debug", "deep"))
    sources = {
        "cfg.num_epochs": debug,
        "cfg.name": str(conf),
        "cfg.seed": "cfg.seed=3",
        "cfg.storage_path": "MLX_STORAGE",
        "cfg.elastic.max_failures": "default",
        "models.net._target_": deep,
        "models.net.depth": "models.net.depth=50",
        "models.spare._target_": same,
        "models.spare.width": debug,
    }
    assert {key: composed.source(key) for key in sources} == sources
    typed.append("cfg.storage_path=there")
    assert read(conf, typed, settings_of(Experiment)).source("cfg.storage_path") == "cfg.storage_path=there"


@pytest.mark.process
def test_the_commands(digits: Path, mlx: Mlx) -> None:
    file = add(digits / "src", "sgd", "optimizers: {adam: {_target_: torch.optim.SGD, lr: 0.1}}\n")
    shown = mlx(digits, "train", "show", "optimizers", "cfg.num_epochs=2", "--variant", "sgd")
    lines = [tuple(map(str.strip, line.split("  # "))) for line in shown.stdout.splitlines()]
    assert ("optimizers.adam.lr: 0.1", "src/variants/sgd.yaml") in lines, shown.stderr
    assert ('optimizers._target_: "src.experiment.Optimizers"', "src/conf.yaml") in lines
    found: dict[str, Any] = json.loads(mlx(digits, "train", "show", "--json", "cfg.num_epochs=2").stdout)
    assert (found["config"]["cfg"]["num_epochs"], found["sources"]["cfg.num_epochs"]) == (2, "cfg.num_epochs=2")
    assert mlx(digits, "train", "bind", "--check").returncode == 0
    file.write_text(file.read_text().replace("0.1", "fast"))
    wrong = "optimizers.adam.lr is 'fast'; torch.optim.SGD takes "
    for command in ("show", "run"):
        done = mlx(digits, "train", command, "--variant=sgd")
        assert (done.returncode, wrong in done.stderr, file.name in done.stderr) == (1, True, True), command
    assert not (digits / "runs").exists()


@pytest.mark.local
def test_a_run_outlives_its_variants(digits: Path, mlx: Mlx) -> None:
    """Its own conf.yaml holds the values, and `run.json` what was typed."""
    small = "  start_workers: 0\n  num_epochs: 1\n  debug:\n    limit_batches: 2\n"
    file = add(digits / "src", "debug", f"cfg:\n{small}models: {{net: {{dropout: 0.5}}}}\n")
    done = mlx(digits, "train", "run", "--variant", "debug")
    assert done.returncode == 0, done.stderr
    run = digits / "runs" / "digits" / "run_001"
    assert json.loads((run / "run.json").read_text())["overrides"] == ["--variant=debug"]
    file.unlink()
    done = mlx(digits, "train", "run", "--resume", "cfg.num_epochs=2")
    assert done.returncode == 0, done.stderr
    assert OmegaConf.load(run / "conf.yaml").models.net.dropout == 0.5
