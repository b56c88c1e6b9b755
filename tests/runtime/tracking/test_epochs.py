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


def test_100_columns_hold_two_stages_of_four_numbers() -> None:
    rate = {"samples_per_s": 8181.4, "data_wait_pct": 3.0}
    names = [f"{stage}/{name}" for stage in ("train", "val") for name in ("loss", "accuracy", "f1", "confidence")]
    assert drawn(EpochTable(), 100, ended(0, *names, **rate), ended(1, *names, **rate)) == [
        "      train                                 val",
        "epoch     loss accuracy       f1 confidence     loss accuracy       f1 confidence samples/s   time",
        " 1/30   0.5000   0.5000   0.5000     0.5000   0.5000   0.5000   0.5000     0.5000     8,181  0.2 s",
        " 2/30   1.5000   1.5000   1.5000     1.5000   1.5000   1.5000   1.5000     1.5000     8,181  0.2 s",
    ]


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


@pytest.mark.parametrize("width", [60, 100, 200])
@pytest.mark.parametrize("epochs", [1, 99_999])
@pytest.mark.parametrize("count", [1, 5, 12, 40])
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


def test_what_does_not_fit_is_told_once() -> None:
    lines = drawn(EpochTable(), 60, *(ended(epoch, *of("train", "val")) for epoch in range(3)))
    told = [line for line in lines if "no room" in line]
    assert told == ["no room for val/cross_entropy, val/accuracy, val/f1, val/confidence; see metrics.jsonl"]
    assert [line.split()[0] for line in lines if "/30" in line] == ["1/30", "2/30", "3/30"]


def test_an_evaluation_has_the_epoch_of_its_checkpoint() -> None:
    assert drawn(EpochTable(), None, ended(17, "val/loss", epochs=0))[-1].split()[0] == "18"
    assert drawn(EpochTable(), None, ended(9, "val/loss", epochs=10))[-1].split()[0] == "10/10"


def test_a_pipe_has_no_edge() -> None:
    lines = drawn(EpochTable(), None, ended(0, *of("train", "val", "test", "other")))
    assert lines[-1].split() == ["1/30", *["0.5000"] * 16, "0.2", "s"]


def test_a_header_comes_when_the_numbers_change() -> None:
    table = EpochTable()
    first = drawn(table, 100, ended(0, *of("train", "val")))
    assert len(drawn(table, 100, ended(1, *of("train", "val")))) == 1
    assert len(drawn(table, 100, ended(2, "val/f1"))) == 1  # fewer are no reason
    assert drawn(table, 100, ended(2, *of("test")))[0] == "      test"
    assert drawn(table, 90, ended(3, *of("train", "val")))[:-1] != first[:-1]  # the terminal is narrower now


def test_a_loop_that_records_by_turns_gets_one_table() -> None:
    table = EpochTable()
    turns = [ended(epoch, f"{stage}/loss") for epoch in range(5) for stage in ("train", "val")]
    lines = drawn(table, 100, *turns)
    assert sum(line.startswith("epoch") for line in lines) == 3
    assert lines[-2:] == [" 5/30   4.5000           0.2 s", " 5/30            4.5000  0.2 s"]


def test_waiting_is_told_when_it_matters() -> None:
    rate = {"samples_per_s": 10.0}
    for waited, seconds, text in (
        (9.9, 2.0, "2.0 s"),
        (24.0, 0.2, "0.2 s"),
        (24.0, 2.0, "2.0 s  24 % waiting for data"),
    ):
        event = ended(0, "train/loss", **rate, data_wait_pct=waited, seconds=seconds)
        assert drawn(EpochTable(), 100, event)[-1].endswith(text)


def test_names_of_no_stage_stand_before_those_of_stages() -> None:
    assert drawn(EpochTable(), 100, ended(0, "gan/critic", "penalty"))[:2] == [
        "               gan",
        "epoch  penalty   critic   time",
    ]
