"""The events of a run on a cluster, written by its job, and read by another machine."""

import base64
import collections
import enum
import importlib
import pickle
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mlx_runtime import Trainer, reattach
from mlx_runtime.companions.jobs.launching import JobState
from mlx_runtime.companions.notebook import cluster_runs
from mlx_runtime.companions.notebook.cluster_job import EventFile, events_name, returned_name
from mlx_runtime.companions.notebook.cluster_runs import ClusterRun
from mlx_runtime.errors import ClusterError, MlxError, UsageError, WorkerLoopError
from mlx_runtime.events import Event, FunctionReport, FunctionReturned, RunEnded, RunInfo, RunStarted
from mlx_runtime.runs import records
from mlx_runtime.runs.folder import RunFolder, claim_run

pytestmark = pytest.mark.process


class Cluster:
    """A dashboard that knows one job.

    Args:
        state: state of the job; None means that the cluster does not answer.
    """

    def __init__(self, state: JobState | None) -> None:
        self._state = state

    def state(self, job: str) -> JobState:
        if self._state is None:
            raise ClusterError("http://head:8265 does not answer")
        return self._state

    def log(self, job: str) -> str:
        return "error: cfg.function is 'train.f', which cannot be imported\nmore\n"

    class address:  # noqa: N801
        url = "http://head:8265"


RUNNING = JobState("RUNNING", "", None)


class Hostile:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("touched"),)


class Unsaved:
    """A value that pickle loads, and torch does not save."""

    def __reduce_ex__(self, protocol: int) -> Any:
        if protocol == 2:
            raise RuntimeError("it has a lock")
        return Unsaved, ()


class Kind(enum.Enum):
    SMALL = 1


@dataclass
class Shape:
    kind: Kind
    width: int


class Net(nn.Module):
    """A model with settings, an activation and a buffer that is not saved; its constructor has an effect."""

    def __init__(self, shape: Shape, file: str | None = None) -> None:
        super().__init__()
        self.shape, self.activation = shape, nn.functional.gelu
        self.layers = nn.Sequential(nn.Linear(shape.width, 2), nn.BatchNorm1d(2), nn.Dropout(0.5))
        self.register_buffer("scale", torch.tensor(3.0), persistent=False)
        if file is not None:
            Path(file).touch()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.activation(self.layers(x)) * self.scale  # type: ignore[no-any-return, operator]


class HostileNet(Net):
    def __reduce__(self) -> Any:
        return Net, (self.shape, "touched")


def follow(folder: RunFolder, cluster: Cluster) -> list[Event]:
    """Return the events that another machine receives, up to the end."""
    _, run = ClusterRun(cluster, "job", folder).start(None)
    events: list[Event] = []
    deadline = time.monotonic() + 30
    while run.ended is None:
        assert time.monotonic() < deadline
        events += run.read()
        time.sleep(0.01)
    return [*events[1:], run.ended]


def returned(rank: int, value: Any) -> FunctionReturned:
    return FunctionReturned(rank, 2, base64.b64encode(pickle.dumps(value)).decode())


def problem(folder: RunFolder) -> str:
    """Return the reason why another machine does not receive the value of rank 0."""
    event, _ = follow(folder, Cluster(JobState("FAILED", "", 1)))
    assert isinstance(event, FunctionReturned)
    assert not event.pickled
    return event.problem


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = claim_run(str(tmp_path), "train")
    records.Record(folder, status="RUNNING", metrics={"loss": 1.0})
    return folder


def write(folder: RunFolder, *events: Event) -> None:
    info = RunInfo(folder.experiment, folder.name, folder.path, folder.location, {}, 1)
    with EventFile("job").open() as file:
        for event in (RunStarted(info), *events):
            file.handle(event)


def test_reports_values_and_the_end_arrive(run: RunFolder) -> None:
    value = {"loss": 0.5, "weights": torch.ones(2), "names": ("a", None)}
    report, error = FunctionReport(({"loss": 1.0}, {"loss": 2.0})), WorkerLoopError("it broke")
    write(run, report, returned(1, value), returned(0, {1, 2}), RunEnded("FAILED", {}, error=error))
    first, second, third, end = follow(run, Cluster(RUNNING))
    assert first == report
    assert isinstance(second, FunctionReturned)
    found = pickle.loads(base64.b64decode(second.pickled))
    assert (second.rank, found.pop("weights").tolist(), found) == (1, [1, 1], {"loss": 0.5, "names": ("a", None)})
    assert isinstance(third, FunctionReturned)
    assert pickle.loads(base64.b64decode(third.pickled)) == {1, 2}
    assert isinstance(end, RunEnded)
    assert (end.status, end.metrics, str(end.error)) == ("FAILED", {"loss": 1.0}, "it broke")


