"""Calls that execute the code of a local project: never in this process, and within a time limit.

Each call has a process of its own, forked from a server that has imported torch and the project's code. So what a
constructor does, such as an endless loop, `os._exit` or a change of global state, reaches neither the page nor the next
call. After a call, its process is killed, with those that it started, unless they have left its process group: this is
no sandbox. A change of a file in `src` starts another server; calls that are in progress end on the earlier one.
"""

import contextlib
import itertools
import json
import multiprocessing
import os
import threading
import weakref
from functools import partial
from pathlib import Path
from typing import Any

from mlx_runtime.config.constructors.targets import object_at
from mlx_runtime.config.projects import AN_EXPERIMENT
from mlx_runtime.errors import MlxError, located, printable
from mlx_runtime.runs.sources import code_digest
from mlx_runtime.workers.fork_server import ForkServer

START_S = 120.0
"""Time limit for importing torch and the project's code, which is no part of the time limit of a call."""

_servers: "dict[Path, _Server]" = {}
"""The server of each project. Calls in progress keep an earlier one."""

_lock = threading.Lock()
"""Held while `_servers` changes."""

_numbers = itertools.count()


class NoAnswerError(MlxError):
    """A call did not return in time, or its process ended."""


class _Server:
    """A fork server, which ends when no call uses it any more and the code of its project has changed."""

    def __init__(self, project: Path, digest: str) -> None:
        self.digest, self.forks = digest, ForkServer(fresh=True, folder=project)
        self._lock = threading.Lock()  # held while requests are sent, which must not mix
        weakref.finalize(self, self.forks.close).atexit = False  # then, it closes itself

    def begin(self, number: int, function: str, ours: Any, theirs: Any) -> None:
        """Start a process. The next one waits until it has begun, so that requests never fill their connection."""
        with self._lock, theirs, Path(os.devnull).open("w") as nowhere:
            self.forks.preload(AN_EXPERIMENT.module, function.partition(":")[0])
            self.forks.start(number, partial(_work, function), dict(os.environ), [nowhere, nowhere, theirs])
            theirs.close()
            if not ours.poll(START_S):
                self.forks.close()
        ours.recv_bytes()

    def end(self, number: int) -> None:
        with self._lock, contextlib.suppress(MlxError):  # the server has ended, and all its processes with it
            self.forks.kill(number)
            list(self.forks.exits())  # otherwise they would fill the connection


def call(project: Path, function: str, *args: Any, timeout_s: float = 60.0) -> Any:
    """Call `module:function` of a project in a process of its own, and return its result, which is plain data (JSON).

    Its working directory is the folder of the project, and its output is dropped. Any thread may call this; calls of
    several threads do not wait for each other.

    Raises:
        NoAnswerError: the function has not returned in time, or has ended its process. One line.
        MlxError: the function has raised an exception, or `src` cannot be imported. One line.
    """
    ours, theirs = multiprocessing.Pipe()
    answer, number, server = b"[0]", next(_numbers), _server(project.resolve())
    with ours:
        with contextlib.suppress(MlxError, EOFError, OSError):
            server.begin(number, function, ours, theirs)
            answer = b"[1]"
            ours.send(args)
            answer = ours.recv_bytes() if ours.poll(timeout_s) else b"[]"
        server.end(number)
    match json.loads(answer):
        case [True, value]:
            return value
        case [False, line]:
            raise MlxError(line)
        case []:
            raise NoAnswerError(f"{function} did not return within {timeout_s:g} s, and was stopped")
        case [0]:
            raise MlxError(f"importing src took more than {START_S:g} s, or ended its process")
    raise NoAnswerError(f"{function} returned nothing: its process ended")


def _server(project: Path) -> _Server:
    digest = code_digest(project)
    with _lock:
        server = _servers.get(project)
        if server is None or not server.forks.alive or server.digest != digest:
            server = _servers[project] = _Server(project, digest)
    return server


def _work(function: str, connection: Any) -> int:
    """Call the function in this process, which the server has just started, and send what it returns."""
    connection.send_bytes(b"")
    args = connection.recv()  # in any case: if it ended with unread data, the answer could be lost
    try:
        answer = json.dumps([True, object_at(function.replace(":", "."))(*args)])
    except BaseException as error:  # also Ctrl-C, which no terminal sends here
        answer = json.dumps([False, printable(located(error), one_line=True)])
    connection.send_bytes(answer.encode())
    return 0
