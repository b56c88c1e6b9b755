"""The server that a notebook or script keeps for its runs: a process that has imported their libraries.

It is always a new interpreter, and it never imports the code of an experiment, because each run does so itself. So
threads, CUDA or an older version of the code in the process that starts runs cannot affect them.
"""

import ast
import contextlib
import importlib.util
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlx_runtime.companions.notebook.links import RunProcess
from mlx_runtime.workers.fork_server import ForkServer

PRELOADED = ("mlx_runtime.companions.notebook.background", "mlx_runtime.workers.worker")
"""Modules that runs import in addition to those of workers."""

Key = tuple[str, tuple[str, ...], Mapping[str, str]]
"""State that a server depends on: the working directory, `sys.path` and the environment."""


class WarmServer:
    """A server for the runs of this process, as long as `key` stays the same."""

    def __init__(self, key: Key) -> None:
        self.key = key
        self._server = ForkServer(fresh=True)
        self._server.preload(*PRELOADED)
        self._numbers = itertools.count()
        self._codes: dict[int, int] = {}  # exit codes by number
        self._running: set[int] = set()
        self._retired = False
        self._lock = threading.Lock()  # several threads may follow runs

    @property
    def alive(self) -> bool:
        return self._server.alive

    def preload(self, *modules: str) -> None:
        """Import further modules, once for all runs."""
        with self._lock:
            self._server.preload(*modules)

    def start(self, target: Callable[[Any], int]) -> tuple[int, RunProcess]:
        """Start a run. Return the number of its process, and the connection to it."""
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
        """Kill the process of a run, with all processes that it has started."""
        with self._lock:
            self._server.kill(number)

    def release(self, number: int) -> None:
        """Forget a run that has ended. A retired server ends with its last run."""
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


def get_server(module: str) -> WarmServer:
    """Return a server for the experiment of a module in the working directory: the previous one, or a new one.

    A server is reused only with the same environment variables and `sys.path`.
    """
    global _kept
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    key = (here, tuple(sys.path), dict(os.environ))
    if _kept is None or _kept.key != key or not _kept.alive:
        if _kept is not None:
            _kept.retire()
        _kept = WarmServer(key)
    _kept.preload(*libraries(module))
    return _kept


def libraries(module: str) -> list[str]:
    """Return the installed modules that the files in the package of a module import at their top level."""
    package = sys.modules.get(module.partition(".")[0]) or sys.modules[module.rpartition(".")[0]]
    files = [path for folder in getattr(package, "__path__", ()) for path in Path(folder).rglob("*.py")]
    names: set[str] = set()
    for file in files or [Path(getattr(package, "__file__", None) or "")]:  # the module of a cell has no file
        with contextlib.suppress(OSError, SyntaxError, ValueError):  # the run reports it
            names.update(_imported_modules(ast.parse(file.read_bytes()).body))
    return sorted(filter(_is_installed, names))


def _imported_modules(statements: Sequence[ast.stmt]) -> Iterator[str]:
    for node in statements:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
        elif isinstance(node, ast.Try):
            yield from _imported_modules(node.body)


def _is_installed(name: str) -> bool:
    """Return True if a module is in an installed package, which nobody edits between two runs."""
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(name.partition(".")[0])
        return spec is not None and not {"site-packages", "dist-packages"}.isdisjoint(Path(spec.origin or "").parts)
    return False
