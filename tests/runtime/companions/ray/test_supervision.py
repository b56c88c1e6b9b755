"""The parent process of drivers that are retried, with real processes, records and signals, but without a cluster."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faults import wait_for

from mlx_runtime.companions.ray import supervision
from mlx_runtime.companions.ray.supervision import Supervisor
from mlx_runtime.runs import drivers, records
from mlx_runtime.runs.folder import RunFolder, claim_run
from mlx_runtime.runs.records import load_record
from mlx_runtime.storage import documents
from mlx_runtime.storage.leases import this_process

pytestmark = pytest.mark.process

DRIVER = """
import os, signal, sys, time
from mlx_runtime.runs import drivers, records
from mlx_runtime.runs.folder import named_run
from mlx_runtime.storage.leases import this_process

folder = named_run(sys.argv[1], "", "")
attempt = drivers.take_over(folder)
if sys.argv[2] == "die before the record":
    os.kill(os.getpid(), signal.SIGKILL)
before = records.load_record(folder)
record = records.Record(folder, before, **this_process(), status="RUNNING", attempt=attempt)
checkpoint = {"epoch": attempt, "path": f"{folder.checkpoints}/epoch_{attempt}"}

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def succeed():
    record.finish("SUCCEEDED")

def fail():
    record.finish("FAILED", error="ValueError: no")
    sys.exit(1)

def stop(reason, code=143, **fields):
    record.note(stop_reason=reason)
    record.finish("STOPPED", **fields)
    sys.exit(code)

def put_back(reason=None):
    fields = {records.REPLACED: before.get(records.REPLACED) or before, "attempt": attempt, "stop_reason": reason}
    records.Record(folder, before, **this_process(), **fields).withdraw()
    sys.exit(143)

exec(sys.argv[1 + min(attempt, len(sys.argv) - 2)])
"""
"""A driver whose attempts do one thing each."""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setattr(supervision, "PAUSE_S", 0.2)
    monkeypatch.setattr(supervision, "POLL_S", 0.1)
    monkeypatch.setenv("MLX_JOB", "digits-run_001")
    monkeypatch.setattr(supervision, "end_as_stopped", lambda job: None)  # there is no cluster
    folder = claim_run(str(tmp_path), "digits")
    job = {"id": "digits-run_001", "address": "http://head:8265"}
    records.Record(folder, job=job, status="PENDING", start=documents.now(), boot=None, pid=None)
    (tmp_path / "driver.py").write_text(DRIVER)
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    yield folder
    for number, handler in zip((signal.SIGTERM, signal.SIGINT), before, strict=True):
        signal.signal(number, handler)


def supervise(folder: RunFolder, retries: int, *attempts: str) -> tuple[int, dict[str, Any]]:
    """Run drivers that do this in their attempts. Return the exit code, and the record in the end."""
    command = [sys.executable, str(folder.path.parents[1] / "driver.py"), folder.location, *attempts]
    return Supervisor(folder, command, retries).run(), load_record(folder)


def history(record: dict[str, Any]) -> list[tuple[str, str | None]]:
    return [(item["status"], item["error"]) for item in record["attempts"]]


KILLED = ("FAILED", "the driver was killed by SIGKILL (out of memory?)")


def test_a_driver_that_dies_is_followed_by_another(run: RunFolder) -> None:
    code, record = supervise(run, 2, "die()", "die()", "succeed()")
    assert (code, record["status"], record["attempt"], history(record)) == (0, "SUCCEEDED", 3, [KILLED, KILLED])
    log = (run.path / "logs" / "driver.log").read_text().splitlines()
    assert [line.partition(" begins")[0] for line in log] == [
        f"retry     the driver was killed by SIGKILL (out of memory?); retry {number} of 2" for number in (1, 2)
    ]


@pytest.mark.parametrize("resumed", [False, True])
def test_a_driver_that_dies_between_its_claim_and_its_record_is_followed_too(run: RunFolder, resumed: bool) -> None:
    if resumed:
        pending = load_record(run)
        former = {**pending, "status": "FAILED", "end": documents.now()}
        records.Record(run, pending, **{records.REPLACED: former})
    code, record = supervise(run, 2, "die before the record")
    assert (code, record["status"], run.attempts()) == (137, "FAILED", 3)
    assert record["error"] == "the driver was killed by SIGKILL (out of memory?), after 2 of 2 retries"


def test_errors_and_requests_of_users_end_it(run: RunFolder) -> None:
    code, record = supervise(run, 2, "stop('mlx xp stop', latest=checkpoint)")
    assert (code, record["status"], record["attempt"]) == (143, "STOPPED", 1)
    code, record = supervise(run, 2, "", "fail()")
    assert (code, record["status"], record["attempt"], record["error"]) == (1, "FAILED", 2, "ValueError: no")
    code, record = supervise(run, 2, "", "", "die()", "put_back('mlx xp stop')")
    assert (code, record["status"], record["attempt"], record["stop_reason"]) == (143, "STOPPED", 4, "mlx xp stop")


def test_a_preemption_does_not_count(run: RunFolder) -> None:
    preempted = "stop('SIGTERM', latest=checkpoint)"
    code, record = supervise(run, 1, preempted, preempted, "die()", "succeed()")
    assert (code, record["status"]) == (0, "SUCCEEDED")
    assert history(record) == [("STOPPED", "the run was preempted")] * 2 + [KILLED]


def test_a_run_that_is_preempted_before_it_has_resumed_resumes(run: RunFolder) -> None:
    pending = load_record(run)
    former = {**pending, "status": "FAILED", "error": "ValueError: no", "end": documents.now(), "job": None}
    records.Record(run, pending, attempts=records.attempts(former), **{records.REPLACED: former})
    code, record = supervise(run, 1, "put_back()", "succeed()")
    assert (code, record["status"], record["job"]) == (0, "SUCCEEDED", pending["job"])
    assert history(record) == [("FAILED", "ValueError: no"), ("STOPPED", "the run was preempted")]


@pytest.mark.parametrize("way", ["xp stop", "SIGTERM"])
def test_it_stops_during_a_pause(run: RunFolder, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    monkeypatch.setattr(supervision, "PAUSE_S", 60.0)

    def stop() -> None:
        run.ask(run.STOP) if way == "xp stop" else os.kill(os.getpid(), signal.SIGTERM)

    seen = during_the_pause(run, monkeypatch, stop)
    code, record = supervise(run, 1, "die()")
    assert (code, record["status"], history(record)) == (143, "STOPPED", [KILLED])
    assert (run.attempts(), run.STOP in run.names()) == (1, False)
    assert seen["status"] == "WAITING"
    assert seen["waits_for"].startswith("retry 1 of 1 at ")
    assert seen["waits_for"].endswith(" UTC: the driver was killed by SIGKILL (out of memory?)")
    assert records.status_of(seen, "RUNNING") == "WAITING"


def test_a_run_that_somebody_has_resumed_is_left_alone(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lease has expired, for example because this process was frozen; the new driver has already ended."""

    def resume() -> None:
        assert run.claim_attempt(2, this_process() | {"status": "RUNNING", "heartbeat": documents.now()})
        records.Record(run, load_record(run), status="FAILED", attempt=2)

    during_the_pause(run, monkeypatch, resume)
    code, record = supervise(run, 3, "die()")
    assert (code, record["status"], record["attempt"]) == (137, "FAILED", 2)
    assert run.attempts() == 2


