"""Events survive encoding unchanged, and other messages are rejected."""

import json

import pytest

from mlx_runtime import events
from mlx_runtime.events import (
    CheckpointSaved,
    DatasetsPrepared,
    EpochEnded,
    Event,
    FunctionReport,
    FunctionReturned,
    LoaderOpened,
    LoopEnded,
    LoopStarted,
    Notice,
    PreparationProgress,
    Report,
    StepProgress,
    WarningNotice,
    WorkerConnected,
    WorkerOutput,
    WorkerPosition,
    WorkersLost,
    WorkersStarted,
    WorkerStalled,
    WorkersWaiting,
)

pytestmark = pytest.mark.pure

EVENTS: tuple[Event, ...] = (
    WorkerConnected(3),
    WorkersWaiting("3 CPUs, 2 free"),
    PreparationProgress("train", 10, 100),
    DatasetsPrepared({"train": "Rows-1"}, "s3://bucket/prepared", "2026-01-01T00:00:00+00:00"),
    WorkersStarted("cpu", 1_000, 2),
    LoopStarted(),
    LoaderOpened("train", True, 100, 10, 20, 5),
    StepProgress("train", 0, 5, 10, 33.5, {"train/loss": 0.5}),
    EpochEnded(0, 5, {"train/loss": 1, "val/loss": 0.25}, 12.5, samples_per_s=100.0, row_counts={"tokens": 64}),
    Report(10, 0, {"train/loss": 0.5}, {"hostname": "here", "pid": 7}),
    CheckpointSaved(0, True, 10, "s3://bucket/x", {"val/loss": 0.25}),
    Notice("slow", once=True),
    FunctionReport(({"loss": 0.5, "epoch": 1}, {"loss": 0.25, "epoch": 2**63})),
    FunctionReturned(1, 2, "gASVBgAAAAAAAACMAmhpLg=="),
    WarningNotice("not finite"),
    WorkerOutput("a\nb", to_stderr=True),
    WorkersLost((1, 2), "was killed by SIGKILL"),
    WorkerStalled(600.0),
    WorkerPosition(1, 0, "train", 5, "src/experiment.py:3 in worker_loop", "all_reduce", 9.0),
    LoopEnded({"test/accuracy": 0.9}, stopped=False, logged=("a", "b")),
)


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_events_survive_the_wire(event: Event) -> None:
    assert events.decode(events.encode(event)) == event


def test_every_kind_is_tested() -> None:
    assert {type(event) for event in EVENTS} == set(events.KINDS.values())


@pytest.mark.parametrize(
    "message",
    [
        *(b"", b"\xff\x00", b"{", b"null", b"[]", b'"hello"', b"{}", b"[" * 100_000),
        *(
            b'{"kind": 1}',
            b'{"kind": []}',
            b'{"kind": "unknown"}',
            b'{"kind": "WorkerConnected"}',
            b'{"kind": "WorkerConnected", "rank": "0"}',
        ),
        *(b'{"kind": "WorkerConnected", "rank": true}', b'{"kind": "WorkerConnected", "rank": 0, "more": 1}'),
        json.dumps({"kind": "WorkersLost", "ranks": [0, "1"], "why": ""}).encode(),
        json.dumps({"kind": "LoopEnded", "metrics": {"x": "1"}, "stopped": False}).encode(),
        json.dumps({"kind": "LoopEnded", "metrics": [], "stopped": False}).encode(),
    ],
)
def test_anything_else_is_refused(message: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the message does not matter
        events.decode(message)
