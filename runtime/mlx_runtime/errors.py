"""Every error a user can meet, and how a command ends when one is raised.

    MlxError                 exit 1   a child is raised for every problem that a user can cure
    ├── UsageError           exit 2   wrong folder, name or argument
    ├── ClusterError                  a cluster that does not answer, or not as it should
    ├── BindError                     a constructor that conf.yaml cannot describe
    ├── ConfigError                   conf.yaml or an override is wrong
    ├── DatasetError                  a dataset that cannot be batched
    ├── DataJobError                  the user's own code raised in a data job
    ├── StorageError                  the run folder cannot be written
    ├── WorkerLoopError               the user's own code raised on a worker
    ├── WorkerLostError               a worker, its node, or its connection to the others is gone
    ├── HangError                     workers wait for each other
    ├── RunFinished          exit 0   the run to go on with has succeeded already
    └── RunStopped           exit 130 Ctrl-C, 143 SIGTERM

Messages are written for the person at the terminal: what happened with the value, what was expected,
and the next command to type.
"""

import atexit
import contextlib
import difflib
import errno
import math
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path

from mlx_runtime.settings import Settings

ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(\x07|\x1b\\)?")
"""Sequences that colour text, move the cursor, or set a terminal's title and links."""

UNPRINTABLE = re.compile(r"[^\t\n -~\xa0-\ud7ff\ue000-\U0010ffff]|[\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Control characters, halves of characters, and what reverses the direction of text."""

RAISED_BY_USERS = (Exception, SystemExit, GeneratorExit)
"""What code of a user may raise: all but Ctrl-C. A call of `sys.exit(0)` in it is no success of the command."""

PATIENCE_S = 5.0
"""How long further Ctrl-C are ignored after the first."""


class MlxError(Exception):
    """Base of every error that this library raises for its users."""

    exit_code = 1
    cure = ""
    """What to type next, when only the caller knows it."""


class UsageError(MlxError):
    """The command cannot run here, or not with this argument."""

    exit_code = 2


class ClusterError(MlxError):
    """A cluster that does not answer, refuses a job, or cannot run it."""


class BindError(MlxError):
    """A constructor or a default that `bind` cannot write to conf.yaml exactly."""


class ConfigError(MlxError):
    """conf.yaml and the overrides do not describe a runnable experiment. Lists every problem at once."""


class DatasetError(MlxError):
    """A dataset that the workers could not read."""


class DataJobError(MlxError):
    """User code raised in a data job.

    Args:
        summary: `ValueError: the message`, and the item that it was about.
        trace: the user's frames, innermost last.
    """

    def __init__(self, summary: str, trace: str) -> None:
        super().__init__(summary, trace)  # both in `args`, so that it survives pickling
        self.summary, self.trace = summary, trace

    def __str__(self) -> str:
        return f"{self.summary}\n{self.trace}".rstrip()


class StorageError(MlxError):
    """The storage path cannot hold a run: not writable, or no space left."""


class WorkerLoopError(MlxError):
    """User code raised on a worker.

    Args:
        rank: world rank of the worker that raised first.
        summary: `ValueError: the message`.
        trace: the user's frames, innermost last.
    """

    def __init__(self, rank: int, summary: str, trace: str) -> None:
        super().__init__(rank, summary, trace)  # all three in `args`, so that it survives pickling
        self.rank, self.summary, self.trace = rank, summary, trace

    def __str__(self) -> str:
        return f"{self.summary} (raised on rank {self.rank})\n{self.trace}".rstrip()


class WorkerLostError(MlxError):
    """A worker is gone, or another one noticed; a new group may go on."""


class HangError(MlxError):
    """Workers wait for each other, and nothing happens any more."""


class RunFinished(MlxError):  # noqa: N818 - not a failure
    """There is nothing left to do."""

    exit_code = 0


class RunStopped(MlxError):  # noqa: N818 - not a failure
    """The user stopped the run (130), or the system did (143)."""

    exit_code = 130

    def __init__(self, message: str, exit_code: int = 130) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def near(word: str, words: Iterable[str]) -> str:
    """` Did you mean 'x'?` when something in `words` looks like `word`, else what there is, unless that is too much."""
    known = sorted(words)
    matches = difflib.get_close_matches(word, known, n=1)
    if matches:
        return f" Did you mean {matches[0]!r}?"
    if len(known) > 30:
        return " See all with: mlx train show"
    return f" There is: {', '.join(known)}." if known else " There is none."


def message_of(error: BaseException) -> str:
    """An error's message, also if its `__str__` raises."""
    try:
        return str(error)
    except Exception as another:
        return f"(its __str__ raised {type(another).__name__})"


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its kind when it has none."""
    return message_of(error).partition("\n")[0] or type(error).__name__


def is_users(error: BaseException, project: Path) -> bool:
    """True if an error was raised by a project's own code, not by what it calls.

    Args:
        error: caught.
        project: folder of the code.
    """
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and _is_users(frames[-1].filename, project)


def plain(text: str, *, one_line: bool = False) -> str:
    """A text for a terminal: without escape sequences, and with a mark for any other character that does not print.

    Names and numbers come from records that others wrote; those must not move the cursor, or change what is shown.

    Args:
        text: to print.
        one_line: mark tabs and line breaks, too.
    """
    found = UNPRINTABLE.sub("\ufffd", ESCAPES.sub("", text))
    return re.sub(r"[\t\n]", "\ufffd", found) if one_line else found


def user_frames(error: BaseException, project: Path) -> str:
    """Where a project's own code stood when an error was raised, innermost last, and where a library gave up.

    Args:
        error: caught.
        project: folder of the code; its files are shown relative to it, which is what editors open.
    """
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if _is_users(frame.filename, project)]
    if frames[-1] not in theirs:
        theirs.append(frames[-1])
    return "\n".join(
        f"  {_shown(frame.filename, project)}:{frame.lineno} in {frame.name}\n    {frame.line}" for frame in theirs
    )


def _shown(file: str, project: Path) -> str:
    return os.path.relpath(file, project) if _is_users(file, project) else file


def _is_users(file: str, project: Path) -> bool:
    ours = Path(file).is_relative_to(Path(__file__).parent)  # a job has the runtime beside the project's files
    return Path(file).is_relative_to(project) and "site-packages" not in file and not ours  # nor .venv


@contextlib.contextmanager
def clean_exit(*, debug: bool = False) -> Iterator[None]:
    """End the process with one clear message and the right exit code, instead of a traceback.

    Args:
        debug: let the traceback through; so does `MLX_DEBUG=1`.
    """
    debug = debug or Settings.read().debug
    with _one_interrupt():
        try:
            yield
        except MlxError as error:
            if debug:
                raise
            print(plain(f"error: {error}" if error.exit_code else str(error)), file=sys.stderr)
            if error.cure:
                print(plain(error.cure), file=sys.stderr)
            atexit.register(_deaf)
            sys.exit(error.exit_code)
        except OSError as error:
            if debug:
                raise
            _tell(error)
            sys.exit(1)
        except KeyboardInterrupt:
            if debug:
                raise
            print("error: interrupted", file=sys.stderr)
            atexit.register(_deaf)
            sys.exit(RunStopped.exit_code)


def _tell(error: OSError) -> None:
    """Print what the system refused. Printing itself may be what failed: then nothing more goes to stdout."""
    reason = error.strerror or str(error)
    if error.filename is None and error.errno in (errno.ENOSPC, errno.EPIPE, errno.EIO, errno.EBADF):
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno != errno.EPIPE:  # otherwise the reader has what it wanted
            print(f"error: cannot write the output: {reason}", file=sys.stderr)
        return
    at = f": {error.filename}" if error.filename is not None else ""
    print(f"error: {reason}{at} (MLX_DEBUG=1 shows where)", file=sys.stderr)


@contextlib.contextmanager
def _one_interrupt() -> Iterator[None]:
    """Let Ctrl-C interrupt the block once, and ignore repeats while it cleans up."""
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # already active, or somebody else handles Ctrl-C
        return
    heard_at = -math.inf

    def interrupt(*_: object) -> None:
        nonlocal heard_at
        if time.monotonic() - heard_at > PATIENCE_S:
            heard_at = time.monotonic()
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        if heard_at == -math.inf:  # otherwise the process is about to end, and a repeat must not tear that up, either
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _deaf() -> None:
    """The process ends; a second Ctrl-C shall not tear up what others do as it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
