"""The events of a run on a cluster, sent by its job in its log, and read by another machine."""

import base64
import io
import json
import pickle
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mlx_runtime.companions.jobs.launching import JobState
from mlx_runtime.companions.notebook import cluster_runs
from mlx_runtime.companions.notebook.cluster_job import send_event
from mlx_runtime.companions.notebook.cluster_runs import ClusterRun
from mlx_runtime.companions.ray.dashboard import Dashboard
from mlx_runtime.errors import ClusterError, UsageError, WorkerLoopError
from mlx_runtime.events import Event, FunctionReport, FunctionReturned, RunEnded

pytestmark = pytest.mark.process


KEY, FOLDER = "mlx-key", "/ceph/runs/train/run_001"


FAILED = JobState("FAILED", "exit code 1", 1)


class Cluster:
    """A dashboard that knows one job, and its log.

    Args:
        log: the log.
        state: last state of the job.
    """

    def __init__(self, log: str = "", state: JobState = FAILED) -> None:
        self._log, self._state = log, state

    def follow(self, job: str, write: Callable[[str], object]) -> JobState:
        for start in range(0, len(self._log), 1000):
            write(self._log[start : start + 1000])
        return self._state

    def log(self, job: str) -> str:
        return self._log

    class address:  # noqa: N801
        url = "http://head:8265"


class Hostile:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("touched"),)


def follow(cluster: Cluster) -> list[Event]:
    """Return the events that another machine receives, up to the end."""
    run = ClusterRun(cluster, "job", KEY, FOLDER).follow()
    events: list[Event] = []
    deadline = time.monotonic() + 30
    while run.ended is None:
        assert time.monotonic() < deadline
        events += run.read()
        time.sleep(0.01)
    return [*events[1:], run.ended]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """`log(*events)` returns the log of a job that sends these events, among other output."""
    monkeypatch.setenv("MLX_ON", KEY)

    def sent(*events: Event) -> str:
        monkeypatch.setattr(sys, "__stdout__", io.StringIO())
        for event in events:
            send_event(event)
        return f"of the user\n{sys.__stdout__.getvalue()}more\n"

    return sent


def file_frame(rank: int, content: bytes) -> str:
    frame = {"kind": "file", "path": str(rank), "data": base64.b64encode(content).decode()}
    return f"{KEY} {json.dumps(frame)}\n"


def saved(value: Any) -> bytes:
    torch.save(value, buffer := io.BytesIO())
    return buffer.getvalue()


def returned(rank: int, value: Any) -> FunctionReturned:
    return FunctionReturned(rank, 2, base64.b64encode(pickle.dumps(value)).decode())


def test_reports_values_and_the_end_arrive(log: Callable[..., str]) -> None:
    value = {"loss": np.float64(0.5), "weights": torch.ones(20_000), "names": ("a", None)}  # in several frames
    report, error = FunctionReport(({"loss": 1.0}, {"loss": 2.0})), WorkerLoopError("it broke")
    ended = RunEnded("FAILED", {"loss": 1.0}, {"epoch": 1}, error=error)
    first, second, third, end = follow(Cluster(log(report, returned(1, value), returned(0, {1, 2}), ended)))
    assert first == report
    assert isinstance(second, FunctionReturned)
    found = pickle.loads(base64.b64decode(second.pickled))
    assert (second.rank, found.pop("weights").sum(), found) == (1, 20_000, {"loss": 0.5, "names": ("a", None)})
    assert isinstance(third, FunctionReturned)
    assert pickle.loads(base64.b64decode(third.pickled)) == {1, 2}
    assert isinstance(end, RunEnded)
    assert (end.status, end.metrics, end.best, str(end.error)) == ("FAILED", {"loss": 1.0}, {"epoch": 1}, "it broke")


def test_lines_that_are_no_events_end_the_connection() -> None:
    frame = {"kind": "out", "data": base64.b64encode(b'{"kind": "FunctionReport", "values": [1]}\n').decode()}
    (end,) = follow(Cluster(f"{KEY} {json.dumps(frame)}\n"))
    assert isinstance(end, RunEnded)
    assert (end.status, type(end.error)) == (cluster_runs.LOST, ClusterError)


def test_a_returned_value_never_runs_code(
    log: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    event = f"{KEY} {log(returned(0, 1)).partition(KEY)[2].partition(KEY)[2].strip()}\n"  # without its own file
    for content in (saved(Hostile()), pickle.dumps(Hostile())):
        (end,) = follow(Cluster(file_frame(0, content) + event))
        assert isinstance(end, RunEnded)
        assert end.status == cluster_runs.LOST
        assert "what rank 0 returned is not a value" in str(end.error)
        assert not Path("touched").exists()


def test_other_values_are_not_sent_back(log: Callable[..., str]) -> None:
    reason = "it contains torch.nn.modules.linear.Linear; return numbers, text, tensors, or"
    event, _ = follow(Cluster(log(returned(0, nn.Linear(2, 1)))))
    assert isinstance(event, FunctionReturned)
    assert not event.pickled
    assert event.problem.startswith(f"what rank 0 returned was not sent back: {reason}")


def test_the_end_of_a_job_is_the_end_of_its_run() -> None:
    (end,) = follow(Cluster("error: cfg.function is 'train.f', which cannot be imported\nmore\n"))
    assert isinstance(end, RunEnded)
    assert (end.status, str(end.error)) == ("FAILED", "cfg.function is 'train.f', which cannot be imported")
    (end,) = follow(Cluster("", JobState("STOPPED")))
    assert (end.status, end.error) == ("STOPPED", None)


def test_a_run_is_found_among_the_jobs_of_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[dict[str, Any]] = []
    found = Cluster()
    found.jobs = lambda: jobs  # type: ignore[attr-defined]
    monkeypatch.setattr(Dashboard, "connect", lambda where: found)
    address = "http://head:8265"
    with pytest.raises(UsageError, match="head:8265 has no run train/run_001 to reattach to; its job is forgotten"):
        cluster_runs.find("train/run_001", address)
    known = {"experiment": "train", "run": "run_001", "function": "f", "key": KEY, "folder": FOLDER}
    jobs += [
        {"submission_id": "resumed", "start_time": 2, "metadata": known | {"key": "new"}},
        {"submission_id": "first", "start_time": 1, "metadata": known},
        {"submission_id": "command", "start_time": 3, "metadata": {"experiment": "train", "run": "run_001"}},
    ]
    run = cluster_runs.find("train/run_001", address)
    assert (run.job, run.key, run.folder, run.function) == ("resumed", "new", FOLDER, "f")
    jobs.append({"submission_id": "of another", "start_time": 4, "metadata": known | {"folder": "/nfs/train/run_001"}})
    assert cluster_runs.find(FOLDER, address).job == "resumed"
    with pytest.raises(UsageError, match=f"several runs train/run_001; name its folder: {FOLDER}, /nfs/train"):
        cluster_runs.find("train/run_001", address)
