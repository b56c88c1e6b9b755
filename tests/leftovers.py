"""A plugin for pytest and its watcher process, which make sure that no process outlives the tests that started it.

All processes started by a test session inherit a variable that names the session. Those that remain after the last
test are killed, and fail the session. If pytest itself is killed, the watcher process kills them.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterable
from pathlib import Path

import pytest

NAME = "TESTS_OF_SESSION"

ENDING_S = float(os.environ.get("TESTS_ENDING_S", 180))
"""How long processes may take to end after the last test; Ray's agents take minutes to notice a killed driver."""

KILLING_S = 60.0
"""How long to look for processes that those to be killed have just started."""

REAPER = pytest.StashKey["subprocess.Popen[bytes]"]()

LEFT = pytest.StashKey["dict[int, str]"]()
"""What was left behind: process ids and descriptions."""


def left(session: str) -> dict[int, str]:
    """Return the processes of a session and what they are, without this process and its children."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            variables = dict(pair.split("=", 1) for pair in strings(entry / "environ") if "=" in pair)
            if variables.get(NAME) == session:
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if os.getpid() not in (int(parent), int(entry.name)):
                    test = variables.get("PYTEST_CURRENT_TEST", "an unknown test")
                    command = " ".join(strings(entry / "cmdline")).strip()
                    found[int(entry.name)] = f"{command} (started by {test}, state {state}, parent {parent})"
    return found


def strings(file: Path) -> list[str]:
    return file.read_bytes().decode(errors="replace").split("\0")


def kill(find: Callable[[], Iterable[int]]) -> None:
    """Send SIGKILL to processes, and to those that they have just started, until none is found."""
    until = time.monotonic() + KILLING_S
    while (pids := find()) and time.monotonic() < until:
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


@pytest.hookimpl(tryfirst=True)  # before xdist starts its workers
def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # workers inherit the variable
        session = f"{os.getpid()}-{time.time_ns()}"
        command = [sys.executable, __file__, session]
        config.stash[REAPER] = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        os.environ[NAME] = session


@pytest.hookimpl(wrapper=True, trylast=True)  # after xdist's workers have ended, before the summary
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, object, object]:
    result = yield
    if REAPER in session.config.stash:
        mark, until = os.environ[NAME], time.monotonic() + ENDING_S
        while left(mark) and time.monotonic() < until:
            time.sleep(0.1)
        if found := left(mark):
            session.config.stash[LEFT] = found
            kill(lambda: left(mark))
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
    return result


@pytest.hookimpl(trylast=True)  # at the end, where it is seen
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for pid, what in config.stash.get(LEFT, {}).items():
        terminalreporter.write_line(f"left behind, and killed: process {pid}: {what}", red=True)


def pytest_unconfigure(config: pytest.Config) -> None:
    if (reaper := config.stash.get(REAPER, None)) is not None:
        reaper.kill()
        reaper.communicate()


if __name__ == "__main__":
    sys.stdin.read()  # until pytest ends
    kill(lambda: left(sys.argv[1]))


def marked(mark: Path | str, name: str = "MLX_TEST_MARK") -> list[int]:
    """Return the living processes that have inherited a variable with this value."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdecimal() and f"{name}={mark}\0".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


def of_session(leader: int) -> list[int]:
    """Return the living processes of a session: of a command and what it has started, whatever their variables."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(session) == leader and state != "Z":
                found.append(int(entry.name))
    return found
