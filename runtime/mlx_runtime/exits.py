"""The end of a command: one clear message on stderr, and the right exit code."""

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

REPEAT_WINDOW_S = 5.0  # Ctrl-C is ignored for this long after the first one


@contextlib.contextmanager
def clean_exit() -> Iterator[None]:
    """Print an error in the block as a message without a traceback, and exit with the matching code.

    With `MLX_DEBUG=1`, errors propagate with their traceback.
    """
    with _single_interrupt():
        try:
            yield
        except (MlxError, OSError, KeyboardInterrupt) as error:
            if Settings.read().debug:
                raise
            code = _print_error(error)
            if not isinstance(error, OSError):  # a second Ctrl-C must not disturb the other exit handlers
                atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
            if isinstance(error, RunStopped) and code and (job := Settings.read().job):
                from mlx_runtime import companions

                companions.part("ray.jobs").end_as_stopped(job)
            sys.exit(code)


def _print_error(error: MlxError | OSError | KeyboardInterrupt) -> int:
    """Print an error, and return its exit code."""
    if isinstance(error, MlxError):
        fails = error.exit_code and not isinstance(error, RunStopped)
        print(printable(f"error: {error}" if fails else str(error)), file=sys.stderr)
        if error.hint:
            print(printable(error.hint), file=sys.stderr)
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        print("error: interrupted", file=sys.stderr)
        return RunStopped.exit_code
    reason = error.strerror or str(error)
    if error.filename is None and error.errno in (errno.ENOSPC, errno.EPIPE, errno.EIO, errno.EBADF):
        with contextlib.suppress(OSError, ValueError):  # stdout is broken: Python's own flush at exit must not fail
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno != errno.EPIPE:  # a closed pipe means that the reader has read enough
            print(f"error: cannot write the output: {reason}", file=sys.stderr)
    else:
        at = f": {error.filename}" if error.filename is not None else ""
        print(f"error: {reason}{at} (MLX_DEBUG=1 shows where)", file=sys.stderr)
    return 1


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
        # Otherwise the process is exiting, which neither a repeated nor a late Ctrl-C may disturb.
        if interrupted_at == -math.inf and signal.getsignal(signal.SIGINT) is interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)
