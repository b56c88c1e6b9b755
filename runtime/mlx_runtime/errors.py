"""The errors that users see.

    MlxError                 exit 1    base class: something a user can fix
    ├── UsageError           exit 2    wrong folder, name or option, except in conf.yaml and overrides
    ├── ClusterError                   the cluster does not answer, refuses a job, or cannot run it
    ├── BindError                      conf.yaml cannot describe a constructor
    ├── ConfigError                    conf.yaml or an override is wrong
    ├── DatasetError                   a dataset cannot be batched
    ├── MissingLibraryError            an optional dependency is not installed
    ├── DataJobError                   user code raised an exception in a data job
    ├── StorageError                   a run folder cannot be read or written
    ├── WorkerLoopError                user code raised an exception on a worker
    ├── WorkerLostError                a worker, its node or its network connection is gone
    ├── HangError                      the workers are deadlocked
    ├── RunFinished          exit 0    the run to resume has already succeeded
    └── RunStopped           exit 130  by Ctrl-C; 143 by SIGTERM, 129 by SIGHUP, 141 by a closed output

A message states what happened (with the value), what was expected, and the next command to type.
"""

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from mlx_runtime.settings import Settings

USER_ERRORS = (Exception, SystemExit, GeneratorExit)
"""Exceptions from user code: all except Ctrl-C. Calling `sys.exit(0)` there does not count as success."""

_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(\x07|\x1b\\)?")
"""ANSI sequences: colors, cursor movement, window titles, links."""

