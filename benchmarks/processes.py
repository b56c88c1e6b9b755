"""Measures the cost of a command: wall seconds, and CPU seconds of every process that it started."""

import contextlib
import os
import signal
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from commands import Command, RunError

MARK = "MLX_BENCH_RUN"
INTERVAL_S = 0.1
LEAVING_S = 30
"""Seconds that processes may outlive their command before they are killed."""


@dataclass(frozen=True)
class Cost:
    """Cost of a run.

    Attributes:
        pid: process id of the command itself.
        started: `time.time()` just before the start.
        wall_s: seconds until that process ended.
        cpu_s: user and system seconds of all processes.
    """

    pid: int
    started: float
    wall_s: float
    cpu_s: float


def cost(command: Command, folder: Path, variables: Mapping[str, str]) -> Cost:
    """Run a command and wait until all processes that it started have ended.

    Raises:
        RunError: the exit code is not 0.
    """
    mark = uuid.uuid4().hex
    with tempfile.TemporaryFile("w+") as printed:
        started = time.time()
        process = subprocess.Popen(
            list(map(str, command)),
            cwd=folder,
            env={**variables, MARK: f"{MARK}-{mark}"},
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        with Processes(process.pid, f"{MARK}-{mark}".encode()) as processes:
            _, status, usage = os.wait4(process.pid, 0)
            wall_s = time.time() - started
            process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            printed.seek(0)
            raise RunError(command, printed.read())
    # Neither sum counts anything twice, but both may miss something: the kernel includes children only if their parents
    # waited for them, which Ray's do not, and the last sample of a process is up to 0.1 s older than its end.
    return Cost(process.pid, started, wall_s, max(usage.ru_utime + usage.ru_stime, processes.cpu_s))


class Processes:
    """All processes of a command, sampled ten times a second for the CPU seconds that they have used.

    A process belongs to the command if its parent does, or if it has inherited a mark in its environment: daemons have
    lost their parents, and some programs overwrite their environment with their title. Unlike a control group, this
    needs no permissions; the results are 3 % lower than those of a control group for Ray, and 1 % for others. Sampling
    takes 1.5 % of a core.
    """

    def __init__(self, pid: int, mark: bytes) -> None:
        self._mark = mark
        self._alive = {pid}
        self._strangers: set[int] = set()
        self._ticks: dict[tuple[int, bytes], int] = {}  # by pid and start time, because pids are reused
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look_on, daemon=True)

    @property
    def cpu_s(self) -> float:
        return sum(self._ticks.values()) / os.sysconf("SC_CLK_TCK")

    def __enter__(self) -> "Processes":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        deadline = time.monotonic() + LEAVING_S
        while self._alive and time.monotonic() < deadline:
            time.sleep(INTERVAL_S)
        self._over.set()
        self._thread.join()
        for pid in self._alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _look_on(self) -> None:
        while not self._over.wait(INTERVAL_S):
            self._look()

    def _look(self) -> None:
        present = {int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()}
        self._strangers &= present
        alive = set()
        for pid in present - self._strangers:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the process has just ended
                found = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()  # man 5 proc, from field 3
                state, parent, ticks, started = found[0], int(found[1]), int(found[11]) + int(found[12]), found[19]
                if (pid, started) in self._ticks or pid in self._alive or parent in self._alive or self._marked(pid):
                    self._ticks[pid, started] = ticks
                    if state != b"Z":
                        alive.add(pid)
                else:
                    self._strangers.add(pid)
        self._alive = alive

    def _marked(self, pid: int) -> bool:
        try:
            return self._mark in Path(f"/proc/{pid}/environ").read_bytes()
        except PermissionError:  # a process of another user
            return False
