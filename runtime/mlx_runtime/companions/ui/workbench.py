"""Calls that execute the code of a local project: never in this process, and within a time limit.

Each call has a process of its own, forked from a server that has imported torch and the project's code. So what a
constructor does, such as an endless loop, `os._exit` or a change of global state, reaches neither the page nor the next
call. The server starts anew when a file in `src` has changed.
"""

import contextlib
import json
import multiprocessing
import os
import re
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

from mlx_runtime.config.constructors.targets import object_at
from mlx_runtime.config.projects import AN_EXPERIMENT
from mlx_runtime.errors import MlxError, full_message, printable, user_errors
from mlx_runtime.importing import add_to_path
from mlx_runtime.runs.sources import code_digest
from mlx_runtime.workers.fork_server import EXIT_S, ForkServer, exit_reason

_servers: "dict[Path, _Server]" = {}

_lock = threading.Lock()
"""Held while a server is used, because all tabs of a page share it."""


class _Server(ForkServer):
    """The server of a project, with the exit codes of ended processes."""

    def __init__(self, project: Path) -> None:
        self.digest = code_digest(project)  # before the code is imported, so that a later change is noticed
        self.codes: dict[int, int] = {}
        before = [*sys.path]
        add_to_path(project)  # the server inherits the path; this process never imports the project
        super().__init__(fresh=True)
        sys.path[:] = before

    def end(self, number: int) -> int | None:
        """End a process, and return its exit code: its own if it had ended already."""
        with contextlib.suppress(MlxError):  # the server has ended, and all its processes with it
            self.kill(number)
            while number not in self.codes and (found := dict(self.exits(EXIT_S))):
                self.codes.update(found)
            if number not in self.codes:  # the server hangs in an import
                self.close()
        return self.codes.pop(number, None)


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
            MlxError: the function has raised an exception, ended its process, or not ended in time. One line.
        """
        ours, theirs = multiprocessing.Pipe(duplex=False)
        with ours:  # as long as it is open, no other call has the number of its descriptor
            with _lock, theirs, Path(os.devnull).open("w") as nowhere:
                server = _servers.get(self.project)
                if server is None or not server.alive or server.digest != code_digest(self.project):
                    if server is not None:
                        server.close()
                    server = _servers[self.project] = _Server(self.project)
                server.preload(AN_EXPERIMENT.module, function.partition(":")[0])
                work = partial(_work, self.project, function, args)
                server.start(ours.fileno(), work, dict(os.environ), [nowhere, nowhere, theirs])
            answer = b""
            with contextlib.suppress(EOFError, OSError):
                answer = ours.recv_bytes() if ours.poll(timeout_s) else b"[]"
            with _lock:
                code = server.end(ours.fileno())
        match json.loads(answer or b"null"):
            case [True, value]:
                return value
            case [False, line]:
                raise MlxError(line)
            case []:
                raise MlxError(f"{function} did not return within {timeout_s:g} s, and was stopped")
        raise MlxError(f"{function} returned nothing: its process {exit_reason(code)}")


def _work(project: Path, function: str, args: tuple[Any, ...], connection: Any) -> int:
    """Call the function in this process, which the server has just started, and send what it returns."""
    os.chdir(project)
    try:
        with user_errors(project, _located):
            answer = json.dumps([True, object_at(function.replace(":", "."))(*args)])
    except MlxError as error:
        answer = json.dumps([False, printable(" ".join(full_message(error).split()), one_line=True)])
    connection.send_bytes(answer.encode())
    return 0


def _located(error: BaseException, summary: str, frames: str) -> MlxError:
    """Return the error with the innermost line of the project's code."""
    lines = re.findall(r"^ {2}([^/ ].*) in ", frames, re.MULTILINE)  # files of libraries are absolute
    return MlxError(f"{summary} ({lines[-1]})" if lines else summary)
