"""The processes of the local engine: a fork server, and the workers that it starts.

The server is forked from the driver when the driver has imported the experiment, so that workers begin with torch and
`src` loaded. Where forking is not safe, both are fresh interpreters. The server never trains and has one thread: it
starts workers when it is asked to, and reports how each of them ended.
"""

import contextlib
import ctypes
import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from pathlib import Path
from typing import Any, NoReturn

from mlx_runtime.importing import many_imports

Channel = Connection  # its type parameters came with Python 3.13

PRELOAD = ("mlx_runtime.engines.worker", "torch._dynamo", "torch.utils.tensorboard")
"""What workers import that the driver has not: imported once, in the server, while the driver prepares the run."""

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Preload:
    """To the server: import what workers need."""


@dataclass(frozen=True)
class Start:
    """To the server: start one worker per environment. Two file descriptors per worker follow, its stdout and stderr.

    Attributes:
        job: a pickled `WorkerJob`.
        environments: of each rank.
    """

    job: bytes
    environments: tuple[Mapping[str, str], ...]


@dataclass(frozen=True)
class Kill:
    """To the server: kill all workers."""


@dataclass(frozen=True)
class Ended:
    """To the driver: a worker has ended.

    Attributes:
        rank: of the worker.
        code: its exit code; negative for a signal.
    """

    rank: int
    code: int


def serve(control: "Channel[Any, Any]", drivers_end: "Channel[Any, Any] | None", forks: bool) -> None:
    """The server's main function; returns when the driver has closed its end of `control`.

    Args:
        control: connection to the driver.
        drivers_end: the other end, as inherited by a fork.
        forks: fork workers; otherwise they are fresh interpreters.
    """
    if drivers_end is not None:
        drivers_end.close()  # so that the server notices when the driver closes it
    _leave_the_terminal()
    context = multiprocessing.get_context("fork" if forks else "spawn")
    workers: dict[int, Any] = {}

    def end(*_: Any) -> NoReturn:
        _kill(workers)
        os._exit(0)  # rather than wait for a worker that was about to start; it dies with this process

    _die_with_parent(end)
    try:
        while True:
            ready = connection.wait([control, *(worker.sentinel for worker in workers.values())])
            if control in ready:
                order = control.recv()
                if isinstance(order, Start):
                    for rank, environment in enumerate(order.environments):
                        workers[rank] = _started(context, control, order.job, rank, environment)
                elif isinstance(order, Preload) and forks:
                    _preload()
                elif isinstance(order, Kill):
                    _kill(workers)
            for rank in [rank for rank, worker in workers.items() if worker.sentinel in ready]:
                worker = workers[rank]
                _kill({rank: worker})  # processes that it started itself
                worker.join()
                del workers[rank]
                control.send(Ended(rank, worker.exitcode))
    except (EOFError, OSError):
        end()


def _preload() -> None:
    with many_imports():
        for name in PRELOAD:
            with contextlib.suppress(ImportError):  # a worker that needs it says so
                importlib.import_module(name)


def _started(context: Any, control: "Channel[Any, Any]", job: bytes, rank: int, environment: Mapping[str, str]) -> Any:
    streams = [Connection(recv_handle(control), readable=False) for _ in range(2)]
    inherited = control if context.get_start_method() == "fork" else None
    worker = context.Process(target=_become_worker, args=(inherited, job, rank, dict(environment), streams))
    with held_signals():
        worker.start()
    for stream in streams:
        stream.close()
    with contextlib.suppress(OSError):
        os.setpgid(worker.pid, worker.pid)  # as the worker does itself; whoever comes first
    return worker


def _kill(workers: Mapping[int, Any]) -> None:
    """Kill workers with all processes that they have started."""
    for worker in workers.values():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(worker.pid, signal.SIGKILL)
        worker.kill()  # a new interpreter may not lead a group yet


def _become_worker(
    control: "Channel[Any, Any] | None",
    job: bytes,
    rank: int,
    environment: dict[str, str],
    streams: "list[Channel[Any, Any]]",
) -> None:
    """A worker's main function, up to what imports torch."""
    if control is not None:
        control.close()
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    _leave_the_terminal()
    _die_with_parent()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)  # the terminal stops processes in the background that read from it
    for number, stream in enumerate(streams, start=1):
        os.dup2(stream.fileno(), number)
        stream.close()
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    from mlx_runtime.engines import worker  # after the environment, which it reads

    sys.exit(worker.run(pickle.loads(job), rank))


@contextlib.contextmanager
def held_signals() -> Iterator[None]:
    """Processes that are started in the block get Ctrl-C and SIGTERM once they have called `_leave_the_terminal`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _leave_the_terminal() -> None:
    """Only the driver decides what Ctrl-C and SIGTERM mean. Processes that this one starts may be terminated."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _ignore)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))
    os.register_at_fork(after_in_child=_heed_signals)


def _ignore(*_: Any) -> None:
    """A handler rather than SIG_IGN, which programs that are started from here would inherit."""


def _heed_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is _ignore:
            signal.signal(number, signal.SIG_DFL)


def _die_with_parent(end: Callable[..., NoReturn] | None = None) -> None:
    """End this process when the one that started it is gone, even by SIGKILL.

    Args:
        end: how, in the main thread; otherwise it is killed. Nobody else kills what workers have started.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    if sys.platform == "linux":
        number = signal.SIGRTMIN if end else signal.SIGKILL
        if end:
            signal.signal(number, end)
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent.pid:  # it was gone before
            os.kill(os.getpid(), number)
    elif end is None:  # elsewhere the end of the connection must do
        threading.Thread(target=_kill_after, args=(parent.sentinel,), name="parent", daemon=True).start()


def _kill_after(sentinel: int) -> None:
    connection.wait([sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


FORK_SAFE_THREADS = ("jemalloc_bg_thd",)
"""Threads that know how to be forked; pyarrow starts one when it is imported."""


def unsafe_to_fork() -> str | None:
    """Why workers cannot be forked from this process, or None if they can."""
    if sys.platform != "linux":
        return f"on {sys.platform} forked processes are not reliable"
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
        return "something that was imported has initialized CUDA"
    threads = sum(name not in FORK_SAFE_THREADS for name in _thread_names()) - 1
    if threads > 0:
        return f"something that was imported has started {threads} thread{'s' * (threads > 1)}"
    return None


def _thread_names() -> Iterator[str]:
    """Of this process, as Linux knows them; those of native libraries, too."""
    for entry in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has just ended
            yield (Path("/proc/self/task") / entry / "comm").read_text().strip()