_UNPRINTABLE = re.compile(
    r"[^\t\n -~\xa0-\ud7ff\ue000-\U0010ffff]|[\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)
"""Control characters, lone surrogates, and characters that reverse the text direction."""


class MlxError(Exception):
    """Base of all errors that this library raises for its users."""

    exit_code = 1
    hint = ""
    """Next command to type, printed below the message. Set by callers with more context than the raising code."""

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows in place of a traceback; with MLX_DEBUG=1, the traceback."""
        if Settings.read().debug:
            import traceback

            return traceback.format_exception(self)
        return [f"error: {full_message(self)}", *([self.hint] if self.hint else [])]


class UsageError(MlxError):
    """The command cannot run in this folder, or not with this argument."""

    exit_code = 2


class ClusterError(MlxError):
    """The cluster does not answer, refuses a job, or cannot run it."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class BindError(MlxError):
    """`bind` cannot write a constructor or a default to conf.yaml exactly."""


class ConfigError(MlxError):
    """conf.yaml and the overrides do not describe a runnable experiment. Lists all problems at once."""

    problems: tuple[str, ...] = ()
    """The problems, one line each, without the name of their file; empty if there is only a message."""


class DatasetError(MlxError):
    """The workers cannot read a dataset."""


class MissingLibraryError(MlxError):
    """An optional dependency is not installed. The message has the command that installs it."""


class DataJobError(MlxError):
    """User code raised an exception in a data job. The message has the user's frames, innermost last."""


class StorageError(MlxError):
    """The storage cannot be read or written: no permission, no space left, no connection."""


class ElsewhereError(StorageError):
    """This machine lacks a folder of the storage, which the cluster of `RAY_ADDRESS` may have.

    Args:
        path: the folder.
        url: dashboard of the cluster.
    """

    def __init__(self, path: str, url: str) -> None:
        super().__init__(f"this machine lacks {path}; if the cluster has it, look there: mlx --on {url} xp ls")
        self.path, self.url = path, url


class WorkerLoopError(MlxError):
    """User code raised an exception on a worker. The message has the user's frames, innermost last."""


class WorkerLostError(MlxError):
    """A worker died or lost its connection. A new group of workers can resume."""


class HangError(MlxError):
    """The workers are deadlocked."""


class RunFinished(MlxError):  # noqa: N818 - not a failure
    """The run to resume has already succeeded."""

    exit_code = 0


class RunStopped(MlxError):  # noqa: N818 - not a failure
    """The run was stopped by the user (exit code 130), by the system (143), or because its output closed (129, 141)."""

    exit_code = 130
    REQUESTED = "mlx xp stop"  # reason if a user asked for it, which outweighs other reasons

    def __init__(self, message: str, exit_code: int = 130, reason: str | None = None) -> None:
        super().__init__(message)
        self.exit_code, self.reason = exit_code, reason


def suggest(word: str, words: Iterable[str], command: str = "mlx train show") -> str:
    """Return ` Did you mean 'x'?` if one of `words` resembles `word`, otherwise list them.

    If there are too many, name the command that lists them.
    """
    known = sorted(words)
    import difflib  # here, as `traceback`, so that commands start quickly

    matches = difflib.get_close_matches(word, known, n=1)
    if matches:
        return f" Did you mean {matches[0]!r}?"
    if len(known) > 30:
        return f" See all with: {command}"
    return f" Available: {', '.join(known)}." if known else " There are none."


def full_message(error: BaseException) -> str:
    """Return an error's message, even if its `__str__` raises."""
    try:
        return str(error)
    except Exception as another:
        return f"(its __str__ raised {type(another).__name__})"


def short_message(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its class if the message is empty."""
    return full_message(error).partition("\n")[0] or type(error).__name__


def located(error: BaseException) -> str:
    """Return `ValueError: the message (file.py:12)`, or only the message of an error of this package."""
    if isinstance(error, MlxError):
        return short_message(error)
    import traceback

    *_, last = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__}: {short_message(error)} ({Path(last.filename).name}:{last.lineno})"


def printable(text: str, *, one_line: bool = False) -> str:
    """Make text safe for a terminal: drop escape sequences and replace all other characters that do not print.

    Records may contain text from other people, which must not move the cursor or hide other output. With `one_line`,
    tabs and line breaks are replaced, too.
    """
    safe = _UNPRINTABLE.sub("\ufffd", _ESCAPES.sub("", text))
    return re.sub(r"[\t\n]", "\ufffd", safe) if one_line else safe


@contextlib.contextmanager
def user_errors(project: Path, translate: Callable[[BaseException, str, str], MlxError]) -> Iterator[None]:
    """Translate exceptions that a project's own code raises within the block.

    `translate` returns the error to raise instead, given the original, its summary like `ValueError: the message`, and
    the user's frames, innermost last.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if isinstance(error, MlxError) and not raised_in(error, project):
            raise
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", []))
        summary = f"{type(error).__name__}: {full_message(error)}".removesuffix(": ") + notes
        raise translate(error, summary, user_traceback(error, project)) from None


def note(error: BaseException, text: str) -> None:
    """Add a note, like `error.add_note(text)`, which Python 3.10 lacks."""
    vars(error).setdefault("__notes__", []).append(text)


def raised_in(error: BaseException, project: Path) -> bool:
    """Return True if a project's own code raised the error, rather than a library that it called."""
    import traceback

    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and _belongs_to(frames[-1].filename, project)


def user_traceback(error: BaseException, project: Path) -> str:
    """Format the frames of a project's own code, innermost last, and the frame that raised, unless it is the runtime's.

    Paths are relative to the project, as editors open them.
    """
    import traceback

    frames = traceback.extract_tb(error.__traceback__)
    lines = []
    for frame in frames:
        own = _belongs_to(frame.filename, project)
        if own or (frame is frames[-1] and not isinstance(error, MlxError)):
            file = os.path.relpath(frame.filename, project) if own else frame.filename
            lines.append(f"  {file}:{frame.lineno} in {frame.name}\n    {frame.line}")
    return "\n".join(lines)


def _belongs_to(file: str, project: Path) -> bool:
    ours = Path(file).is_relative_to(Path(__file__).parent)  # a job carries the runtime inside the project's folder
    return Path(file).is_relative_to(project) and "site-packages" not in file and not ours  # nor .venv