@pytest.mark.parametrize("line", ["not JSON", '{"kind": "RunStarted"}', '{"kind": "FunctionReport", "values": [1]}'])
def test_lines_that_are_no_events_end_the_connection(run: RunFolder, line: str) -> None:
    (run.path / events_name("job")).write_text(f"{line}\n")
    (end,) = follow(run, Cluster(RUNNING))
    assert isinstance(end, RunEnded)
    assert (end.status, type(end.error)) == (cluster_runs.LOST, ClusterError)


def test_a_returned_value_never_runs_code(run: RunFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    write(run, returned(0, 1))
    torch.save(Hostile(), run.path / returned_name("job", 0))
    assert problem(run).startswith("what rank 0 returned cannot be read here: it contains builtins.getattr; return")
    assert not Path("touched").exists()
    (run.path / returned_name("job", 0)).write_bytes(pickle.dumps(Hostile()))
    (end,) = follow(run, Cluster(RUNNING))
    assert isinstance(end, RunEnded)
    assert end.status == cluster_runs.LOST
    assert "returned-job-0.pt does not hold a value" in str(end.error)
    assert not Path("touched").exists()


def test_a_returned_model_arrives_as_it_was(run: RunFolder) -> None:
    net, x = Net(Shape(Kind.SMALL, 3)).eval(), torch.randn(4, 3)
    net(x).sum().backward()
    write(run, returned(0, {"net": net, "loss": 0.5}))
    event, _ = follow(run, Cluster(JobState("FAILED", "", 1)))
    assert isinstance(event, FunctionReturned)
    found = pickle.loads(base64.b64decode(event.pickled))
    assert (type(found["net"]), found["net"].shape, found["loss"]) == (Net, net.shape, 0.5)
    torch.testing.assert_close(found["net"](x), net(x))
    assert [weight.requires_grad for weight in found["net"].parameters()] == [True] * 4


def test_reading_a_model_calls_no_constructor(run: RunFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    write(run, returned(0, 1))
    file = run.path / returned_name("job", 0)
    torch.save(HostileNet(Shape(Kind.SMALL, 3)), file)
    with torch.serialization.safe_globals([Net, Shape, Kind]):
        torch.load(file, weights_only=True)
    assert Path("touched").exists(), "otherwise this file is harmless"
    Path("touched").unlink()
    assert "what rank 0 returned cannot be read here: it calls a constructor; return numbers" in problem(run)
    assert not Path("touched").exists()


def test_a_model_of_a_module_that_is_not_imported_is_refused(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "other_nets.py").write_text("from torch import nn\n\nclass Other(nn.Linear): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    write(run, returned(0, importlib.import_module("other_nets").Other(2, 2)))
    del sys.modules["other_nets"]
    assert "it contains other_nets.Other; import other_nets first, or return numbers, text" in problem(run)
    assert "other_nets" not in sys.modules


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (collections.deque(), "it contains collections.deque; return numbers, text, tensors, models"),
        ([subprocess.Popen], "it contains"),
        (Unsaved(), "it has a lock; return numbers"),
    ],
)
def test_other_values_are_not_sent_back(run: RunFolder, value: Any, reason: str) -> None:
    write(run, FunctionReturned(0, 1, base64.b64encode(pickle.dumps(value)).decode()))
    assert problem(run).startswith(f"what rank 0 returned was not sent back: {reason}")


@pytest.mark.parametrize("address", ["", 8265, "auto", "ftp://head"])
def test_an_address_that_is_none_is_refused(run: RunFolder, address: Any) -> None:
    cure = "is not the address of a cluster; write http://HEAD:8265"
    with pytest.raises(UsageError, match=f"address is {address!r}, which {cure}"):
        reattach(run.location, address=address)
    with pytest.raises(UsageError, match="train/run_001 does not run on a cluster; read it with open_run"):
        reattach(run.location, address="http://head:8265")
    with pytest.raises(UsageError, match="launch needs a cluster: Trainer"):
        Trainer().launch(print)


def test_a_silent_cluster_is_a_lost_connection(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_runs, "RECONNECT_S", 0.1)
    (end,) = follow(run, Cluster(None))
    assert isinstance(end, RunEnded)
    assert isinstance(end.error, MlxError)
    assert (end.status, end.error.hint) == (
        cluster_runs.LOST,
        'Follow it again: reattach("train/run_001", address="http://head:8265")',
    )


@pytest.mark.parametrize("status", ["PENDING", "RUNNING"])
def test_the_end_of_a_job_is_the_end_of_its_run(run: RunFolder, status: str) -> None:
    records.Record(run, status=status)
    (end,) = follow(run, Cluster(JobState("FAILED", "exit code 1", 1)))
    assert isinstance(end, RunEnded)
    error = "cfg.function is 'train.f', which cannot be imported"
    assert (end.status, str(end.error)) == ("FAILED", error)
    record = records.load_record(run)
    assert (record["status"], record.get("error")) == (("FAILED", error) if status == "PENDING" else (status, None))
