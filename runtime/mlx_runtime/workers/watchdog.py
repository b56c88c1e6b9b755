"""Detects deadlocked workers, and reports the position of each.

Every worker notes each of its steps. If it has taken none for `cfg.elastic.hang_timeout_s`, it notifies the driver. The
driver then asks all workers for their positions, and decides.
"""

import math
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from mlx_runtime.errors import HangError
from mlx_runtime.events import Event, WorkerPosition, WorkerStalled
from mlx_runtime.runs.folder import RunFolder
from mlx_runtime.workers.positions import ANSWER_S, answer_request, collect, located, place_of


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
        place = place_of(self._thread, self._project)
        return located(self._progress(), place, time.monotonic() - self._last_step)

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
        self._positions: dict[int, WorkerPosition] = {}
        self._requested: dict[int, WorkerPosition] = {}  # by `locate`, in another thread
        self._world_size = 0
        self._deadline = math.inf
        self._stalled_s = 0.0

    def handle(self, event: Event) -> None:
        match event:
            case WorkerStalled(seconds) if self._deadline == math.inf:
                self._positions, self._stalled_s = {}, seconds
                self._deadline = time.monotonic() + ANSWER_S
                self._ask()
            case WorkerPosition(rank):
                self._positions[rank] = self._requested[rank] = event

    def locate(self, folder: RunFolder) -> None:
        """Answer a request for the positions of all workers. Called in a thread of its own."""
        answer_request(folder, collect(self._ask, self._requested, self._world_size), self._world_size)

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
