"""The fork server of the local engine: a process that starts workers on request and reports how each of them ended.

It is forked from the driver as soon as the driver has imported the experiment, so that workers begin with torch and
`src` loaded. Where forking is not safe, the server and the workers are new interpreters. The server never trains and
has one thread.
"""

import atexit
import contextlib
import gc
import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import connection, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, NoReturn, cast

from mlx_runtime.errors import MlxError
from mlx_runtime.importing import many_imports
from mlx_runtime.settings import Settings
from mlx_runtime.training.engines.processes import (
    die_with_parent,
    exit_reason,
    held_signals,
    kill_group,
    leave_the_terminal,
    unsafe_to_fork,
)

Channel = Connection  # takes type parameters since Python 3.13

PRELOADED = ("mlx_runtime.training.engines.worker", "torch._dynamo", "torch.utils.tensorboard")
"""What workers import in addition to the driver: imported once, in the server, while the driver prepares the run."""

EXIT_S = 10.0
"""How long the server may take to exit."""

PRELOAD, KILL = "preload", "kill"
"""Requests to import what workers need, and to kill all workers."""


@dataclass(frozen=True)
class Start:
    """Request to start one worker per environment, followed by two file descriptors each: its stdout and stderr."""

    job: bytes  # pickled `WorkerJob`
    environments: list[dict[str, str]]  # by rank


class ForkServer:
    """The driver's handle of the server. The constructor starts it.

    `spawns` is the reason why workers are new interpreters; None if they are forks.
    """

    def __init__(self) -> None:
        self.spawns = "MLX_START_METHOD=spawn" if Settings.read().spawn else unsafe_to_fork()
        context = multiprocessing.get_context("spawn" if self.spawns else "fork")
        if not self.spawns:
            gc.freeze()  # so that workers share the memory of imported modules
        self._control, servers_end = context.Pipe()
        inherited = None if self.spawns else self._control
        self._process: Any = cast(Any, context).Process(target=serve, args=(servers_end, inherited), name="fork server")
        if self.spawns:  # otherwise it starts during `start`, and unblocks signals
            resource_tracker.ensure_running()
        with held_signals(), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 counts any thread as unsafe
            self._process.start()
            atexit.register(self.close)  # before multiprocessing waits for its children
        servers_end.close()

    def preload(self) -> None:
        """Import what workers need, in the background."""
        self._send(PRELOAD)

    def start(self, job: bytes, environments: list[dict[str, str]], streams: list[tuple[Any, Any]]) -> None:
        """Start one worker per environment; `streams` are their stdout and stderr, and `job` a pickled `WorkerJob`."""
        self._send(Start(job, environments))
        try:
            for stream in (stream for pair in streams for stream in pair):
                send_handle(self._control, stream.fileno(), self._process.pid)
        except OSError as error:
            raise self._error() from error

    def kill_workers(self) -> None:
        """Kill all workers with the processes that they have started."""
        self._send(KILL)

    def exits(self, timeout_s: float = 0.0) -> Iterator[tuple[int, int]]:
        """Yield the ranks of workers that have ended and their exit codes, which are negative for signals.

        Waits up to `timeout_s` for the first.

        Raises:
            MlxError: the server has ended.
        """
        try:
            while self._control.poll(timeout_s):
                yield self._control.recv()
                timeout_s = 0.0
        except (EOFError, OSError) as error:
            raise self._error() from error

    def close(self) -> None:
        """End the server and all workers."""
        atexit.unregister(self.close)
        self._control.close()
        if sys.platform == "linux" and self._process.is_alive():  # otherwise its process id may be reused
            os.kill(self._process.pid, signal.SIGRTMIN)  # ends it even during an import
        self._process.join(EXIT_S)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()

    def _send(self, request: str | Start) -> None:
        try:
            self._control.send(request)
        except OSError as error:
            raise self._error() from error

    def _error(self) -> MlxError:
        self._process.join(EXIT_S)
        reason = exit_reason(self._process.exitcode)
        return MlxError(f"the fork server ended: it {reason}; all workers ended with it")


def serve(control: "Channel[Any, Any]", drivers_end: "Channel[Any, Any] | None") -> None:
    """Run the server until the driver closes its end of `control`, which a fork has inherited."""
    forks = drivers_end is not None
    if drivers_end is not None:
        drivers_end.close()  # otherwise the server would not notice when the driver closes it
    leave_the_terminal()
    context = multiprocessing.get_context("fork" if forks else "spawn")
    workers: dict[int, Any] = {}

    def end(*_: Any) -> NoReturn:
        for worker in workers.values():
            kill_group(worker)
        os._exit(0)  # without waiting for a worker that is starting, which dies with this process

    for number in (signal.SIGHUP, signal.SIGQUIT):  # they end the driver, too
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores SIGHUP
            signal.signal(number, end)
    die_with_parent(end)
    try:
        while True:
            ready = connection.wait([control, *(worker.sentinel for worker in workers.values())])
            if control in ready:
                request = control.recv()
                if isinstance(request, Start):
                    for rank, environment in enumerate(request.environments):
                        workers[rank] = _start(context, control, request.job, rank, environment)
                elif request == PRELOAD and forks:
                    _preload()
                    if unsafe_to_fork():  # TensorBoard imports TensorFlow where that is installed
                        context = multiprocessing.get_context("spawn")
                elif request == KILL:
                    for worker in workers.values():
                        kill_group(worker)
            for rank in [rank for rank, worker in workers.items() if worker.sentinel in ready]:
                worker = workers.pop(rank)
                kill_group(worker)  # what it has started
                worker.join()
                control.send((rank, worker.exitcode))
    except (EOFError, OSError):
        end()


def _preload() -> None:
    with many_imports():
        for name in PRELOADED:
            with contextlib.suppress(Exception):  # the worker that needs it reports the error
                importlib.import_module(name)
    gc.freeze()  # so that workers share the memory of imported modules


def _start(context: Any, control: "Channel[Any, Any]", job: bytes, rank: int, environment: dict[str, str]) -> Any:
    streams = [Connection(recv_handle(control), readable=False) for _ in range(2)]
    inherited = control if context.get_start_method() == "fork" else None
    worker = context.Process(target=_become_worker, args=(inherited, job, rank, environment, streams))
    with held_signals():
        worker.start()
    for stream in streams:
        stream.close()
    with contextlib.suppress(OSError):
        os.setpgid(worker.pid, worker.pid)  # the worker does so, too; either may come first
    return worker


def _become_worker(
    control: "Channel[Any, Any] | None",
    job: bytes,
    rank: int,
    environment: dict[str, str],
    streams: "list[Channel[Any, Any]]",
) -> None:
    """Set up signals, streams and the environment of a worker, then train."""
    if control is not None:
        control.close()
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    for number in (signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    leave_the_terminal()
    die_with_parent()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)  # the terminal would stop a background process that reads from it
    for descriptor, stream in enumerate(streams, start=1):
        os.dup2(stream.fileno(), descriptor)
        stream.close()
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    from mlx_runtime.training.engines import worker  # reads the environment

    sys.exit(worker.run(pickle.loads(job), rank))
