"""Positions of workers in user code: for the detection of deadlocks, and for `mlx xp ps`.

Every worker notes each of its steps. If it has taken none for `cfg.elastic.hang_timeout_s`, it notifies the driver. The
driver then asks all workers for their positions, and decides.
"""

import contextlib
import dataclasses
import math
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from mlx_runtime.errors import HangError, StorageError
from mlx_runtime.events import Event, WorkerPosition, WorkerStalled
from mlx_runtime.runs.folder import RunFolder
from mlx_runtime.storage import documents
from mlx_runtime.storage.documents import COUNT, FLAG, NUMBER, TEXT, TIME, list_of, mapping_with
from mlx_runtime.storage.files import storage_at, to_json

ANSWER_S = 5.0
"""Time that workers have to report their positions."""

POSITIONS = "positions.json"
"""File in the run folder with the latest answer to `RunFolder.LOCATE`."""

_WORKER = mapping_with(
    {
        **{"rank": COUNT, "epoch": COUNT, "step": COUNT, "seconds": NUMBER, "gpu": FLAG, "at": TEXT},
        **{"stage": TEXT.or_null(), "waits_in": TEXT.or_null(), "host": TEXT, "pid": COUNT},
    },
    needs=("rank", "epoch", "step", "seconds", "at", "stage", "waits_in", "host", "pid"),
)
SHAPE = {"time": TIME, "workers": list_of(_WORKER), "world_size": COUNT}


def locate(position: WorkerPosition, thread: int, project: Path, seconds: float = 0.0) -> WorkerPosition:
    """Return the position of a thread of this process, or of another one in which user code waits for other workers."""
    stacks = {key: [item for item, _ in traceback.walk_stack(frame)] for key, frame in sys._current_frames().items()}
    frames = stacks.pop(thread, [])
    if _collective(frames) is None:
        waiting = (item for item in stacks.values() if _collective(item) and _users_line(item, project))
        frames = next(waiting, frames)
    at, host = _users_line(frames, project), socket.gethostname()
    waits_in = _collective(frames)
    return dataclasses.replace(position, at=at, waits_in=waits_in, seconds=seconds, host=host, pid=os.getpid())


def answer_request(folder: RunFolder, positions: Iterable[WorkerPosition], world_size: int) -> None:
    """Store positions in the run folder, in answer to a request."""
    found = {"time": documents.now(), "world_size": world_size, "workers": [vars(item) for item in positions]}
    with contextlib.suppress(OSError, StorageError):  # the client reports that no answer has come
        storage_at(folder.location).write(to_json(found).encode(), POSITIONS)
        folder.withdraw(folder.LOCATE)


def answer_here(folder: RunFolder, position: WorkerPosition | None = None) -> None:
    """Store the position of a run that trains in the main thread of this process, or has no workers yet."""
    answer_request(folder, [locate(position or WorkerPosition(0), threading.main_thread().ident or 0, Path.cwd())], 1)


def read_answer(folder: RunFolder) -> dict[str, Any]:
    """Return the stored positions; raises OSError or ValueError if there are none."""
    return documents.from_json(folder.document(POSITIONS), SHAPE, needs=tuple(SHAPE))


def _users_line(frames: Sequence[FrameType], project: Path) -> str:
    for frame in frames:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(project) and "site-packages" not in file.parts:
            return f"{file.relative_to(project)}:{frame.f_lineno} in {frame.f_code.co_name}"
    return ""


def _collective(frames: Sequence[FrameType]) -> str | None:
    """Return the call that waits for other workers, if Python can observe it."""
    outermost = None
    for frame in frames:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if file.endswith("torch/distributed/distributed_c10d.py") and not name.startswith("_"):
            outermost = name
        elif "/mlx_runtime/distributed/" in file and outermost is None:
            outermost = f"{name} of mlx_runtime"
        elif file.endswith("torch/autograd/graph.py") and outermost is None:
            return "backward (the all_reduce of gradients)"
        elif file.endswith("torch/nn/parallel/distributed.py") and outermost is None:
            return "forward of DistributedDataParallel (the broadcast of buffers)"
    return outermost


