"""Numbers recorded by a loop, their receivers, and workers that record alone, which cannot block a run."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Mlx
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

pytestmark = pytest.mark.process

Make = Callable[[str], Path]

HEARD = ("+cfg.trackers.heard._target_=src.experiment.Heard", "+cfg.trackers.heard.file=tracker.jsonl")
TOLD = ("+cfg.callbacks.told._target_=src.experiment.Heard", "+cfg.callbacks.told.file=callback.jsonl")
FILES = ("+cfg.trackers.csv._target_=mlx_runtime.trackers.CSV",)


def lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def series(folder: Path) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    for line in lines(folder / "metrics.jsonl"):
        for name, value in line.items():
            if "/" in name or name == "samples_per_s":
                found.setdefault(name, []).append((line["step"], value))
    return found


@pytest.mark.local
class TestTwoWorkers:
    @pytest.fixture(scope="class")
    def folder(self, mlx: Mlx, tmp_path_factory: pytest.TempPathFactory, make_in: Callable[[str, Path], Path]) -> Path:
        folder = make_in("logging", tmp_path_factory.mktemp("logging"))
        done = mlx(folder, "train", "run", "cfg.start_workers=2", *HEARD, *TOLD, *FILES)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count("train/unused is skipped: it was not updated") == 1
        return folder

    @pytest.fixture(scope="class")
    def run(self, folder: Path) -> Path:
        return folder / "runs" / "logging" / "run_001"

    def test_names_and_steps(self, run: Path) -> None:
        found = series(run)
        steps = [2, 4, 6, 8, 10, 12]
        assert [step for step, _ in found["train/mse"]] == steps
        assert [step for step, _ in found["lr/sgd"]] == steps
        assert [step for step, _ in found["train/auroc"]] == [6, 12]  # it keeps every row, so once per pass
        assert {name: len(found[name]) for name in ("time/step_s", "time/data_wait_pct", "samples_per_s")} == {
            "time/step_s": 6,
            "time/data_wait_pct": 6,
            "samples_per_s": 6,
        }
        for stage in ("val", "val_again", "test_own", "val_own", "test_named", "test_after"):
            assert [step for step, _ in found[f"{stage}/mse"]] == [6, 12], stage
            assert [step for step, _ in found[f"{stage}/auroc"]] == [6, 12], stage
        assert found["own/epochs"] == [(6, 1.0), (12, 2.0)]
        assert found["own/tensor"] == [(6, 2.5), (12, 2.5)]
        assert "gpu/memory" not in found

    def test_values_are_over_all_workers(self, run: Path) -> None:
        found = series(run)
        assert found["train/mean"][2][1] == pytest.approx(sum(range(48)) / 48 / 48, rel=1e-6)
        assert found["val/mean"] == found["val_again/mean"]
        assert found["val/mean"][0][1] == pytest.approx(sum(range(16)) / 16 / 16, rel=1e-6)
        for stage, rows in (("test_own", 8), ("val_own", 4), ("test_named", 12), ("test_after", 12)):
            assert found[f"{stage}/mean"][0][1] == pytest.approx(sum(range(rows)) / rows / rows, rel=1e-6), stage
        assert found["train/auroc"][0][1] == pytest.approx(1.0, rel=1e-6)

    def test_tensorboard_has_the_same(self, run: Path) -> None:
        events = EventAccumulator(str(run)).Reload()
        for name, points in series(run).items():
            assert [item.step for item in events.Scalars(name)] == [step for step, _ in points], name
            assert [item.value for item in events.Scalars(name)] == pytest.approx([value for _, value in points])
        assert {item.value for item in events.Scalars("epoch")} == {0.0, 1.0}
        assert events.Tags()["tensors"] == ["note/text_summary"]

    def test_trackers_hear_all_on_rank_0(self, folder: Path, run: Path) -> None:
        heard = lines(folder / "tracker.jsonl")
        assert [line["hook"] for line in heard if line["hook"] not in ("on_report", "on_checkpoint")] == [
            "on_run_start",
            "on_epoch_end",
            "on_epoch_end",
            "on_run_end",
        ]
        assert (heard[0]["run"], heard[0]["attempt"], heard[0]["seed"]) == ("run_001", 1, 0)
        assert {line["pid"] for line in heard} == {line["pid"] for line in lines(run / "metrics.jsonl")}
        reports = [line["values"] for line in heard if line["hook"] == "on_report"]
        assert len(reports) == len(lines(run / "metrics.jsonl"))
        assert [line["name"] for line in heard if line["hook"] == "on_checkpoint"] == ["epoch_0001", "epoch_0002"]
        assert heard[-1]["status"] == "SUCCEEDED"

    def test_callbacks_hear_the_same_in_the_driver(self, folder: Path) -> None:
        heard, told = lines(folder / "tracker.jsonl"), lines(folder / "callback.jsonl")
        assert {line["pid"] for line in told} == {
            json.loads((folder / "runs/logging/run_001/run.json").read_text())["pid"]
        }

        def without_place(lines: list[dict], hook: str) -> list[dict]:
            return [
                {name: value for name, value in line.items() if name != "pid"} for line in lines if line["hook"] == hook
            ]

        for hook in ("on_run_start", "on_report", "on_epoch_end", "on_checkpoint", "on_run_end"):
            assert without_place(told, hook) == without_place(heard, hook), hook


@pytest.mark.local
def test_who_records_alone_ends_the_run_with_an_error(mlx: Mlx, experiment: Make) -> None:
    folder = experiment("logging")
    done = mlx(folder, "train", "run", "cfg.start_workers=2", "cfg.fault=alone")
    assert done.returncode == 1
    assert "at step 2 of train, rank 1 nothing at step 2 of train; every worker must run the same loop" in done.stderr


def test_listeners_that_fail_and_a_run_that_fails(mlx: Mlx, experiment: Make) -> None:
    folder = experiment("logging")
    fails = ("+cfg.trackers.heard.fails=on_report", "+cfg.callbacks.told.fails=on_epoch_end")
    done = mlx(folder, "train", "run", "cfg.start_workers=0", "cfg.fault=late", *HEARD, *TOLD, *fails)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ValueError: at the very end")
    for name, hook in (("trackers.heard", "on_report"), ("callbacks.told", "on_epoch_end")):
        assert done.stdout.count(f"cfg.{name} failed in {hook}, the run continues: RuntimeError: out of order") == 1
    for file in ("tracker.jsonl", "callback.jsonl"):
        heard = lines(folder / file)
        assert [line["hook"] for line in heard[-2:]] == ["on_exception", "on_run_end"]
        assert "at the very end" in heard[-2]["error"]
        assert heard[-1]["status"] == "FAILED"
        assert sum(line["hook"] == "on_epoch_end" for line in heard) == 2


def test_the_first_number_that_is_not_finite_is_a_warning_however_quiet(mlx: Mlx, experiment: Make) -> None:
    folder = experiment("logging")
    monitored = ("cfg.monitor=train/mse", "cfg.log_every_steps=1")
    done = mlx(folder, "train", "run", "--quiet", "cfg.start_workers=0", "cfg.fault=explodes", *monitored)
    assert done.returncode == 0, done.stderr
    (warning,) = [line for line in done.stdout.splitlines() if line.startswith("warning ")]
    assert warning == (
        "warning   not finite at step 5 of epoch 1: train/mse. Checkpoints without a finite cfg.monitor are never the "
        "best; cfg.debug.stop_on_nan=true ends a run at the first such gradient"
    )
    log = next((folder / "runs").glob("logging/run_001/logs/driver*"))
    assert log.read_text().count("warning ") == 1


def test_numbers_of_log_and_of_checkpoints_are_recorded_like_others(mlx: Mlx, experiment: Make) -> None:
    """Logged numbers, like those of a GAN, appear in the epoch line and the final table, and select the best epoch."""
    folder = experiment("logging")
    source = folder / "src" / "experiment.py"
    start, loop, rest = source.read_text().partition("self.cfg.num_epochs):\n")
    body = """\
            for batch in train:
                self.optimizers.sgd.step()
                self.log({"gan/critic": 0.5 + epoch, "penalty": 3.0})
            self.save_checkpoint(epoch=epoch, metrics={"gan/judge": (0.25, 0.5, math.inf)[epoch]})

    @staticmethod