def during_the_pause(run: RunFolder, monkeypatch: pytest.MonkeyPatch, action: Callable[[], object]) -> dict[str, Any]:
    """Let the next pause perform an action once its record is written. Return that record when it has."""
    seen: dict[str, Any] = {}
    sleep = time.sleep

    def act(seconds: float) -> None:
        record = load_record(run)
        if record["status"] == "WAITING" and not seen:
            seen.update(record)
            action()
        sleep(seconds)

    monkeypatch.setattr(supervision.time, "sleep", act)
    return seen


def test_a_driver_stops_when_its_parent_is_killed(run: RunFolder) -> None:
    """Otherwise it would train on as a job that is over."""
    body = "signal.signal(signal.SIGTERM, lambda *_: stop('SIGTERM')); record.update(epoch=1); time.sleep(60)"
    driver = str(run.path.parents[1] / "driver.py")
    words = [sys.executable, "-m", supervision.__name__, "1", run.location, driver, run.location, body]
    parent = subprocess.Popen(words)
    wait_for(lambda: load_record(run).get("epoch"), 60)
    parent.kill()
    parent.wait()
    wait_for(lambda: load_record(run)["status"] == "STOPPED", 60)


def test_nobody_else_resumes_it_during_a_pause(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[str] = []

    def resume() -> None:
        monkeypatch.delenv("MLX_JOB")
        with pytest.raises(drivers.UsageError) as error:
            drivers.take_over(run)
        refused.append(str(error.value))
        monkeypatch.setenv("MLX_JOB", "digits-run_001")

    during_the_pause(run, monkeypatch, resume)
    code, record = supervise(run, 1, "die()", "succeed()")
    assert (code, record["status"], record["attempt"]) == (0, "SUCCEEDED", 2)
    assert json.dumps(refused).count(f"being trained by process {os.getpid()}") == 1