class Watchdog:
    """Watches the thread that creates it, in a worker, and sends a `WorkerStalled` whenever `timeout_s` have passed
    without a step. `progress` returns rank, epoch, stage and step.
    """

    def __init__(
        self, timeout_s: float, send: Callable[[Event], None], progress: Callable[[], WorkerPosition], project: Path
    ) -> None:
        self._timeout_s, self._send, self._progress, self._project = timeout_s, send, progress, project
        self._thread = threading.get_ident()
        self._last_step = time.monotonic()
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def beat(self) -> None:
        """Note a step."""
        self._last_step = time.monotonic()

    def close(self) -> None:
        self._closed.set()

    def position(self) -> WorkerPosition:
        """Return the position of the watched thread, or of another one in which user code waits for other workers."""
        return locate(self._progress(), self._thread, self._project, time.monotonic() - self._last_step)

    def _watch(self) -> None:
        last_sent = self._last_step
        while not self._closed.wait(min(1.0, self._timeout_s / 4)):
            if time.monotonic() - max(self._last_step, last_sent) > self._timeout_s:
                last_sent = time.monotonic()
                self._send(WorkerStalled(last_sent - self._last_step))


class DeadlockDetector:
    """Runs in the driver, and asks all workers for their positions when one has stalled.

    `ask` makes every worker send its position. `timeout_s` is that of the watchdogs; a worker that has taken a step
    since is busy, not deadlocked.
    """

    def __init__(self, ask: Callable[[], None], timeout_s: float) -> None:
        self._ask, self._busy_s = ask, min(ANSWER_S, timeout_s / 2)
        self._positions: dict[int, WorkerPosition] = {}  # answers to the latest request
        self._world_size = 0
        self._deadline = math.inf
        self._stalled_s = 0.0

    def handle(self, event: Event) -> None:
        match event:
            case WorkerStalled(seconds) if self._deadline == math.inf:
                self._stalled_s, self._deadline = seconds, time.monotonic() + ANSWER_S
                self._request()
            case WorkerPosition(rank):
                self._positions[rank] = event

    def _request(self) -> dict[int, WorkerPosition]:
        """Ask the workers for their positions. Return those that arrive."""
        self._positions = {}
        self._ask()
        return self._positions

    def locate(self, folder: RunFolder) -> None:
        """Answer a request for the positions of all workers. Called in a thread of its own."""
        found, deadline = self._request(), time.monotonic() + ANSWER_S
        while len(found) < self._world_size and time.monotonic() < deadline:
            time.sleep(0.05)
        answer_request(folder, [found[rank] for rank in sorted(found)], self._world_size)

    def check(self, world_size: int) -> None:
        """Raise a `HangError` if the workers are deadlocked, after all have answered or the time is over."""
        self._world_size = world_size
        answered = len(self._positions) >= world_size
        if self._deadline == math.inf or (not answered and time.monotonic() < self._deadline):
            return
        self._deadline = math.inf
        text = verdict(self._positions, world_size, self._busy_s)
        if text is not None:
            raise HangError(
                f"the workers have taken no step for {self._stalled_s:.0f} s:\n  {text}\n"
                "If a step may take that long, raise cfg.elastic.hang_timeout_s"
            )


def verdict(positions: Mapping[int, WorkerPosition], world_size: int, busy_s: float = 0.0) -> str | None:
    """Describe deadlocked workers, one line per rank, given the positions that have arrived; None if they are busy.

    They are deadlocked if one of them waits for others, or does not answer. On GPUs, where Python cannot observe
    waiting, they are deadlocked if they are at different steps or lines. A rank that took a step within `busy_s` is
    busy.
    """
    silent = [rank for rank in range(world_size) if rank not in positions]
    if any(position.seconds < busy_s for position in positions.values()):
        return None
    apart = len({(position.step, position.at) for position in positions.values() if position.gpu}) > 1
    if not silent and not apart and not any(position.waits_in for position in positions.values()):
        return None
    return "\n  ".join(
        f"rank {rank} does not answer: its process is stopped, or its node is unreachable"
        if rank in silent
        else _describe(positions[rank])
        for rank in range(world_size)
    )


def _describe(position: WorkerPosition) -> str:
    activity = f"has been waiting in {position.waits_in}" if position.waits_in else "has been busy"
    stage = f"{position.stage} step {position.step}" if position.stage else "before the first pass"
    at = f", {position.at}" if position.at else ""
    return f"rank {position.rank} {activity} for {position.seconds:.0f} s: epoch {position.epoch + 1}, {stage}{at}"
