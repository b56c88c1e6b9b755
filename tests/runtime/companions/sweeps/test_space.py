"""Parsing overrides in Hydra's sweep grammar into a search space; others are rejected with one line."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import nn

from mlx_runtime import DUMMY_PARAMS, BaseModule, TrainConfig
from mlx_runtime.companions.sweeps.definition import Definition, plan
from mlx_runtime.companions.sweeps.space import Dimension, check, parse, trial_count
from mlx_runtime.config.binding.conf_file import bind
from mlx_runtime.driver.request import load_config
from mlx_runtime.errors import ConfigError, MlxError, UsageError

pytestmark = pytest.mark.pure


class Net(nn.Module):
    def __init__(
        self, width: int = 4, kind: Literal["a", "b"] = "a", sizes: tuple[int, ...] = (1,), name: str | None = ""
    ):
        super().__init__()


@dataclass
class Models:
    net: Net = Net()


@dataclass
class Optimizers:
    adam: torch.optim.Adam = torch.optim.Adam(DUMMY_PARAMS)


class Experiment(BaseModule):
    cfg: TrainConfig
    models: Models
    optimizers: Optimizers


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("MLX_STORAGE", raising=False)
    bind(Experiment, tmp_path / "conf.yaml").write()
    return tmp_path / "conf.yaml"


LOG = "tag(log, interval(1e-5, 1e-1))"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("1e-3,1e-4", {"choices": ("0.001", "0.0001")}),
        ("choice(a,'b c')", {"choices": ("a", "b\\ c")}),
        ("range(0,1,0.25)", {"choices": ("0.0", "0.25", "0.5", "0.75")}),
        (LOG, {"low": 1e-5, "high": 1e-1, "log": True}),
        ("tag(log,int(interval(1,8)))", {"low": 1, "high": 8, "integer": True, "log": True}),
    ],
)
def test_what_hydra_sweeps_over(value: str, expected: dict[str, object]) -> None:
    space = parse([f"a.b={value}"])
    assert space.dimensions == (Dimension("a.b", f"a.b={value}", **expected),)
    assert space.size == (len(expected["choices"]) if "choices" in expected else None)


def test_other_overrides_and_options_apply_to_every_trial() -> None:
    typed = ["--from=run_003", "cfg.num_epochs=3", "+a.b=1,2", "cfg.secrets=[A,B]", "cfg.name='a,b'", "~c"]
    space = parse(typed)
    assert space.fixed == ("--from=run_003", "cfg.num_epochs=3", "cfg.secrets=[A,B]", "cfg.name='a,b'", "~c")
    assert space.expand({"+a.b": "2"}) == (*typed[:2], "+a.b=2", *typed[3:])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["a=interval(3,1)"], "a=interval(3,1): an interval begins below its end, a logarithmic"),
        (["a=range(0,1000000000000)"], "a=range(0,1000000000000): an override lists 1 to 100,000 values"),
        (["cfg.name=x,y"], "cfg.name=x,y: cfg.name is the same for all runs of a sweep"),
        (["a=1,2", "b=1", "a=3"], "a is given 2 times; give all its values in one override"),
        (["a=rang(1,2)"], "the override 'a=rang(1,2)' is not understood: Unknown function 'rang'"),
    ],
)
def test_what_cannot_be_searched_is_refused_in_one_line(overrides: list[str], message: str) -> None:
    with pytest.raises(MlxError) as error:
        parse(overrides)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_a_search_ends_and_a_large_grid_is_confirmed() -> None:
    grid, large, interval = parse(["a=1,2", "b=1,2"]), parse(["a=range(0,1001)"]), parse(["a=interval(0,1)"])
    assert [trial_count(grid, "grid", None), trial_count(grid, "random", 3), trial_count(grid, "grid", 9)] == [4, 3, 4]
    assert trial_count(interval, "optuna", 2000) == 2000
    assert [trial_count(large, "grid", 1000), trial_count(large, "grid", None, large=True)] == [1000, 1001]
    with pytest.raises(UsageError, match=r"^these are 1,001 trials; run fewer with --trials 100, or .* --yes$"):
        trial_count(large, "grid", None)
    with pytest.raises(UsageError, match=r"^a=interval\(0,1\) is an interval; pass the number .*--trials 20$"):
        trial_count(interval, "random", None)
    with pytest.raises(UsageError, match=r"^--search grid needs lists of values; a=interval\(0,1\) is an interval$"):
        trial_count(interval, "grid", 3)


def test_every_value_that_does_not_fit_is_reported(conf: Path) -> None:
    overrides = [
        "models.net.width=1,2.5,x",
        "models.net.kind=a,c",
        "optimizers.adam.lr=fast",
        "cfg.seed=interval(-1,0)",
    ]
    with pytest.raises(ConfigError) as error:
        check(parse([*overrides, "models.net.widht=1,2"]), Experiment, conf)
    lines = str(error.value).splitlines()
    assert lines[0] == f"the overrides have {len(lines) - 1} problems:"
    for start in (
        "override models.net.width=1,2.5,x: models.net.width is 2.5; ",
        "override models.net.width=1,2.5,x: models.net.width is 'x'; ",
        "override models.net.kind=a,c: models.net.kind is 'c'; ",
        "override optimizers.adam.lr=fast: optimizers.adam.lr is 'fast'; ",
        "override cfg.seed=interval(-1,0): cfg.seed is -1.0; ",
        f"override models.net.widht=1,2: there is no key 'models.net.widht' in {conf}. Did you mean 'models.net.",
    ):
        assert sum(line.startswith(f"  {start}") for line in lines) == 1, start


@pytest.fixture
def project(conf: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: a project with a conf.yaml. Returns the file."""
    file = conf.parent / "project" / "src" / "conf.yaml"
    file.parent.mkdir(parents=True)
    conf.rename(file)
    monkeypatch.chdir(file.parents[1])
    return file


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (Definition(("cfg.start_workers=1,2",)), "cfg.start_workers is the same for all runs of a sweep"),
        (Definition(("cfg.num_epochs=1,2",), scheduler="asha"), "leave out cfg.num_epochs"),
    ],
)
def test_what_must_not_differ_between_trials(project: Path, asked: Definition, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan(Experiment, replace(asked, metric="val/loss", mode="min"))


def test_values_of_all_kinds_arrive_as_typed(conf: Path) -> None:
    space = parse(["models.net.sizes=[1,2],[3]", "models.net.name='a=b, c',null,x", "optimizers.adam.lr=1e-3,0.5"])
    check(space, Experiment, conf)
    found = []
    for values in space.grid():
        tree = load_config(Experiment, space.expand(values), conf).tree
        found.append((tree["models"]["net"]["sizes"], tree["models"]["net"]["name"], tree["optimizers"]["adam"]["lr"]))
    assert found[0] == ([1, 2], "a=b, c", 0.001)
    assert found[-1] == ([3], "x", 0.5)
    assert len(found) == 12
