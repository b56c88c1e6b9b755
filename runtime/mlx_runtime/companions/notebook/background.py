"""Runs started from Python: the processes that train them, without a terminal, and the server that forks these.

The server is a new interpreter that has imported the libraries of the experiment, and is kept for later runs. It never
imports the code of an experiment, because each run does so itself. So threads, CUDA or an older version of the code in
the process that starts runs cannot affect them.
"""

import contextlib
import importlib.util
import itertools
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from mlx_runtime import companions
from mlx_runtime.companions.notebook.links import Link, RunProcess
from mlx_runtime.config.binding.conf_file import bind
from mlx_runtime.config.projects import AN_EXPERIMENT, CONF, project_module
from mlx_runtime.driver.arguments import Request
from mlx_runtime.driver.planning import connect
from mlx_runtime.driver.request import RunConfig, load_config
from mlx_runtime.driver.terminal import fit
from mlx_runtime.errors import MlxError, RunStopped
from mlx_runtime.events import Event, RunEnded
from mlx_runtime.importing import add_to_path
from mlx_runtime.settings import prepare_fork
from mlx_runtime.workers.fork_server import EXIT_S, ForkServer, exit_reason
from mlx_runtime.workers.local import cool_down, warm_up
from mlx_runtime.workers.worker import ignore_breakpoints

NO_TERMINAL = "a run started from Python has no terminal; to debug, use mlx train run cfg.start_workers=0"

PRELOADED = (__name__, "mlx_runtime.workers.worker")
"""Modules that runs import in addition to those of workers."""


@dataclass(frozen=True)
class RunJob:
    """The run that a process trains."""

    module: str  # module of the experiment's class, like `src.experiment`
    name: str  # name of that class
    request: Request
    command: tuple[str, ...]  # command line of the requesting process, for the record
    function: str = ""  # import path of the training function, if `Trainer` requested the run
    address: str = ""  # dashboard of the remote cluster that trains it

    @property
    def title(self) -> str:
        """Import path of the class or function that the user runs."""
        return self.function or f"{self.module}.{self.name}"

    def resume_call(self, place: str) -> str:
        """Return Python code that resumes the run at a path or URI."""
        name = self.title.rpartition(".")[2]
        if self.function:
            return f'trainer.run({name}, resume="{place}")'
        cluster = f', address="{self.address}"' if self.address else ""
        return f'run({name}, ["--resume={place}"]{cluster})'


def work(job: RunJob, connection: Any) -> int:
    """Train a run in this process, which the server has just started, in the folder of the experiment."""
    prepare_fork()
    sys.orig_argv = list(job.command)
    warm_up()  # before anything starts threads
    link = Link(connection)
    ended: RunEnded | None = None

    def handle(event: Event) -> None:
        nonlocal ended
        ended = event if isinstance(event, RunEnded) else ended
        link.emit(event)

    error: BaseException | None = None
    try:
        ignore_breakpoints(link.emit, NO_TERMINAL)
        experiment = getattr(project_module(job.module, Path.cwd()), job.name)
        config = load_bound_config(experiment, job.request, job.title)
        if job.function:  # report its errors before the run begins
            companions.part("notebook.functions").load_function(config.cfg)
        with connect(config.cfg) as cluster:
            fit(experiment, config, cluster, listeners=[handle], control=link.control, resume_call=job.resume_call)
    except BaseException as caught:
        error = caught
    cool_down()  # an unused server would keep this process from exiting
    unbegun = RunEnded("STOPPED" if isinstance(error, KeyboardInterrupt | RunStopped) else "FAILED", {})
    link.finish(replace(ended or unbegun, error=error))
    return 0


def load_bound_config(experiment: type, request: Request, title: str) -> RunConfig:
    """Return the checked config of an experiment. If the project has no conf.yaml, write one first."""
    with conf_of(experiment) as conf:
        if not conf.is_file():
            bind(experiment, conf).write()
        return load_config(experiment, request, conf, title=None if conf is CONF else title)


