"""The fork server: a process that starts other processes, workers or trials, on request, and reports their exit codes.

It is forked from the driver as soon as the driver has imported the experiment, so that workers start with torch and
`src` loaded. If forking the driver is not safe, as in a notebook, the server is a new interpreter, which imports what
workers need and forks them. On macOS, and if `MLX_START_METHOD=spawn`, workers are new interpreters, too. The server
never trains and has a single thread.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import connection, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, cast

from mlx_runtime.errors import USER_ERRORS, MlxError
from mlx_runtime.importing import add_to_path, many_imports
from mlx_runtime.settings import FORKABLE, Settings, environment
from mlx_runtime.workers.stop_requests import DRIVER_SIGNALS, held_signals

Channel = Connection  # takes type parameters since Python 3.13

PRELOADED = ("mlx_runtime.workers.process", "torch._dynamo", "torch.utils.tensorboard")
"""Modules that workers import in addition to those of the driver."""

CHECK_S = 0.5
"""Interval at which the server checks for ended workers whose child processes are still alive."""

EXIT_S = 10.0
"""Time limit for the exit of the server."""

FORK_SAFE_THREADS = ("jemalloc_bg_thd",)
"""Threads that survive a fork; importing pyarrow starts one."""

TERMINAL_SIGNALS = (*DRIVER_SIGNALS, signal.SIGQUIT)
"""Signals that a terminal sends to all of its processes; they end the driver, and with it its workers."""

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Preload:
    """Request to import modules for workers."""

    modules: tuple[str, ...]


@dataclass(frozen=True)
class Start:
    """Request to start a worker, followed by the file descriptors of its stdout, its stderr and its channels."""

    number: int
    target: bytes  # pickled function, called with the channels; returns the exit code
    environment: dict[str, str]
    descriptors: int


@dataclass(frozen=True)
class Kill:
    """Request to kill workers with the processes that they have started."""

    numbers: tuple[int, ...]


class ForkServer:
    """The driver's handle of the server. The constructor starts it.

    Args:
        fresh: Start the server as a new interpreter, even if this process could fork it.
        folder: Its working directory, from which it imports first. None: as this process.
    """

    def __init__(self, *, fresh: bool = False, folder: Path | None = None) -> None:
        forked = not (fresh or Settings.read().spawn or unsafe_to_fork())
        context = multiprocessing.get_context("fork" if forked else "spawn")
        if forked:
            gc.freeze()  # so that workers share the memory of imported modules
        self._control, servers_end = context.Pipe()
        arguments = (servers_end, self._control if forked else None, folder)
        self._process: Any = cast(Any, context).Process(target=serve, args=arguments, name="fork server")
        if not forked:  # otherwise it starts during `start`, and unblocks signals
            resource_tracker.ensure_running()
        variables = {} if forked else FORKABLE
        main = contextlib.nullcontext() if forked else _another_main()
        with main, held_signals(), environment(variables, replace=True), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 counts any thread as unsafe
            self._process.start()
            atexit.register(self.close)  # before multiprocessing waits for its children
        servers_end.close()

    def fileno(self) -> int:
        """Return a file descriptor that is readable when a worker has ended."""
        return self._control.fileno()

    @property
    def alive(self) -> bool:
        """True until the server ends."""
        return bool(self._process.is_alive())

    def preload(self, *modules: str) -> None:
        """Import modules, once for all workers, in the background."""
        self._send(Preload((*PRELOADED, *modules)))

    def start(
        self, number: int, target: Callable[..., int], environment: dict[str, str], streams: Sequence[Any]
    ) -> None:
        """Start a worker that calls a picklable function and exits with the code that it returns.

        `streams` are its stdout, its stderr, and the connections that are passed to the function.
        """
        self._send(Start(number, pickle.dumps(target), environment, len(streams)))
        try:
            for stream in streams:
                send_handle(self._control, stream.fileno(), self._process.pid)
        except OSError as error:
            raise self._error() from error

    def kill(self, *numbers: int) -> None:
        """Kill workers, with the processes that they have started."""
        self._send(Kill(numbers))

    def exits(self, timeout_s: float = 0.0) -> Iterator[tuple[int, int]]:
        """Yield the numbers and exit codes of ended workers; exit codes are negative for signals.

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
            os.kill(self._process.pid, signal.SIGRTMIN + 1)  # ends it even during an import
        self._process.join(EXIT_S)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()

    def _send(self, request: Preload | Start | Kill) -> None:
        try:
            self._control.send(request)
        except OSError as error:
            raise self._error() from error

    def _error(self) -> MlxError:
        self._process.join(EXIT_S)
        reason = exit_reason(self._process.exitcode)
        return MlxError(f"the fork server ended: it {reason}; all workers ended with it")


