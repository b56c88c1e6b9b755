"""Trials as processes on this machine: real runs, started, stopped, pruned and killed by the engine."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Mlx, Script
from faults import reports

from mlx_runtime.companions.sweeps.engine import Engine, slots
from mlx_runtime.errors import ConfigError, UsageError
from mlx_runtime.loop.options import TrainConfig

SCRIPT = """
import contextlib, json, os, signal, sys, threading, time
from dataclasses import replace
from pathlib import Path
from mlx_runtime.settings import prepare_fork
prepare_fork()
from mlx_runtime.config.projects import AN_EXPERIMENT, main_class
main_class(AN_EXPERIMENT, Path.cwd())
import torch._dynamo, torch.utils.tensorboard, ray.train.torch  # once for all servers
from mlx_runtime.events import EpochEnded
from mlx_runtime.runs import records
from mlx_runtime.runs.folder import claim_run
from mlx_runtime.companions.sweeps import engine as trials
from mlx_runtime.companions.sweeps.trial import TrialJob
from mlx_runtime.loop.options import TrainConfig


trials.EXIT_S = 60  # more than any of these trials takes


class Trials:
    "A sweep whose trials are given by their overrides, and what is to happen to each after its first epoch."

    def __init__(self, *plans, act):
        self.plans, self.act = list(plans), act
        self.stopping = self.killing = False
        self.pids, self.outcomes, self.epochs, self.started, self.running, self.most = {}, {}, {}, {}, 0, 0

    def next(self):
        if len(self.epochs) == len(self.plans):
            return None
        number = len(self.epochs) + 1
        overrides = self.plans[number - 1]
        run = claim_run(str(Path.cwd() / "runs"), "faults").location
        self.epochs[number], self.started[number] = [], time.monotonic()
        self.running += 1
        self.most = max(self.most, self.running)
        return TrialJob("sweep_001", number, None, {"cfg.seed": "0"}, run, overrides)

    def handle(self, job, event):
        if not isinstance(event, EpochEnded):
            return False
        self.epochs[job.trial].append(event.values["val/mse"])
        self.pids[job.trial] = records.load_record(job.folder)["pid"]
        return self.act(self, job)

    def ended(self, job, status, error=""):
        self.running -= 1
        took_s = time.monotonic() - self.started[job.trial]
        self.outcomes[job.trial] = {"run": job.run, "status": status, "error": error, "took_s": took_s}


def mixed(sweep, job):
    if job.trial == 4:
        os.kill(sweep.pids[4], signal.SIGKILL)
    return job.trial == 3


def stop(sweep, job):
    sweep.stopping = all(sweep.epochs.values()) and len(sweep.epochs) == 2
    return False


def terminate(pid):
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            terminate(child)
        os.kill(int(pid), signal.SIGTERM)


def signal_and_stop(sweep, job):
    "Signal one trial before it is asked to stop, and the other one after that, each with all that it has started."
    stop(sweep, job)
    if sweep.stopping:
        time.sleep(1)  # both are in their second epoch
        terminate(sweep.pids[1])
        time.sleep(0.3)
        threading.Timer(0.5, terminate, [sweep.pids[2]]).start()
    return False


def carry_out(*plans, act=lambda sweep, job: False, gpus=0):
    sweep = Trials(*plans, act=act)
    with contextlib.closing(trials.Engine(TrainConfig(start_workers=0), parallel=2)) as engine:
        engine._room = replace(engine._room, gpus=gpus)
        engine.run(sweep)
    return {"outcomes": sweep.outcomes, "epochs": sweep.epochs, "most": sweep.most}


