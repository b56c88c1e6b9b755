"""Sweeps with an engine that does not train: the choice of the next run, records, and resuming."""

import dataclasses
import json
import os
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeEngine, metrics, plan_of
from faults import wait_for

from mlx_runtime.companions.sweeps import starting
from mlx_runtime.companions.sweeps.controller import Sweep
from mlx_runtime.companions.sweeps.events import SweepEnded, TrialEnded
from mlx_runtime.companions.sweeps.results import SweepResult
from mlx_runtime.companions.sweeps.space import WHOLE
from mlx_runtime.errors import MlxError, UsageError
from mlx_runtime.events import EpochEnded
from mlx_runtime.runs.folder import find_run
from mlx_runtime.storage.leases import lease

pytestmark = pytest.mark.pure

LR = "lr=1,2,3"


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: a project without files."""
    (tmp_path / "project" / "src").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "project")
    return tmp_path / "project"


def loss(job: Any, epoch: int) -> float:
    """The best value of each run is in its second epoch."""
    return float(job.values.get("lr", 1)) + float(job.values.get("width", 0)) / 100 + job.index + abs(epoch - 1)


def carry_out(plan: Any, engine: FakeEngine, heard: list | None = None, **options: Any) -> Sweep:
    sweep = starting.claim(plan, listeners=[(heard if heard is not None else []).append], **options)
    with sweep.supervise():
        engine.run(sweep)
    return sweep


def resumed(plan: Any, root: Path, name: str = "sweep_001") -> Any:
    return dataclasses.replace(plan, folder=find_run(str(root), "digits", name))


def record_of(root: Path, name: str = "sweep_001") -> dict[str, Any]:
    return json.loads((root / "digits" / name / "run.json").read_text())


def table(root: Path) -> list[tuple]:
    """What a sweep found: of each run its trial, fold, values, status and metrics."""
    rows = []
    for trial in record_of(root)["trials"]:
        for name in trial["runs"]:
            run = json.loads((root / "digits" / name / "run.json").read_text())
            lines = (root / "digits" / name / "metrics.jsonl").read_text()
            rows.append((name, run["sweep"], trial["values"], run["status"], lines))
    return rows


def test_a_lucky_seed_does_not_make_its_trial_the_best(tmp_path: Path) -> None:
    """Trials are ranked by the mean over seeds and folds, and a resumed sweep trains the runs of further seeds only.

    Until these have ended, the results of the others stay.
    """
    seen = []
    losses = {"1": (2, 2, 2, 2, 2, 2), "2": (9, 9, 1, 1, 1, 1)}  # by run; the last two are those of the third seed

    def score(job: Any, epoch: int) -> float:
        if job.part.seed == 9:
            seen.append([trial.score for trial in SweepResult(find_run(str(tmp_path), "digits", "sweep_001")).trials])
        return float(losses[job.values["lr"]][job.index])

    heard: list = []
    plan, engine = plan_of(tmp_path, "lr=1,2", folds=2, seeds=2, seed=7), FakeEngine(score)
    carry_out(plan, engine, heard)
    whole = [event for event in heard if isinstance(event, TrialEnded) and event.part == WHOLE]
    assert [(event.trial, event.status, event.best) for event in whole] == [
        (1, "SUCCEEDED", (2, 2.0)),
        (2, "SUCCEEDED", (2, 5.0)),
    ]
    assert [job.overrides for job in engine.seen[:3]] == [
        ("lr=1", "++cfg.seed=7", "++cfg.cross_validation.folds=2", "++cfg.cross_validation.fold=0"),
        ("lr=1", "++cfg.seed=7", "++cfg.cross_validation.folds=2", "++cfg.cross_validation.fold=1"),
        ("lr=1", "++cfg.seed=8", "++cfg.cross_validation.folds=2", "++cfg.cross_validation.fold=0"),
    ]
    assert record_of(tmp_path)["best"] == {"trial": 1, "epoch": 2, "value": 2.0, "std": 0.0}
    assert [trial.number for trial in SweepResult(find_run(str(tmp_path), "digits", "sweep_001")).ranked()] == [1, 2]
    losses["2"] = (9, 9, 1, 1, -9, -9)
    more, again = plan_of(tmp_path, "lr=1,2", folds=2, seeds=3, seed=7), FakeEngine(score)
    carry_out(resumed(more, tmp_path), again)
    parts = [(job.trial, job.part.seed, job.part.fold) for job in again.seen]
    assert parts == [(1, 9, 0), (1, 9, 1), (2, 9, 0), (2, 9, 1)]
    assert seen == [[2.0, 5.0]] * 12
    assert record_of(tmp_path)["best"]["trial"] == 2


def test_a_failed_trial_does_not_end_the_sweep(tmp_path: Path) -> None:
    def score(job: Any, epoch: int) -> float:
        if job.values["lr"] == "2":
            raise ValueError("on purpose")
        return loss(job, epoch)

    heard: list = []
    plan = plan_of(tmp_path, LR)
    carry_out(plan, FakeEngine(score), heard)
    assert heard[-1] == SweepEnded("SUCCEEDED", best=1, unfinished=0, failed=1)
    assert [event.error for event in heard if isinstance(event, TrialEnded)] == ["", "on purpose", ""]
    again = FakeEngine(loss)
    carry_out(resumed(plan, tmp_path), again)
    assert again.seen == []
    carry_out(resumed(plan, tmp_path), again, retry_failed=True)
    assert [(job.trial, job.run[-7:]) for job in again.seen] == [(2, "run_002")]


def test_a_scheduler_prunes_by_the_mean_over_all_folds(tmp_path: Path) -> None:
    """Fold 1 of the second trial is better than that of the first one, but its mean is worse."""

    def score(job: Any, epoch: int) -> float:
        return [1.0, 1.0][job.part.fold] if job.trial == 1 else [0.5, 9.0][job.part.fold]

    heard: list = []
    plan = plan_of(tmp_path, LR, folds=2, scheduler="asha", epochs=9)
    carry_out(plan, FakeEngine(score, parallel=2, epochs=9), heard)
    statuses = {event.trial: event.status for event in heard if isinstance(event, TrialEnded) and event.part == WHOLE}
    assert statuses[1] == "SUCCEEDED"
    assert statuses[2] == "PRUNED"
    again = FakeEngine(score)
    carry_out(resumed(plan, tmp_path), again)
    assert again.seen == []


def test_what_a_trial_trains_after_it_was_pruned_affects_no_other(tmp_path: Path) -> None:
    """It ends a moment later, which differs each time."""
    sweep = starting.claim(plan_of(tmp_path, LR, scheduler="asha", epochs=9), listeners=[])
    jobs = [sweep.next() for _ in range(2)]

    def handle(number: int, epoch: int, value: float) -> bool:
        return sweep.handle(jobs[number - 1], EpochEnded(epoch, 9, {"val/loss": value}, 0.1))

    assert [handle(1, 0, 1.0), handle(2, 0, 2.0)] == [False, True]
    assert [handle(2, epoch, 0.1) for epoch in (1, 2, 3)] == [True, True, True]
    assert [handle(1, epoch, 1.0) for epoch in (1, 2)] == [False, False]


def test_a_search_that_was_interrupted_continues_like_one_that_was_not(tmp_path: Path) -> None:
    def found(root: Path, stop_at: tuple[int, int] | None = None) -> list[tuple]:
        sweep: Any = None

        def score(job: Any, epoch: int) -> float:
            if (job.trial, epoch) == stop_at:
                sweep.control.request("Ctrl-C")
            return abs(float(job.values["x"]) - 0.3) + 1 / (1 + epoch)

        plan = plan_of(root, "x=interval(0,1)", search="optuna", scheduler="asha", trials=16, epochs=9)
        while sweep is None or sweep.control.reason is not None:
            sweep = starting.claim(plan if sweep is None else resumed(plan, root))
            with sweep.supervise():
                FakeEngine(score, epochs=9).run(sweep)
            stop_at = None
        return [row[2:] for row in table(root)]

    undisturbed = found(tmp_path / "undisturbed")
    assert len(undisturbed) == 16
    assert {status for _, status, _ in undisturbed} == {"SUCCEEDED", "PRUNED"}
    assert found(tmp_path / "stopped", stop_at=(13, 0)) == undisturbed  # the first ten trials are random


def test_a_resumed_sweep_may_have_another_number_of_trials(tmp_path: Path) -> None:
    heard: list = []
    for trials, lrs in ((2, "12"), (1, ""), (3, "3")):
        plan, engine = plan_of(tmp_path, LR, trials=trials), FakeEngine(loss)
        carry_out(resumed(plan, tmp_path) if heard else plan, engine, heard)
        assert "".join(job.values["lr"] for job in engine.seen) == lrs
        assert heard[-1] == SweepEnded("SUCCEEDED", best=1, unfinished=0, failed=0)


def test_a_metric_that_nobody_records_ends_the_sweep_after_the_first_epoch(tmp_path: Path) -> None:
    engine = FakeEngine(loss, metric="val/lss")
    with pytest.raises(UsageError, match="do not record val/loss: the first recorded val/lss"):
        carry_out(plan_of(tmp_path, LR), engine)
    assert [len(metrics(job)) for job in engine.seen] == [2]
    assert record_of(tmp_path)["status"] == "STOPPED"


def test_a_second_driver_is_refused(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, LR)
    sweep = starting.claim(plan)
    with pytest.raises(UsageError, match=r"digits sweep_001 is being .* by process \d+"):
        starting.claim(resumed(plan, tmp_path))
    sweep.record.finish("STOPPED")
    starting.claim(resumed(plan, tmp_path))


def test_a_run_that_is_being_trained_is_not_taken_from_its_driver(tmp_path: Path) -> None:
    plan, engine = plan_of(tmp_path, LR), FakeEngine(loss)
    sweep = starting.claim(plan)
    job = sweep.next()
    assert job is not None
    engine.begin(job)
    sweep.record.finish("STOPPED")
    before = record_of(tmp_path)
    with pytest.raises(UsageError, match="digits run_001 is being trained by process"):
        starting.claim(resumed(plan, tmp_path))
    assert record_of(tmp_path) == before


def test_a_driver_that_was_taken_over_writes_nothing_more(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, LR)
    sweep = starting.claim(plan)

    def engine() -> None:
        sweep.record.folder.claim_attempt(2, lease())
        wait_for(lambda: sweep.killing, 60)
        assert sweep.next() is None

    with pytest.raises(MlxError, match="taken over"), sweep.supervise():
        engine()
    assert record_of(tmp_path)["status"] == "RUNNING"


def test_names_of_sweeps(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, LR)
    names = [starting.claim(plan, name).record.folder.name for name in ("", "lr", "", "sweep_wide")]
    assert names == ["sweep_001", "sweep_lr", "sweep_002", "sweep_wide"]
    with pytest.raises(UsageError, match="digits/sweep_lr exists already"):
        starting.claim(plan, "lr")
    with pytest.raises(UsageError, match="valid folder name"):
        starting.claim(plan, "a/b")


EVERY = 1 if "KILLS" in os.environ else 9


@pytest.mark.kills  # it forks, which processes with tests of JAX should not
class TestKilled:
    """A driver killed before any of its writes; a resumed sweep finds what an uninterrupted one does."""

    def plan(self, root: Path) -> Any:
        return plan_of(root, "lr=1,2", folds=2, epochs=2)

    def drive(self, root: Path, kill_at: int | None) -> int:
        """Carry out the sweep in a fork of this process that dies at that write. Returns its exit code."""
        child = os.fork()
        if child == 0:
            try:
                writes = 0

                def hook(name: str, arguments: tuple) -> None:
                    nonlocal writes
                    writing = name == "open" and isinstance(arguments[1], str) and not arguments[1].startswith("r")
                    writing = writing or name in ("os.mkdir", "os.rename", "os.remove")
                    here = threading.current_thread() is threading.main_thread()
                    if writing and here and str(root) in str(arguments[0]):
                        writes += 1
                        if writes == kill_at:
                            os._exit(9)

                sys.addaudithook(hook)
                existing = (root / "digits" / "sweep_001" / "run.json").exists()
                plan = self.plan(root)
                carry_out(resumed(plan, root) if existing else plan, FakeEngine(loss, parallel=2, epochs=2))
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def test_before_any_write(self, tmp_path: Path) -> None:
        """Of which this is one in so many; `make chaos` takes each of them."""
        assert self.drive(tmp_path / "whole", None) == 0
        expected = [row[1:] for row in table(tmp_path / "whole")]
        kill_at, codes = EVERY, []
        while not codes or codes[-1] == 9:
            root = tmp_path / str(kill_at)
            root.mkdir()
            codes.append(self.drive(root, kill_at))
            for again in range(3, 60, 17):  # the driver that resumes is killed as well
                if self.drive(root, again) == 0:
                    break
            assert self.drive(root, None) == 0
            name = "sweep_001" if (root / "digits" / "sweep_001" / "run.json").exists() else "sweep_002"
            assert name == "sweep_001" or kill_at < 12
            if name == "sweep_001":
                rows = table(root)
                assert [row[1:] for row in rows] == expected, kill_at
                assert sorted(row[0] for row in rows) == [f"run_{number:03d}" for number in range(1, 5)], kill_at
                assert {path.name for path in (root / "digits").glob("run_*")} == {row[0] for row in rows}
            kill_at += EVERY
        assert codes[-1] == 0
        assert len(codes) > 40 // EVERY
