"""Tables of runs and metrics, as the page and notebooks read them."""

import json
import math
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas
import pytest
from conftest import Mlx, Start
from faults import wait_for

from mlx_runtime import metrics_table, runs_table
from mlx_runtime.companions.ui import storages, views
from mlx_runtime.errors import UsageError
from mlx_runtime.runs import records
from mlx_runtime.runs.folder import RunFolder, claim_run
from mlx_runtime.storage.local import one_at_a_time

pytestmark = pytest.mark.pure


@pytest.fixture
def recorded(tmp_path: Path) -> Callable[..., RunFolder]:
    """`recorded([(step, value), ...], lr=0.1)` creates an ended run with a curve `loss`, three reports per epoch."""

    def make(curve: list[tuple[int, float | None]], **config: Any) -> RunFolder:
        folder = claim_run(str(tmp_path), "digits")
        records.Record(folder, status="SUCCEEDED", values=config, metrics={"loss": 0.5})
        rows = [{"step": step, "epoch": step // 3, "timestamp": 100.0 + step, "loss": value} for step, value in curve]
        folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return folder

    return make


@pytest.mark.process
def test_a_table_of_runs_has_the_fields_of_a_listing_in_json(
    recorded: Callable[..., RunFolder], mlx: Mlx, tmp_path: Path
) -> None:
    first, damaged = recorded([], **{"adam.lr": 0.1}), recorded([])
    damaged.record.write_text("{")
    for options in (["--add", "a", "--add", "b", "--note", "the best"], ["--remove", "a"]):
        done = mlx(tmp_path, "xp", "tag", str(first.path), *options)
    assert done.stdout == "digits/run_001: b; the best\n", done.stderr
    listed = json.loads(mlx(tmp_path, "xp", "ls", "--json", MLX_STORAGE=str(tmp_path)).stdout)
    table = runs_table([tmp_path, f"{tmp_path}/"])
    assert [*table["run"]] == ["run_001", "run_002"]
    spread = {"metrics": ["metrics.loss"], "config": ["config.adam.lr"], "sweep": [], "job": []}
    assert {name for key in listed[0] for name in spread.get(key, [key])} == {*table}
    row = table.iloc[0]
    assert (row["tags"], row["note"], row["metrics.loss"], row["config.adam.lr"]) == (["b"], "the best", 0.5, 0.1)
    assert table.iloc[1]["status"] == "UNREADABLE"
    assert "run_002/run.json" in table.iloc[1]["problem"]


@pytest.mark.process
def test_two_who_tag_a_run_at_once_lose_no_tag(
    recorded: Callable[..., RunFolder], start: Start, tmp_path: Path
) -> None:
    run, cache = recorded([]).path, tmp_path / "cache"
    with one_at_a_time(cache / "locks", str(run.resolve())):
        process = start(tmp_path, "xp", "tag", str(run), "--add", "b", MLX_CACHE=str(cache))
        time.sleep(3)
        assert process.poll() is None
        (run / records.LABELS).write_text('{"tags": ["a"]}')
    assert wait_for(process.output) == "digits/run_001: a, b\n"


def test_a_changed_record_is_read_again(recorded: Callable[..., RunFolder], tmp_path: Path) -> None:
    run = recorded([])
    assert runs_table(tmp_path)["status"].item() == "SUCCEEDED"
    records.Record(run, status="FAILED", error="new")
    assert runs_table(tmp_path)["error"].item() == "new"


def test_storages_that_are_missing_are_named_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no storage .*nothing"):
        runs_table(tmp_path / "nothing")
    assert runs_table(tmp_path).empty


def test_a_damaged_run_is_named_next_to_the_curves_of_others(recorded: Callable[..., RunFolder]) -> None:
    good, partly, bad = recorded([(0, 1.0), (1, None)]), recorded([(0, 2.0)]), recorded([])
    partly.metrics.write_text(
        partly.metrics.read_text() + '{"step": 1, "epoch": 0, "loss": 2.0, "timestamp": "x"}\ndamaged\n'
    )
    bad.metrics.unlink()
    bad.metrics.mkdir()
    table = metrics_table([str(run.path) for run in (good, partly, bad)], ["loss"])
    assert [*table["run"]] == ["digits/run_001", "digits/run_001", "digits/run_002", "digits/run_002"]
    assert math.isnan(table["value"][1])
    problems = table.attrs["problems"]
    assert "1 line of metrics.jsonl" in problems[str(partly.path)]
    assert "run_003: metrics.jsonl cannot be read" in problems[str(bad.path)]


def test_means_over_runs_keep_their_peaks(recorded: Callable[..., RunFolder], tmp_path: Path) -> None:
    """Runs are compared at equal steps first; with points left out before, peaks of the mean would be lost."""
    for seed in (1, 2):
        curve = [(step, 9.0 + seed if step == 777 else float(seed)) for step in range(3000)]
        recorded([*curve[:1500], (1500, None), *curve[1501:]], **{"seed": seed, "lr": 0.1})
    recorded([(0, 5.0)], **{"seed": 1, "lr": 0.2})
    runs = runs_table(tmp_path)
    table = metrics_table(runs, by=["config.lr"], points=50)
    mean = table[table["config.lr"] == 0.1].set_index("step")
    assert len(mean) <= 50
    assert (mean["value"][777], mean["runs"][777], mean["time"][777]) == (10.5, 2, 777.0)
    assert mean["std"][777] == pytest.approx(0.5**0.5)
    assert math.isnan(mean["value"][1500])
    assert table["value"].iloc[-1] == 5.0
    epochs = metrics_table(runs[:1], x="epoch", smooth=0.5)
    assert [*epochs["step"][:2]] == [2, 5]
    with pytest.raises(UsageError, match="cannot group by 'lr'"):
        metrics_table(runs, by=["lr"])


def test_what_shows_runs_of_an_empty_or_silent_storage_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storages, "WAIT_S", 0.5)
    listed, live = views.overview(runs_table(tmp_path), [])
    assert (len(listed), len(live)) == (0, 0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"127.0.0.1:{silent.getsockname()[1]}"
        options = f"?endpoint_override={endpoint}&scheme=http&region=eu-west-1"
        places = [f"s3://bucket/runs/digits/{name}{options}" for name in ("run_001", "run_002")]
        runs = pandas.DataFrame({"experiment": "digits", "run": ["run_001", "run_002"], "place": places})
        for show in (
            lambda: views.curves(runs, ["loss"], log=[], x="step"),
            lambda: views.differences(runs),
            lambda: views.run(places[0]),
            lambda: views.sweep(runs.assign(**{"sweep.name": "sweep_001"})),
        ):
            assert "has not answered within 0.5 s" in show()[-1].text
