"""A run driven from Python: no terminal, no main thread, typed events, and the record at the end."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Mlx
from forkserver import Commands

pytestmark = pytest.mark.process

SCRIPT = """
import json, signal, sys, threading
from mlx_runtime import connect, load_config
from mlx_runtime.events import EpochEnded, RunEnded
from mlx_runtime.driver.driver import Driver
from mlx_runtime.driver.planning import prepare_run
from src.experiment import Experiment

handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
streams = sys.stdout, sys.stderr, sys.breakpointhook
heard, errors = [], []


def drive(driver):
    try:
        driver.run()
    except Exception as error:
        errors.append(f"{type(error).__name__}: {error}")


def stop(event):
    heard.append(event)
    if isinstance(event, EpochEnded) and str(event.epoch) == STOP_AFTER:
        end()


VERB, STOP_AFTER, *overrides = sys.argv[1:]
config = load_config(Experiment, overrides)
with connect(config.cfg) as cluster, prepare_run(Experiment, config, cluster) as plan:
    driver = Driver(plan, [stop])
    end = lambda: driver.control.request("enough", prune=VERB == "prune")
    thread = threading.Thread(target=drive, args=(driver,))
    thread.start()
    thread.join()
assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
assert (sys.stdout, sys.stderr, sys.breakpointhook) == streams
names = list(dict.fromkeys(type(event).__name__ for event in heard))
ended = [event for event in heard if isinstance(event, RunEnded)]
print(json.dumps({
    "names": names, "epochs": [event.epoch for event in heard if isinstance(event, EpochEnded)],
    "status": [event.status for event in ended], "metrics": dict(ended[0].metrics), "errors": errors,
    "record": json.loads((driver.folder.path / "run.json").read_text()),
}))
"""


Drive = Callable[..., dict[str, Any]]


@pytest.fixture
def drive(digits: Path, environment: dict[str, str], commands: Commands) -> Drive:
    """`drive("never", ...)` returns what a script that drives a run in a thread has seen, which is all it prints."""

    def driven(*arguments: str, verb: str = "stop") -> dict[str, Any]:
        done = commands.run(digits, [verb, *arguments], environment, 300, SCRIPT)
        assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
        return dict(json.loads(done.stdout))

    return driven


INTERRUPTED = """
import os, signal
from mlx_runtime.cli import main
from mlx_runtime.driver import driver
from mlx_runtime.driver.run_recorder import RunRecorder

end_early = RunRecorder.end_early


def interrupt(*_):
    os.kill(os.getpid(), signal.SIGINT)


def terminated(self, *arguments, signals=[signal.SIGTERM]):
    if signals:
        os.kill(os.getpid(), signals.pop())
    return end_early(self, *arguments)


driver.may_be_prepared, RunRecorder.end_early = interrupt, terminated
main()
"""


@pytest.mark.local
def test_a_run_passes_its_events_to_listeners(drive: Drive) -> None:
    found = drive("never", "cfg.start_workers=2", "cfg.num_epochs=2")
    assert found["names"][0] == "RunStarted"
    assert found["names"][-1] == "RunEnded"
    assert {"WorkersStarted", "LoopStarted", "LoaderOpened", "CheckpointSaved", "LoopEnded"} < {*found["names"]}
    assert found["epochs"][0] == 0
    assert (found["status"], found["errors"]) == (["SUCCEEDED"], [])
    assert found["record"]["status"] == "SUCCEEDED"
    assert found["record"]["metrics"] == found["metrics"]


def test_a_run_is_stopped_with_a_checkpoint(drive: Drive) -> None:
    found = drive("1", "cfg.start_workers=0", "cfg.num_epochs=1000")
    assert "StopRequested" in found["names"]
    assert (found["status"], found["errors"]) == (["STOPPED"], [])
    assert found["record"]["status"] == "STOPPED"
    assert found["record"]["latest"]["epoch"] >= 1


@pytest.mark.kills
def test_a_pruned_run_resumes_only_if_it_is_named(drive: Drive, digits: Path, mlx: Mlx) -> None:
    here = ("cfg.start_workers=0", "cfg.num_epochs=1000")
    found = drive("1", *here, verb="prune")
    assert (found["status"], found["errors"], found["record"]["status"]) == (["PRUNED"], [], "PRUNED")
    assert found["record"]["latest"]["epoch"] >= 1
    again = mlx(digits, "train", "run", "--resume=auto", *here)
    assert (again.returncode, again.stdout) == (0, "loading   src/experiment.py\n")
    assert again.stderr == "digits/run_001 was pruned. To train it further: mlx train run --resume=run_001\n"
    named = drive("never", "--resume=run_001", "cfg.num_epochs=3")
    assert (named["status"], named["record"]["status"]) == (["SUCCEEDED"], "SUCCEEDED")


@pytest.mark.kills
def test_a_second_interrupt_leaves_no_run_without_an_end(
    digits: Path, environment: dict[str, str], commands: Commands
) -> None:
    """It comes while the end is recorded, like SIGTERM after Ctrl-C."""
    done = commands.run(digits, ["train", "run", "cfg.start_workers=0"], environment, 300, INTERRUPTED)
    assert json.loads((digits / "runs/digits/run_001/run.json").read_text())["status"] == "STOPPED"
    assert done.returncode == 130, done.stderr