print("not for the terminal of a sweep", file=sys.stderr)
here, one_worker = ("cfg.start_workers=0", "cfg.num_epochs=1"), ("cfg.start_workers=1", "cfg.num_epochs=2")
slow = ("cfg.start_workers=0", "cfg.num_epochs=1000", "cfg.checkpoint_every_steps=3")
slow += ("cfg.pause_s=0.2", "cfg.pause_from=16")  # after the first epoch
slow_worker = ("cfg.start_workers=1", *slow[1:])
failing, wrong = (*here, "cfg.late=raise"), (*here, "cfg.sead=1")
found = {"mixed": carry_out(here, failing, slow, slow_worker, wrong, one_worker, act=mixed)}
slower = ("cfg.pause_s=3", "cfg.checkpoint_every_steps=null")
found["signalled"] = carry_out((*slow, *slower), (*slow_worker, *slower), act=signal_and_stop)
found["without"] = carry_out(here, gpus=1)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def folder(make_in: Callable[[str, Path], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_in("faults", tmp_path_factory.mktemp("trials"))


@pytest.fixture(scope="module")
def found(script: Script, folder: Path) -> dict[str, Any]:
    """What three sweeps have seen, of which nothing else is printed."""
    return script(folder, SCRIPT, stderr="not for the terminal of a sweep\n")


def outcome(found: dict[str, Any], sweep: str, trial: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what the engine said of a run, and its record."""
    said = found[sweep]["outcomes"][str(trial)]
    return said, json.loads(Path(said["run"], "run.json").read_text())


@pytest.mark.kills
class TestTrials:
    @pytest.mark.parametrize(("trial", "epochs"), [(6, 2)])
    def test_a_trial_is_an_ordinary_run(
        self, trial: int, epochs: int, found: dict[str, Any], folder: Path, mlx: Mlx
    ) -> None:
        said, record = outcome(found, "mixed", trial)
        assert (said["status"], said["error"], record["status"]) == ("SUCCEEDED", "", "SUCCEEDED")
        assert record["sweep"] == {"name": "sweep_001", "trial": trial, "fold": None, "values": {"cfg.seed": "0"}}
        assert len(found["mixed"]["epochs"][str(trial)]) == epochs
        values = [line["val/mse"] for line in reports(Path(said["run"])) if "val/mse" in line]
        assert values == found["mixed"]["epochs"][str(trial)]
        log = Path(said["run"], "logs", "driver.log").read_text()
        assert f"run       faults {Path(said['run']).name}" in log
        options = (f"cfg.start_workers={trial // 6}", f"cfg.num_epochs={epochs}", "cfg.name=by_hand")
        by_hand = mlx(folder, "train", "run", *options)
        assert by_hand.returncode == 0, by_hand.stderr
        run = sorted(folder.glob("runs/by_hand/run_*"))[-1]
        assert [line["val/mse"] for line in reports(run) if "val/mse" in line] == values

    def test_errors_end_their_trial_only(self, found: dict[str, Any]) -> None:
        said, record = outcome(found, "mixed", 2)
        assert (said["status"], record["status"]) == ("FAILED", "FAILED")
        assert said["error"] == record["error"]
        assert said["error"].startswith("ValueError: on purpose (raised on rank 0)")
        assert "error: ValueError: on purpose" in Path(said["run"], "logs", "driver.log").read_text()
        said, record = outcome(found, "mixed", 5)  # before it began
        assert (said["status"], record["status"], record["sweep"]["trial"]) == ("FAILED", "FAILED", 5)
        assert said["error"] == record["error"]
        assert "there is no key 'cfg.sead'" in said["error"]
        assert said["took_s"] < 60  # its process was not killed for not exiting

    def test_a_trial_is_pruned(self, found: dict[str, Any]) -> None:
        said, record = outcome(found, "mixed", 3)
        assert (said["status"], said["error"], record["status"]) == ("PRUNED", "", "PRUNED")
        assert record["latest"]["epoch"] < 20

    def test_a_trial_that_is_killed_has_failed(self, found: dict[str, Any], mlx: Mlx, folder: Path) -> None:
        said, record = outcome(found, "mixed", 4)
        why = "its process was killed by SIGKILL (out of memory?)"
        assert (said["status"], said["error"]) == ("FAILED", why)
        assert (record["status"], record["error"]) == ("FAILED", why)
        assert Path(said["run"], "logs", "driver.log").read_text().endswith(f"error: {why}\n")

    def test_a_trial_that_lacks_its_gpu_does_not_train(self, found: dict[str, Any]) -> None:
        said, _ = outcome(found, "without", 1)
        assert (said["status"], found["without"]["epochs"]["1"]) == ("FAILED", [])
        assert said["error"].startswith("trial 1 should train on 1 GPUs, but its process finds 0 for 1 workers")

    def test_not_more_run_at_a_time_than_there_are_slots(self, found: dict[str, Any]) -> None:
        assert found["mixed"]["most"] == 2

    def test_a_signal_besides_a_request_to_stop_does_not_cost_the_checkpoint(self, found: dict[str, Any]) -> None:
        """`ray job stop` and systemd signal all processes of a sweep, and then the sweep asks its trials to stop."""
        for trial in (1, 2):
            said, record = outcome(found, "signalled", trial)
            assert (said["status"], record["status"]) == ("STOPPED", "STOPPED")
            assert record["latest"]["epoch"] == 1, record["latest"]


@pytest.mark.pure
class TestSlots:
    """On a machine with 8 cores and as many GPUs as each test says."""

    @pytest.fixture(autouse=True)
    def cores(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("os.cpu_count", lambda: 8)
        monkeypatch.setattr("os.sched_getaffinity", lambda _: range(8))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    @pytest.mark.parametrize(
        ("cfg", "parallel", "fitting"),
        [
            ({"start_workers": 0}, None, 8),
            ({"start_workers": 3}, None, 2),
            ({"start_workers": 1}, 5, 5),
        ],
    )
    def test_cores(self, cfg: dict[str, Any], parallel: int | None, fitting: int) -> None:
        room = slots(TrainConfig(**cfg), parallel)
        assert room.environments == ({"CUDA_VISIBLE_DEVICES": ""},) * fitting
        assert room.gpus == 0

    def test_a_job_that_may_use_some_of_the_cores(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As many trials as fit on these by default, but as many as the user asks for."""
        monkeypatch.setattr("os.sched_getaffinity", lambda _: range(3))
        assert len(slots(TrainConfig(start_workers=1)).environments) == 3
        assert len(slots(TrainConfig(start_workers=4)).environments) == 1
        assert len(slots(TrainConfig(start_workers=1), 5).environments) == 5

    @pytest.mark.parametrize(
        ("workers", "gpus_per_trial", "parallel", "devices"),
        [
            (1, None, None, ["0", "1", "2", "3"]),
            (2, None, None, ["0,1", "2,3"]),
            (1, 0.5, None, ["0", "1", "2", "3"] * 2),
            (8, None, None, [""]),  # more workers than GPUs train on cores, as in a run
            (1, 0.0, 2, ["", ""]),
        ],
    )
    def test_gpus(
        self,
        workers: int,
        gpus_per_trial: float | None,
        parallel: int | None,
        devices: list[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
        room = slots(TrainConfig(start_workers=workers), parallel, gpus_per_trial)
        assert [item["CUDA_VISIBLE_DEVICES"] for item in room.environments] == devices
        assert bool(room.gpus) == bool(devices[0])

    def test_gpus_keep_their_names(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-7")
        room = slots(TrainConfig(start_workers=1))
        assert [item["CUDA_VISIBLE_DEVICES"] for item in room.environments] == ["5", "GPU-7"]

    @pytest.mark.parametrize(
        ("cfg", "asked", "message"),
        [
            ({"start_workers": 2}, (5, None), "cannot run 5 trials at a time: each needs 2 of 8 cores, .* 4 fit"),
            ({"start_workers": 1}, (3, None), "cannot run 3 trials at a time: each needs 1 of 2 GPUs, .* 2 fit"),
            (
                {"start_workers": 2},
                (None, 0.5),
                "--gpus-per-trial is 0.5 for 2 workers: each needs whole GPUs",
            ),
            ({"start_workers": 1, "use_gpu": False}, (None, 1.0), "--gpus-per-trial 1 contradicts cfg.use_gpu=false"),
            ({"cpus_per_worker": 9}, (None, None), "cfg.cpus_per_worker=9, but this machine has 8 CPUs"),
        ],
    )
    def test_what_does_not_fit_is_refused(
        self,
        cfg: dict[str, Any],
        asked: tuple[int | None, float | None],
        message: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0 if cfg.get("start_workers") == 2 and asked[0] else 2)
        with pytest.raises((ConfigError, UsageError), match=message) as error:
            slots(TrainConfig(**cfg), *asked)
        assert "\n" not in str(error.value)

    @pytest.mark.parametrize(
        ("variables", "message"),
        [
            ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}, "torchrun cannot train sweeps"),
            ({"MLX_IN_JOB": "1"}, "set cfg.start_workers=1"),
        ],
    )
    def test_where_a_sweep_cannot_train(
        self, variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        with pytest.raises((ConfigError, UsageError), match=message):
            Engine(TrainConfig(start_workers=0))
