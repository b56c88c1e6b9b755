"""How a command ends: one clear message on stderr and the right exit code."""

import atexit
import contextlib
import errno
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator

from mlx_runtime.errors import MlxError, RunStopped, printable
from mlx_runtime.settings import Settings

REPEAT_WINDOW_S = 5.0
"""Ctrl-C is ignored for this long after the first one."""


@contextlib.contextmanager
def clean_exit(*, debug: bool = False) -> Iterator[None]:
    """Print errors of the block as one message and exit with the right code, instead of a traceback.

    Args:
        debug: let tracebacks through, like `MLX_DEBUG=1`.
    """
    with _single_interrupt():
        if debug or Settings.read().debug:
            yield
            return
        try:
            yield
        except MlxError as error:
            print(printable(f"error: {error}" if error.exit_code else str(error)), file=sys.stderr)
            if error.hint:
                print(printable(error.hint), file=sys.stderr)
            atexit.register(_ignore_interrupts)
            sys.exit(error.exit_code)
        except OSError as error:
            _print_os_error(error)
            sys.exit(1)
        except KeyboardInterrupt:
            print("error: interrupted", file=sys.stderr)
            atexit.register(_ignore_interrupts)
            sys.exit(RunStopped.exit_code)


def _print_os_error(error: OSError) -> None:
    reason = error.strerror or str(error)
    if error.filename is None and error.errno in (errno.ENOSPC, errno.EPIPE, errno.EIO, errno.EBADF):
        with contextlib.suppress(OSError, ValueError):  # stdout is broken: Python's own flush at exit must not fail
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno != errno.EPIPE:  # a closed pipe means that the reader has read enough
            print(f"error: cannot write the output: {reason}", file=sys.stderr)
        return
    at = f": {error.filename}" if error.filename is not None else ""
    print(f"error: {reason}{at} (MLX_DEBUG=1 shows where)", file=sys.stderr)


@contextlib.contextmanager
def _single_interrupt() -> Iterator[None]:
    """Let Ctrl-C interrupt the block once, and ignore repeats while it cleans up."""
    main_thread = threading.current_thread() is threading.main_thread()
    if not main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # already active, or someone else handles Ctrl-C
        return
    interrupted_at = -math.inf

    def interrupt(*_: object) -> None:
        nonlocal interrupted_at
        if time.monotonic() - interrupted_at > REPEAT_WINDOW_S:
            interrupted_at = time.monotonic()
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        if interrupted_at == -math.inf:  # otherwise the process is exiting, and a repeat must not disturb that
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _ignore_interrupts() -> None:
    """Keep a second Ctrl-C from disturbing the other exit handlers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
