"""A search proposes values of its space, and a scheduler ends trials early."""

import math
from collections.abc import Iterator
from typing import Any

import pytest

from mlx_runtime.companions.sweeps.space import Space, Values, parse
from mlx_runtime.companions.sweeps.study import Study

pytestmark = pytest.mark.pure

MIXED = ["lr=tag(log,interval(1e-5,1e-1))", "n=int(interval(1,8))", "m=interval(-1,1)", "c=a,'b c'", "r=range(0,9,2)"]
EPOCHS = 9


DEFAULTS = {"search": "optuna", "scheduler": "none", "mode": "min", "seed": 0, "epochs": EPOCHS}


def study(overrides: list[str], **settings: Any) -> Study:
    return Study(parse(overrides), **DEFAULTS | settings)


def asked(found: Study, count: int) -> Iterator[Values | None]:
    return (found.ask(number) for number in range(1, count + 1))


def inside(space: Space, values: Values) -> bool:
    """Return True for values of a space."""
    return [*values] == [item.key for item in space.dimensions] and all(
        values[item.key] in item.choices if item.choices else item.low <= float(values[item.key]) <= item.high
        for item in space.dimensions
    )


def loss(values: Values) -> float:
    return abs(math.log10(float(values["lr"])) + 3) + abs(int(values["n"]) - 4)


@pytest.mark.parametrize("search", ["random", "optuna"])
def test_values_lie_in_the_space(search: str) -> None:
    found, space = study(MIXED, search=search), parse(MIXED)
    for number in range(1, 26):
        values = found.ask(number)
        assert inside(space, values)
        found.tell(number, "SUCCEEDED", loss(values))


@pytest.mark.parametrize("search", ["grid", "random", "optuna"])
def test_a_finite_space_is_searched_once(search: str) -> None:
    overrides = ["a=1,2,3", "b=x,y,z,w"]
    found = study(overrides, search=search)
    points = []
    for number, values in enumerate(asked(found, 12), start=1):
        points.append(values)
        found.tell(number, "SUCCEEDED", float(values["a"]))
    grid = [*parse(overrides).grid()]
    assert sorted(points, key=grid.index) == grid
    assert (points == grid) == (search == "grid")
    assert found.ask(13) is None


def test_a_trial_that_repeats_an_epoch_after_a_resume_gets_the_same_decision() -> None:
    found = study(["a=1,2"], search="grid", scheduler="asha")
    for number in (1, 2):
        found.ask(number)
    assert [found.report(1, epoch, 1.0) for epoch in (0, 1)] == [False, False]
    assert [found.report(2, 0, 2.0), found.report(2, 0, 2.0)] == [True, True]
    assert [found.report(1, epoch, 9.0) for epoch in (0, 1, 2)] == [False, False, False]


def test_infinity_is_pruned_and_competes_with_no_other() -> None:
    found = study(["a=1,2"], search="grid", scheduler="asha", mode="max")
    for number in (1, 2):
        found.ask(number)
    assert [found.report(1, 0, math.inf), found.report(2, 0, 0.5)] == [True, False]


def test_trials_without_a_value_can_be_told() -> None:
    found = study(MIXED, scheduler="asha")
    for number, _ in enumerate(asked(found, 12), start=1):
        found.report(number, 0, math.nan)
        found.tell(number, "FAILED", math.nan)
    assert inside(parse(MIXED), found.ask(13) or {})
