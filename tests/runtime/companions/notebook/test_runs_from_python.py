"""Runs from Python, as in a script: an iterator of epochs, stopped in several ways, and warm processes.

tests/template/test_notebook.py covers the most important cases in an inner ring.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Script
from faults import wait_for
from leftovers import marked

from mlx_runtime import BaseModule, open_run, run
from mlx_runtime.errors import UsageError

pytestmark = pytest.mark.kills

SCRIPT = """
import json, os, signal, threading, time
from pathlib import Path
from mlx_runtime import MlxError, open_run, run
from mlx_runtime.events import StepProgress
from mlx_runtime.companions.notebook import background
from src.experiment import Experiment


class Own(Experiment):
    pass


def refused(experiment, *overrides):
    try:
        run(experiment, overrides)
    except MlxError as error:
        return type(error).__name__, str(error)


def interrupt(event):
    if isinstance(event, StepProgress) and event.step > 2:
        os.kill(os.getpid(), signal.SIGINT)


def fail(event):
    if failed or isinstance(event, StepProgress):
        failed.append(event)
        raise ValueError("a bug in a listener")


if __name__ == "__main__":
    threading.Thread(target=time.sleep, args=[600], daemon=True).start()  # a notebook has some
    failed = []
    found = {"refused": [refused(Own), refused(Experiment, "cfg.num_epoch=3")]}

    first = run(Experiment, ["cfg.num_epochs=2", "cfg.monitor=val/mse", "cfg.mode=min"])
    found["epochs"] = [[each.epoch, each.epochs, sorted(each.metrics)] for each in first]
    found["checkpoint"] = first.checkpoint_path
    outcome = first.result()
    found["outcome"] = [outcome.status, outcome.run.record["status"], outcome.metrics, outcome.best["path"]]
    servers = list(background._servers.values())

    for each in run(Experiment, ["cfg.num_epochs=50", "cfg.start_workers=0", "cfg.pause_s=0.01"]):
        break
    found["inside"] = [os.getpid()]

    running = run(Experiment, ["cfg.num_epochs=50", "cfg.pause_s=0.05"], listeners=[interrupt])
    try:
        running.result()
    except KeyboardInterrupt as error:
        found["interrupted"] = [running.status, error.__notes__]
    found["resumed"] = run(Experiment, ["--resume=run_003", "cfg.num_epochs=1", "cfg.pause_s=0"]).result().status

    running = run(Experiment, ["cfg.num_epochs=50", "cfg.start_workers=0", "cfg.pause_s=0.01"], listeners=[fail])
    try:
        running.result()
    except ValueError:
        found["listened"] = [running.status, len(failed)]

    settings = ["cfg.num_epochs=50", "cfg.start_workers=0", "cfg.pause_s=0.01"]
    stopping = run(Experiment, settings, listeners=[lambda event: isinstance(event, StepProgress) and stopping.stop()])
    found["stopped"] = [len(list(stopping)) < 50, stopping.status]

    source = Path("src/experiment.py")
    text = source.read_text().replace('"raise": ValueError("on purpose")', '"raise": ValueError("edited")')
    saving = "self.save_checkpoint(epoch=epoch)"
    source.write_text(text.replace(saving, f"{saving}; self.go_wrong('raise')"))
    failing = run(Experiment, ["cfg.start_workers=0", "++cfg.name=other", "--overfit=1"])
    try:
        failing.result()
    except MlxError as error:
        found["failed"] = [type(error).__name__, str(error).splitlines()[0], error.hint]
    found["warm"] = list(background._servers.values()) == servers

    os.environ["OMP_NUM_THREADS"] = "2"  # libraries may have read another value
    running = run(Experiment, ["cfg.num_epochs=50", "cfg.start_workers=0", "cfg.pause_s=0.01", "++cfg.name=other"])
    os.kill(open_run(running.folder).record["pid"], signal.SIGKILL)
    try:
        running.result()
    except MlxError as error:
        found["killed"] = [running.status, str(error)]
    found["others"] = [servers[0].fork_server.alive, len(background._servers)]
    print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def folder(make_in: Callable[[str, Path], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_in("faults", tmp_path_factory.mktemp("api"))


@pytest.fixture(scope="module")
def found(script: Script, folder: Path) -> dict[str, Any]:
    """What a script has seen that starts several runs, one after another."""
    return script(folder, SCRIPT)


def status(folder: Path, name: str) -> tuple[str, bool]:
    """Return the recorded status of a run, and whether it has a checkpoint."""
    record = open_run(folder / "runs" / "faults" / name).record
    return record["status"], record["latest"] is not None


def test_a_run_yields_its_epochs_and_returns_its_outcome(found: dict[str, Any], folder: Path) -> None:
    place = folder / "runs" / "faults" / "run_001"
    assert [entry[:2] for entry in found["epochs"]] == [[0, 2], [1, 2]]
    assert all("val/mse" in names and "train/mse" in names for _, _, names in found["epochs"])
    assert found["checkpoint"] == str(place / "checkpoints" / "epoch_0002")
    status, recorded, metrics, best = found["outcome"]
    assert (status, recorded) == ("SUCCEEDED", "SUCCEEDED")
    assert "val/mse" in metrics
    assert best.startswith(str(place / "checkpoints"))
    assert open_run(place).record["command"] == f"{sys.executable} script.py"


def test_leaving_the_loop_stops_the_run_with_a_checkpoint(found: dict[str, Any], folder: Path) -> None:
    assert status(folder, "run_002") == ("STOPPED", True)
    assert open_run(folder / "runs/faults/run_002").record["pid"] not in found["inside"]  # even without workers


def test_an_interrupted_run_stops_with_a_checkpoint_and_resumes(found: dict[str, Any], folder: Path) -> None:
    place = folder / "runs" / "faults" / "run_003"
    resume = f'run(Experiment, ["--resume={place}"])'
    assert found["interrupted"] == ["STOPPED", [f"{place} is STOPPED. Resume: {resume}"]]
    assert found["resumed"] == "SUCCEEDED"
    assert open_run(folder / "runs/faults/run_003").record["attempt"] == 2


def test_a_listener_that_fails_at_every_event_stops_the_run_with_a_checkpoint(
    found: dict[str, Any], folder: Path
) -> None:
    assert found["listened"] == ["STOPPED", 1]
    assert status(folder, "run_004") == ("STOPPED", True)


def test_a_listener_may_stop_its_run(found: dict[str, Any], folder: Path) -> None:
    assert found["stopped"] == [True, "STOPPED"]
    assert status(folder, "run_005") == ("STOPPED", True)


def test_what_cannot_train_is_refused_in_one_line(found: dict[str, Any]) -> None:
    (kind, own), (other, override) = found["refused"]
    assert (kind, other) == ("UsageError", "ConfigError")
    assert own == "workers cannot import Own from a script; move it to a file in src/"
    assert override.startswith("override cfg.num_epoch=3: there is no key 'cfg.num_epoch' in src/conf.yaml.")


def test_later_runs_start_warm_and_see_edits(found: dict[str, Any], folder: Path) -> None:
    assert found["warm"]
    kind, text, hint = found["failed"]
    assert (kind, text) == ("WorkerLoopError", "ValueError: edited (raised on rank 0)")
    place = folder / "runs" / "other" / "run_001"
    assert hint == f'Resume from the last checkpoint: run(Experiment, ["--resume={place}"])'
    assert open_run(place).config["cfg"]["debug"]["overfit_batches"] == 1


def test_a_killed_run_is_named_and_another_environment_has_another_server(found: dict[str, Any]) -> None:
    assert found["killed"] == ["FAILED", "the process of the run was killed by SIGKILL (out of memory?)"]
    assert found["others"] == [False, 1]


@pytest.mark.pure
def test_what_cannot_be_a_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"overrides is the string 'cfg.seed=1'; write a list: \['cfg.seed=1'\]"):
        run(BaseModule, "cfg.seed=1")
    with pytest.raises(UsageError, match=r"None is neither a class nor a function"):
        run(None)  # type: ignore[arg-type]
    (tmp_path / "starting.py").write_text("from mlx_runtime import run\nclass Own: ...\nrun(Own)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match=r"starting starts a run while it is imported, .* a cell without %%mlx"):
        import starting  # noqa: F401


ENDLESS = """
from mlx_runtime import run
from src.experiment import Experiment

for epoch in run(Experiment, ["cfg.num_epochs=500", "cfg.pause_s=0.01"]):
    print(epoch.folder, flush=True)
"""


def test_a_killed_kernel_leaves_no_processes(
    make_in: Callable[[str, Path], Path], tmp_path: Path, environment: dict[str, str]
) -> None:
    folder = make_in("faults", tmp_path)
    (folder / "script.py").write_text(ENDLESS)
    marks = environment | {"MLX_TEST_MARK": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "script.py"], cwd=folder, env=marks, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        place = process.stdout.readline().strip()
        process.kill()
    wait_for(lambda: not marked(tmp_path), 60)
    assert open_run(place).record["status"] == "RUNNING"  # STALE, once its heartbeat is old