@contextlib.contextmanager
def _another_main() -> Iterator[None]:
    """Prevent a new interpreter from importing the main script, which may import the experiment and be edited later."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def serve(control: "Channel[Any, Any]", drivers_end: "Channel[Any, Any] | None", folder: Path | None) -> None:
    """Run the server until the driver closes its end of `control`, which a fork has inherited."""
    if drivers_end is not None:
        drivers_end.close()  # otherwise the server would not notice when the driver closes it
    if folder is not None:
        os.chdir(folder)
        add_to_path(folder)
    leave_the_terminal()
    forks = sys.platform == "linux" and not Settings.read().spawn
    context = multiprocessing.get_context("fork" if forks else "spawn")
    workers: dict[int, Any] = {}

    def end(*_: Any) -> NoReturn:
        for worker in workers.values():
            kill_group(worker)
        os._exit(0)  # a worker that is starting dies with this process

    if sys.platform == "linux":
        signal.signal(signal.SIGRTMIN + 1, end)  # sent by `close`; `die_with_parent` uses SIGRTMIN
    die_with_parent(end)
    try:
        while True:
            sentinels = [worker.sentinel for worker in workers.values()]
            ready = connection.wait([control, *sentinels], CHECK_S if workers else None)
            if control in ready:
                match control.recv():
                    case Start() as request:
                        workers[request.number] = _start(context, control, request)
                    case Preload(modules) if forks:
                        _preload(modules)
                        if unsafe_to_fork():  # TensorBoard imports TensorFlow if that is installed
                            context = multiprocessing.get_context("spawn")
                    case Kill(numbers):
                        for worker in map(workers.get, numbers):
                            if worker is not None:
                                kill_group(worker)
            # Its sentinel also waits for the processes that a worker has forked.
            for ended in [number for number, worker in workers.items() if worker.exitcode is not None]:
                worker = workers.pop(ended)
                kill_group(worker)  # and the processes that it has started
                worker.join()
                control.send((ended, worker.exitcode))
    except (EOFError, OSError):
        end()


def _preload(modules: Sequence[str]) -> None:
    with many_imports():
        for name in modules:
            with contextlib.suppress(*USER_ERRORS):  # the worker that needs it reports the error
                importlib.import_module(name)
    gc.freeze()  # so that workers share the memory of imported modules


def _start(context: Any, control: "Channel[Any, Any]", request: Start) -> Any:
    streams = [Connection(recv_handle(control)) for _ in range(request.descriptors)]
    inherited = control if context.get_start_method() == "fork" else None
    worker = context.Process(target=_become_worker, args=(inherited, request, streams))
    with held_signals():
        worker.start()
    for stream in streams:
        stream.close()
    with contextlib.suppress(OSError):
        os.setpgid(worker.pid, worker.pid)  # the worker does so, too; either may come first
    return worker


def _become_worker(control: "Channel[Any, Any] | None", request: Start, streams: "list[Channel[Any, Any]]") -> None:
    """Set up signals, streams and the environment of a worker, then call its function."""
    if control is not None:
        control.close()
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    if sys.platform == "linux":  # the server's handlers, which kill its workers
        for real_time in (signal.SIGRTMIN, signal.SIGRTMIN + 1):
            signal.signal(real_time, signal.SIG_DFL)
    leave_the_terminal()
    die_with_parent()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)  # the terminal would stop a background process that reads from it
    for descriptor, stream in enumerate(streams[:2], start=1):
        os.dup2(stream.fileno(), descriptor)
        stream.close()
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(request.environment)
    code = pickle.loads(request.target)(*streams[2:])  # its module reads the environment
    if control is None:  # a new interpreter ends as a fork does: gloo's threads can abort one that is finalizing
        atexit.register(os._exit, code or 0)
    sys.exit(code)


def unsafe_to_fork() -> bool:
    """Return True if workers cannot be forked from this process: it has threads, or has used CUDA."""
    if sys.platform != "linux":  # forking is not reliable on macOS
        return True
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return True
    if sum(name not in FORK_SAFE_THREADS for name in _thread_names()) > 1:
        return True
    if torch is not None and torch.backends.cuda.is_built():
        from mlx_runtime.distributed.torch_private import cuda_survives_fork

        return not cuda_survives_fork()
    return False


def _thread_names() -> Iterator[str]:
    """Yield the names of this process's threads, including those of native libraries."""
    for entry in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # the thread has just ended
            yield (Path("/proc/self/task") / entry / "comm").read_text().strip()


def leave_the_terminal() -> None:
    """Ignore signals that end the driver. Processes started from here handle them as usual."""
    for number in TERMINAL_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, _ignore)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, DRIVER_SIGNALS)
    os.register_at_fork(after_in_child=_restore_signals)


def _ignore(*_: Any) -> None:
    """Do nothing. Programs started from here would inherit SIG_IGN, but do not inherit a handler."""


def _restore_signals() -> None:
    for number in TERMINAL_SIGNALS:
        if signal.getsignal(number) is _ignore:
            signal.signal(number, signal.SIG_DFL)


def die_with_parent(end: Callable[..., NoReturn] | None = None) -> None:
    """Call `end` in the main thread when the parent is gone, even by SIGKILL; without `end`, kill this process."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    if sys.platform == "linux":
        number = signal.SIGRTMIN if end else signal.SIGKILL
        if end:
            # The kernel also sends the signal when only the thread ends that has started this process.
            signal.signal(number, lambda *_: end() if os.getppid() != parent.pid else None)
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent.pid:  # it ended before the call
            os.kill(os.getpid(), number)
    elif end is None:  # a process with `end` notices that its connection is closed
        threading.Thread(target=_kill_after, args=(parent.sentinel,), name="parent", daemon=True).start()


def _kill_after(sentinel: int) -> None:
    connection.wait([sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


def kill_group(process: Any) -> None:
    """Kill a `multiprocessing.Process` together with all processes that it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()  # a new interpreter may not lead a process group yet


def exit_reason(code: int | None) -> str:
    """Return how a process with this exit code ended, as the predicate of a sentence. None: it has not ended."""
    if code is None:
        return "closed its connection"
    if code >= 0:
        return f"exited with code {code}"
    if code == -signal.SIGKILL:
        return "was killed by SIGKILL (out of memory?)"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:  # only two of the real-time signals have names
        return f"was killed by signal {-code}"
