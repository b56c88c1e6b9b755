"""The table of epochs fits its terminal and does not repeat itself."""

import itertools
from dataclasses import replace
from typing import Any

import pytest

from mlx_runtime.events import EpochEnded
from mlx_runtime.tracking.console import EpochTable

pytestmark = pytest.mark.pure

METRICS = ("cross_entropy", "accuracy", "f1", "confidence")


def ended(epoch: int, *names: str, epochs: int = 30, seconds: float = 0.2, **fields: Any) -> EpochEnded:
    return EpochEnded(epoch, epochs, dict.fromkeys(names, 0.5 + epoch), seconds, **fields)


def drawn(table: EpochTable, width: int | None, *events: EpochEnded) -> list[str]:
    return [line for event in events for line, _ in table.lines(event, width)]


def of(*stages: str) -> list[str]:
    return [f"{stage}/{name}" for stage, name in itertools.product(stages, METRICS)]


def test_the_speed_has_the_unit_of_the_dataset() -> None:
    rate = {"samples_per_s": 20_000.0, "row_counts": {"tokens": 64.0, "characters": 300.0}}
    events = ended(0, "train/loss", **rate), ended(1, "train/loss"), ended(2, "test/loss")
    assert drawn(EpochTable(), 80, *events) == [
        "      train",
        "epoch     loss  tokens/s   time",
        " 1/30   0.5000 1,280,000  0.2 s",
        " 2/30   1.5000            0.2 s",
        "      test",
        "epoch     loss   time",
        " 3/30   2.5000  0.2 s",
    ]


@pytest.mark.parametrize("width", [60, 200])
@pytest.mark.parametrize("epochs", [1, 99_999])
@pytest.mark.parametrize("count", [1, 12])
def test_rows_fit_whatever_they_hold(width: int, epochs: int, count: int) -> None:
    names = [f"{stage}/a_rather_long_name_of_{number}" for stage in ("train", "val") for number in range(count)]
    event = ended(0, *names, epochs=epochs, samples_per_s=123_456.0, data_wait_pct=60.0, seconds=2.0)
    event = replace(event, values={**event.values, names[0]: -1.23e-12, names[-1]: 123456.789})
    lines = drawn(EpochTable(), width, event)
    told = [line for line in lines if line.startswith("no room for ")]
    assert all(len(line.partition("  60 %")[0]) <= width for line in lines if line not in told)
    left_out = told[0].removeprefix("no room for ").partition(";")[0].split(", ") if told else []
    row = next(line for line in lines if line.strip().startswith("1/")).partition("2.0 s")[0]
    assert len(names) + 1 == len(left_out) + len(row.split()[1:])  # and the speed
    assert "60 % waiting for data" in "\n".join(lines)


def test_a_header_comes_when_the_numbers_change() -> None:
    table = EpochTable()
    first = drawn(table, 100, ended(0, *of("train", "val")))
    assert len(drawn(table, 100, ended(1, *of("train", "val")))) == 1
    assert len(drawn(table, 100, ended(2, "val/f1"))) == 1  # fewer are no reason
    assert drawn(table, 100, ended(2, *of("test")))[0] == "      test"
    assert drawn(table, 90, ended(3, *of("train", "val")))[:-1] != first[:-1]  # the terminal is narrower now
