"""The driver of a RayJob: each attempt finds the run of the earlier ones, and only a request of a user ends it."""

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import current_test
from faults import wait_for
from forkserver import Command, Commands

from mlx_runtime.companions.kubernetes import driver
from mlx_runtime.companions.kubernetes.manifest import STOP_DRIVER
from mlx_runtime.runs.folder import RunFolder

pytestmark = pytest.mark.process

LONG = (
    *("cfg.start_workers=0", "cfg.num_epochs=100000", "cfg.debug.limit_batches=2", "cfg.keep_checkpoints=1"),
    "tools.early_stopping.patience=1000000",
)

Attempt = Callable[[], Command]


@pytest.fixture
def attempt(bound: Path, commands: Commands, environment: dict[str, str], tmp_path: Path) -> Iterator[Attempt]:
    """`attempt()` starts the command of one RayJob, as in its pod."""
    started = []
    variables = {"MLX_IN_JOB": "1", "MLX_JOB": "digits-1", "MLX_JOB_ADDRESS": "kube:///digits-1"}
    variables |= {"MLX_STORAGE": str(tmp_path), "TMPDIR": str(tmp_path)} | current_test()
    code = f"import runpy; runpy.run_module({driver.__name__!r}, run_name='__main__', alter_sys=True)"

    def start() -> Command:
        words = ["run_", str(tmp_path), "digits", *LONG]
        started.append(commands.start(bound, words, environment | variables, code))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_a_deleted_pod_resumes_and_a_stopped_run_does_not(attempt: Attempt, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "digits" / "run_001")

    def record() -> dict[str, Any]:
        return json.loads(run.record.read_text()) if run.record.exists() else {}

    def until_epoch(epoch: int, process: Command) -> None:
        wait_for(lambda: process.poll() is not None or (record().get("latest") or {"epoch": -1})["epoch"] >= epoch)
        assert process.poll() is None, process.communicate()

    first = attempt()
    until_epoch(1, first)
    with subprocess.Popen(["/bin/sh", "-c", STOP_DRIVER], env={"TMPDIR": str(tmp_path)}) as hook:
        assert "The job fails, so that Kubernetes starts it again" in first.communicate(timeout=60)[1]
        assert first.returncode == 143
        assert hook.wait(timeout=60) == 0
    saved = record()["latest"]["epoch"]

    second = attempt()
    until_epoch(saved + 1, second)
    run.ask(run.STOP)
    output, errors = second.communicate(timeout=300)
    assert second.returncode == 143
    assert "resuming  digits/run_001" in output
    assert "The job fails" not in errors
    found = record()
    assert (found["status"], found["job"]["id"], len(found["attempts"])) == ("STOPPED", "digits-1", 1)
    assert [path.name for path in (tmp_path / "digits").iterdir()] == ["run_001"]