@contextlib.contextmanager
def conf_of(experiment: type) -> Iterator[Path]:
    """Provide the conf.yaml of an experiment within the block.

    For `src.experiment`, it is the project's own file. For other modules, such as the cells of a notebook, it contains
    the defaults in their code.
    """
    if experiment.__module__ == AN_EXPERIMENT.module:
        yield CONF
        return
    with tempfile.TemporaryDirectory(prefix="mlx-conf-") as folder:
        conf = Path(folder, CONF.name)
        bind(experiment, conf).write()
        yield conf


Key = tuple[str, tuple[str, ...], tuple[tuple[str, str], ...]]
"""State that a server depends on: the working directory, `sys.path` and the environment."""

_servers: "dict[Key, _Server]" = {}

_lock = threading.RLock()
"""Held while a server is used, because several threads may follow runs."""


def _forget_servers() -> None:
    """Forget the servers of the process that has forked this one, which cannot use them."""
    global _lock
    _lock = threading.RLock()
    _servers.clear()


os.register_at_fork(after_in_child=_forget_servers)


class _Server:
    def __init__(self) -> None:
        self.fork_server = ForkServer(fresh=True)
        self.numbers = itertools.count()
        self.codes: dict[int, int | None] = {}  # exit codes of runs by number; None while they train

    def is_idle(self) -> bool:
        """Return True if no run trains, or if the server has ended."""
        with contextlib.suppress(MlxError):
            self.codes.update(self.fork_server.exits())
        return not self.fork_server.alive or None not in self.codes.values()


class BackgroundRun(RunProcess):
    """The process of a run in the working directory, as seen by this process.

    It is forked from the server of earlier runs if the environment variables and `sys.path` are still the same.
    """

    def __init__(self, job: RunJob) -> None:
        add_to_path(here := Path.cwd())
        key = (str(here), tuple(sys.path), tuple(sorted(os.environ.items())))
        with _lock:
            for other, server in list(_servers.items()):
                if server.is_idle() and not (other == key and server.fork_server.alive):
                    _servers.pop(other).fork_server.close()
            if key not in _servers:
                _servers[key] = _Server()
            self._server = _servers[key]
            self._server.fork_server.preload(*PRELOADED, *libraries(job.title))
            self._number = next(self._server.numbers)
            self._server.codes[self._number] = None
            super().__init__(self._server.fork_server, self._number, partial(work, job), os.environ)

    def read(self) -> Iterator[Event]:
        exited = self._has_exited()  # before the events are read, so that none is missed
        yield from super().read()
        if self.ended is None and (self.closed or exited):
            self.ended = RunEnded("FAILED", {}, error=self._lost())
        if self.ended is not None:
            self._server.codes[self._number] = 0  # of no interest any more

    def kill(self) -> None:
        """Kill the process, with all processes that it has started."""
        with _lock:
            self._server.fork_server.kill(self._number)

    def _has_exited(self) -> bool:
        with contextlib.suppress(MlxError), _lock:
            self._server.codes.update(self._server.fork_server.exits())
            return self._server.codes[self._number] is not None
        return True  # with the server

    def _lost(self) -> MlxError:
        codes, deadline = self._server.codes, time.monotonic() + EXIT_S
        try:
            with _lock:
                while codes[self._number] is None and time.monotonic() < deadline:
                    codes.update(self._server.fork_server.exits(EXIT_S))
        except MlxError as error:  # of the server
            return error
        return MlxError(f"the process of the run {exit_reason(codes[self._number])}")


def libraries(path: str) -> list[str]:
    """Return the installed modules from which the files in the package of a class or function have imported."""
    package = path.partition(".")[0]
    modules = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == package]
    found = set()
    for value in [value for module in modules if hasattr(module, "__file__") for value in list(vars(module).values())]:
        if isinstance(value, type | FunctionType):
            found.add(str(value.__module__))
        elif isinstance(value, ModuleType):
            found.add(value.__name__)
    return sorted(filter(_is_installed, found))


def _is_installed(name: str) -> bool:
    """Return True if a module is in an installed package, which nobody edits between two runs."""
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(name.partition(".")[0])
        return spec is not None and not {"site-packages", "dist-packages"}.isdisjoint(Path(spec.origin or "").parts)
    return False
