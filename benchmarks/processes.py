"""What a command costs from outside: seconds, and CPU seconds of every process that it started."""

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
"""Seconds that processes which outlive their command may take; those that stay longer are killed."""


@dataclass(frozen=True)
class Cost:
    """What a run took.

    Attributes:
        pid: of the command's own process.
        started: `time.time()` just before it.
        wall_s: until that process ended.
        cpu_s: user and system seconds of all processes.
    """

    pid: int
    started: float
    wall_s: float
    cpu_s: float


def cost(command: Command, folder: Path, variables: Mapping[str, str]) -> Cost:
    """Run a command, and wait until everything it started has ended.

    Raises:
        RunError: its exit code is not 0.
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
        with _Processes(process.pid, f"{MARK}-{mark}".encode()) as processes:
            _, status, usage = os.wait4(process.pid, 0)
            wall_s = time.time() - started
            process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            printed.seek(0)
            raise RunError(command, printed.read())
    # Neither counts anything twice, and both may miss something: the kernel's sum has children only if their parents
    # waited for them, which Ray's do not, and the last look at a process is up to 0.1 s older than its end.
    return Cost(process.pid, started, wall_s, max(usage.ru_utime + usage.ru_stime, processes.cpu_s))


class _Processes:
    """All processes of a command, looked at ten times a second for the CPU seconds they have used.

    A process belongs to it if the process that started it does, or if it has inherited the mark in its environment:
    daemons have lost their parents, and some programs write their title over their environment. This needs no right to
    make control groups, and found what a control group counted, less 3 % for Ray and less 1 % for others. Looking takes
    1.5 % of a core.
    """

    def __init__(self, pid: int, mark: bytes) -> None:
        self._mark = mark
        self._alive = {pid}
        self._strangers: set[int] = set()
        self._ticks: dict[tuple[int, bytes], int] = {}  # by pid and time of start: pids come again
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look_on, daemon=True)

    @property
    def cpu_s(self) -> float:
        return sum(self._ticks.values()) / os.sysconf("SC_CLK_TCK")

    def __enter__(self) -> "_Processes":
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
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
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
        except PermissionError:  # somebody else's
            return False
