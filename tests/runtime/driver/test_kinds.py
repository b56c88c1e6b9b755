"""Datasets of every kind in real runs: on two DDP workers, prepared and not, larger than the object store."""

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Mlx, Start, edit
from faults import record
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mlx_runtime.companions.prepared.store import Store

pytestmark = pytest.mark.cluster

Make = Callable[[str], Path]

ROWS = {"train": 53, "numbers": 37, "table": 1001, "val": 130, "test": 31}

Seen = list[dict[str, list[list[list[float]]]]]


def seen(folder: Path, workers: int = 2) -> Seen:
    """Return the rows that each rank read, by dataset, epoch and batch."""
    return [json.loads((folder / "seen" / f"rank_{rank}.json").read_text()) for rank in range(workers)]


def reports(folder: Path, run: str = "run_001") -> list[dict]:
    lines = (folder / "runs" / "kinds" / run / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def check_every_row_once_in_equal_steps(ranks: Seen, names: list[str], epochs: int = 2) -> None:
    for name in names:
        for epoch in range(epochs):
            read = [batches for rank in ranks for batches in [rank[name][epoch]]]
            assert sorted(row for batches in read for batch in batches for row in batch) == list(range(ROWS[name])), (
                name
            )
            assert len({len(batches) for batches in read}) == 1, name


@pytest.fixture(scope="module")
def folder(make_in: Callable[[str, Path], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The experiment, shared by the runs of this module; each test chooses their order."""
    return make_in("kinds", tmp_path_factory.mktemp("kinds"))


@pytest.fixture(scope="module")
def direct(mlx: Mlx, folder: Path) -> tuple[str, Seen]:
    """A run of two workers over all kinds, without preparing: its output and the rows of each rank."""
    done = mlx(folder, "train", "run", "datasets.train.slow_s=0.05")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout, seen(folder)


class TestDirect:
    def test_every_row_once_in_equal_steps(self, direct: tuple[str, Seen]) -> None:
        check_every_row_once_in_equal_steps(direct[1], list(ROWS))

    def test_training_sets_come_in_another_order_each_epoch_and_others_in_their_own(
        self, direct: tuple[str, Seen]
    ) -> None:
        for rank in direct[1]:
            assert rank["test"][0] == rank["test"][1]
            for name in ("train", "numbers", "table"):
                assert rank[name][0] != rank[name][1]
            assert rank["val"][0] == rank["val"][1] == [sorted(batch) for batch in rank["val"][0]]

    def test_epoch_metrics_count_each_row_once(self, direct: tuple[str, Seen], folder: Path) -> None:
        for name, rows in ROWS.items():
            values = [line[f"{name}/mean"] for line in reports(folder) if f"{name}/mean" in line]
            assert values[-1] == pytest.approx((rows - 1) / 2, rel=1e-6)

    def test_the_speed_of_reading_is_recorded_and_a_slow_set_is_told(
        self, direct: tuple[str, Seen], folder: Path
    ) -> None:
        rates = [line for line in reports(folder) if "samples_per_s" in line]
        assert len(rates) == 2 * 3  # per epoch of each training set
        slow = rates[0]
        assert slow["time/data_wait_pct"] > 10
        assert 0 < slow["samples_per_s"] < 2 / 0.05  # two workers, each of which waits 0.05 s per row
        events = EventAccumulator(str(folder / "runs" / "kinds" / "run_001")).Reload()
        assert {"samples_per_s", "time/data_wait_pct"} <= set(events.Tags()["scalars"])
        told = [line for line in direct[0].splitlines() if "holds up training" in line]
        assert told[0].startswith("reading datasets.train holds up training; try ")
        assert "% waiting for data" in direct[0]

    def test_a_stream_that_is_not_prepared_needs_ray(self, direct: tuple[str, Seen], folder: Path) -> None:
        why = "datasets.table is an unprepared stream of Ray Data"
        assert f"workers   2 DDP workers in embedded Ray on {os.cpu_count()} cores ({why})\n" in direct[0]
        assert record(folder)["engine"] == {"asked": "auto", "used": "ray"}


@pytest.fixture(scope="module")
def prepared(mlx: Mlx, folder: Path, direct: object) -> tuple[str, Seen]:
    """The same run, prepared first: `train` is slow enough for reading processes."""
    shutil.rmtree(folder / "seen")
    done = mlx(folder, "train", "run", "--prepare-batches", "datasets.train.slow_s=0.1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout, seen(folder)


class TestPrepared:
    def test_what_can_be_prepared_is_and_the_rest_is_told(self, prepared: tuple[str, Seen], folder: Path) -> None:
        for line in (
            "datasets.train is prepared: 53 rows",
            "datasets.numbers is not prepared: Numbers is a stream",
            "datasets.table is prepared: 1,001 rows",
            "datasets.val is prepared: 130 rows",
            "prepared  train, table, val, test: read from ",
        ):
            assert line in prepared[0]
        assert "prepare train | " in prepared[0]  # progress
        assert prepared[0].count("is not prepared") == 1
        assert set(record(folder, "run_002")["prepared"]) == {"train", "table", "val", "test"}

    def test_every_row_once_in_equal_steps(self, prepared: tuple[str, Seen]) -> None:
        check_every_row_once_in_equal_steps(prepared[1], list(ROWS))

    def test_a_map_style_set_comes_in_the_same_order_as_unprepared(
        self, prepared: tuple[str, Seen], direct: tuple[str, Seen]
    ) -> None:
        assert [rank["train"] for rank in prepared[1]] == [rank["train"] for rank in direct[1]]

    def test_later_runs_use_it_by_themselves(self, prepared: object, mlx: Mlx, folder: Path) -> None:
        shutil.rmtree(folder / "seen")
        done = mlx(folder, "train", "run", "cfg.num_epochs=1", "datasets.train.slow_s=0.1")
        assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
        assert "prepared  train, table, val, test: read from " in done.stdout
        assert f"workers   2 DDP workers on {os.cpu_count()} cores (local engine)\n" in done.stdout
        assert "ray       starting" in done.stdout, "rows of the streams are compared with the prepared ones"
        assert record(folder, "run_003")["engine"] == {"asked": "auto", "used": "local"}
        check_every_row_once_in_equal_steps(seen(folder), ["train", "table"], epochs=1)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        pytest.param(
            "datasets.train.broken=7",
            "OSError: bad sector (while reading sample 7 of datasets.train)",
            marks=pytest.mark.local,
        ),
        ("datasets.table.broken=true", "error: datasets.table cannot be read: ValueError: no such column"),
    ],
)
def test_what_goes_wrong_is_one_clear_error(experiment: Make, mlx: Mlx, override: str, message: str) -> None:
    folder = experiment("kinds") if "table" in override else without_streams(experiment("kinds"))
    done = mlx(folder, "train", "run", "cfg.num_epochs=1", override)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr + done.stdout


def test_a_set_four_times_the_object_store_takes_constant_memory(experiment: Make, mlx: Mlx) -> None:
    """320 MB through an object store of 80 MB, with two workers."""
    folder = experiment("kinds")
    size = ("datasets.table.rows=3200", "datasets.table.width=25000", "datasets.table.blocks=64")
    options = [*size, "datasets.table.batch_size=32", "cfg.only=table", "cfg.num_epochs=1"]
    store = {"RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": str(80 << 20)}
    done = mlx(folder, "train", "run", *options, **store)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in seen(folder):
        assert sum(len(batch) for batch in rank["table"][0]) == 1600
        memory = rank["memory_mb"]
        start, end = memory[len(memory) // 4], max(memory[len(memory) // 4 :])
        assert end - start < 120  # of 160 MB that this worker reads, three quarters come after `start`


def without_streams(folder: Path) -> Path:
    """The experiment with map-style datasets instead of those of Ray Data, so that Ray does not start."""
    source = folder / "src" / "experiment.py"
    edit(source, "    table: Table = Table()", "    table: Rows = Rows(rows=1001)")
    edit(source, "    val: Table = Table(rows=130, batch_size=16)", "    val: Rows = Rows(rows=130)")
    (folder / "src" / "conf.yaml").unlink()
    return folder


@pytest.mark.kills
def test_a_killed_preparation_leaves_nothing_to_use(experiment: Make, mlx: Mlx, start: Start) -> None:
    folder = without_streams(experiment("kinds"))
    options = ("cfg.only=train", "cfg.start_workers=0", "cfg.num_epochs=1", "datasets.train.slow_s=0.05")
    root = folder / "runs" / ".prepared"
    preparing = start(folder, "train", "prepare", *options)
    while not (files := list(root.glob("Rows-*/*.npy"))) and preparing.poll() is None:
        time.sleep(0.01)
    preparing.kill()
    preparing.wait()
    assert files
    assert not any(item.complete for item in Store(str(root)).entries())
    done = mlx(folder, "train", "run", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "prepared " not in done.stdout
    done = mlx(folder, "train", "run", "--prepare-batches", *options)
    assert "prepared  train, table, val, test: read" in done.stdout
    check_every_row_once_in_equal_steps(seen(folder, 1), ["train"], epochs=1)
    done = mlx(folder, "train", "run", "--no-prepared", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "prepared " not in done.stdout


@pytest.mark.s3
def test_prepared_sets_on_an_object_store_are_copied_to_the_machine_that_reads_them(
    mlx: Mlx, experiment: Make, s3: str, tmp_path: Path
) -> None:
    folder = without_streams(experiment("kinds"))
    options = (f"cfg.preparation.path={s3.format('run')}", "cfg.only=train", "cfg.start_workers=0", "cfg.num_epochs=1")
    done = mlx(folder, "train", "run", "--prepare-batches", *options, MLX_CACHE=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "prepared  train, table, val, test: read from s3://bucket/run" in done.stdout
    check_every_row_once_in_equal_steps(seen(folder, 1), ["train"], epochs=1)
    assert [path.name.partition("-")[0] for path in (tmp_path / "cache" / "prepared").glob("Rows-*")] == ["Rows"]
    assert not (folder / "runs" / ".prepared").exists()