"""
    source.write_text(start + loop + body + rest[rest.index("    def own(") :])
    here = ("cfg.start_workers=0", "cfg.monitor=gan/judge", "cfg.mode=max", "cfg.keep_checkpoints=1")
    done = mlx(folder, "train", "run", *here, "cfg.num_epochs=3")
    assert done.returncode == 0, done.stderr
    printed = done.stdout.splitlines()
    (titles,) = [index for index, line in enumerate(printed) if line.startswith("epoch ")]
    assert printed[titles].split()[1:4] == ["penalty", "critic", "judge"]
    for row, critic, judge in ((1, "0.5000", "0.2500"), (2, "1.5000", "0.5000")):
        assert printed[titles + row].split()[:4] == [f"{row}/3", "3.0000", critic, judge]
    table = [line.split() for line in done.stdout.splitlines()[-8:]]
    for words in (["gan/critic", "2.5000"], ["gan/judge", "inf"], ["penalty", "3.0000"]):
        assert words in table
    run = folder / "runs" / "logging" / "run_001"
    assert series(run)["gan/judge"] == [(12, 0.25), (24, 0.5), (36, None)]
    record = json.loads((run / "run.json").read_text())
    assert (record["metrics"]["gan/judge"], record["best"]["value"], record["best"]["epoch"]) == (None, 0.5, 1)
    assert ["best", "gan/judge", "0.5000", "(epoch", "2,", "checkpoints/epoch_0002)"] in table  # infinity is never best
    assert sorted(path.name for path in run.glob("checkpoints/epoch*")) == ["epoch_0002", "epoch_0003"]
    assert mlx(folder, "xp", "best", "logging").stdout.splitlines()[0].split() == ["gan/judge", "0.5000", "(max)"]
