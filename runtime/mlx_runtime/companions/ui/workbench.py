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
from collections.abc import Iterator
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

_servers: "dict[Path, list[_Server]]" = {}
"""Of each project: the last one is used, and earlier ones have calls in progress."""

_lock = threading.Lock()
"""Held while `_servers` or a number of users changes."""

_numbers = itertools.count()


class NoAnswerError(MlxError):
    """A call did not return in time, or its process ended."""


class _Server(ForkServer):
    def __init__(self, project: Path, digest: str) -> None:
        self.digest, self.users = digest, 0  # calls in progress
        self.lock = threading.Lock()  # held while requests are sent, which must not mix
        super().__init__(fresh=True, folder=project)

    def begin(self, number: int, function: str, ours: Any, theirs: Any) -> None:
        """Start a process. The next one waits until it has begun, so that requests never fill their connection."""
        with self.lock, theirs, Path(os.devnull).open("w") as nowhere:
            self.preload(AN_EXPERIMENT.module, function.partition(":")[0])
            self.start(number, partial(_work, function), dict(os.environ), [nowhere, nowhere, theirs])
            theirs.close()
            if not ours.poll(START_S):
                self.close()
        ours.recv_bytes()

    def end(self, number: int) -> None:
        with self.lock, contextlib.suppress(MlxError):  # the server has ended, and all its processes with it
            self.kill(number)
            list(self.exits())  # otherwise they would fill the connection


class Workbench:
    """The processes that execute the code of a project.

    Args:
        project: Folder of the experiment, and the working directory of the calls.
    """

    def __init__(self, project: Path) -> None:
        self.project = project.resolve()

    def call(self, function: str, *args: Any, timeout_s: float = 60.0) -> Any:
        """Call `module:function` in a process of its own, and return its result, which is plain data (JSON).

        Its output is dropped. Any thread may call this; calls of several threads do not wait for each other.

        Raises:
            NoAnswerError: the function has not returned in time, or has ended its process. One line.
            MlxError: the function has raised an exception, or `src` cannot be imported. One line.
        """
        ours, theirs = multiprocessing.Pipe()
        answer, number = b"[0]", next(_numbers)
        with ours, self._server() as server:
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

    @contextlib.contextmanager
    def _server(self) -> Iterator[_Server]:
        """Provide the server of the project, which does not end within the block."""
        digest, servers = code_digest(self.project), _servers.setdefault(self.project, [])
        with _lock:
            if not servers or not servers[-1].alive or servers[-1].digest != digest:
                servers.append(_Server(self.project, digest))
            server = servers[-1]
            server.users += 1
        try:
            yield server
        finally:
            with _lock:
                server.users -= 1
                unused = [item for item in servers[:-1] if not item.users]
                servers[:] = [item for item in servers if item not in unused]
            for item in unused:
                item.close()


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
