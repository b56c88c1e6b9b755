"""The server that a notebook or script keeps for its runs: a process which has imported the experiment.

It is always a new interpreter. The process that starts runs may have threads, CUDA or an older version of the code;
none of them reach a run.
"""

import hashlib
import itertools
import os
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mlx_runtime.storage.uploads import Upload
from mlx_runtime.training.engines.fork_server import ForkServer
from mlx_runtime.training.links import RunProcess

PRELOADED = ("mlx_runtime.training.background", "mlx_runtime.training.engines.in_process")
"""What runs import in addition to what workers do."""

Key = tuple[str, str, tuple[str, ...], Mapping[str, str]]


class WarmServer:
    """A server for the runs of one experiment, as long as `key` stays the same."""

    def __init__(self, key: Key, module: str) -> None:
        self.key = key
        self._server = ForkServer(fresh=True)
        self._server.preload(*PRELOADED, module)
        self._numbers = itertools.count()
        self._codes: dict[int, int] = {}  # exit codes by number
        self._running: set[int] = set()
        self._retired = False
        self._lock = threading.Lock()  # several threads may follow runs

    @property
    def alive(self) -> bool:
        return self._server.alive

    def start(self, target: Callable[[Any], int]) -> tuple[int, RunProcess]:
        """Start a run. Returns the number of its process, and the connection to it."""
        with self._lock:
            number = next(self._numbers)
            process = RunProcess(self._server, number, target, os.environ)
            self._running.add(number)
        return number, process

    def exit_code(self, number: int) -> int | None:
        """Return the exit code of a run's process, or None while it exists.

        Raises:
            MlxError: the server has ended, and all runs with it.
        """
        with self._lock:
            self._codes.update(self._server.exits())
            return self._codes.get(number)

    def kill(self, number: int) -> None:
        """Kill a run's process with all that it has started."""
        with self._lock:
            self._server.kill(number)

    def release(self, number: int) -> None:
        """Forget a run that has ended, and end a server that is no longer kept once nothing runs any more."""
        with self._lock:
            self._running.discard(number)
            if self._retired and not self._running:
                self._server.close()

    def retire(self) -> None:
        """End the server once its runs have ended."""
        with self._lock:
            self._retired = True
            if not self._running:
                self._server.close()


_kept: WarmServer | None = None


def warm_server(module: str) -> WarmServer:
    """Return the server that has imported a module of the experiment in the working directory, or start it.

    A server is used again only for the same code, environment and `sys.path`.
    """
    global _kept
    here = Path.cwd()
    if str(here) not in sys.path:
        sys.path.insert(0, str(here))
    key = key_of(module, here)
    if _kept is None or _kept.key != key or not _kept.alive:
        if _kept is not None:
            _kept.retire()
        _kept = WarmServer(key, module)
    return _kept


def key_of(module: str, project: Path) -> Key:
    """Return what a server depends on: the module, the Python files of the project, `sys.path` and the environment."""
    digest = hashlib.sha256(str(project).encode())
    for path, size in Upload.of(project).files:
        if path.suffix == ".py":
            digest.update(f"\n{path} {size}\n".encode() + (project / path).read_bytes())
    return module, digest.hexdigest(), tuple(sys.path), dict(os.environ)
