"""Signals, parents and forks of the local engine's processes."""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing import connection
from pathlib import Path
from typing import Any, NoReturn

from mlx_runtime.workers.stop_requests import DRIVER_SIGNALS

FORK_SAFE_THREADS = ("jemalloc_bg_thd",)
"""Threads that survive a fork; importing pyarrow starts one."""

_PR_SET_PDEATHSIG = 1


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
    """Ignore signals that the driver handles. Processes started from here handle them as usual."""
    for number in DRIVER_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, _ignore)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, DRIVER_SIGNALS)
    os.register_at_fork(after_in_child=_restore_signals)


def _ignore(*_: Any) -> None:
    """Do nothing. Programs started from here would inherit SIG_IGN, but do not inherit a handler."""


def _restore_signals() -> None:
    for number in DRIVER_SIGNALS:
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
