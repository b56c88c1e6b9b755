"""What processes of a run print, kept in its folder: `logs/driver.log` and one `logs/rank_N.log` per worker."""

import contextlib
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO, cast

from mlx_runtime.errors import StorageError
from mlx_runtime.layout import RunFolder
from mlx_runtime.storage import Storage

DRIVER = "driver"

PUSH_S = 10.0
"""How often a log is copied to an object store."""


def log_name(rank: int | None = None) -> str:
    """Of a rank's log in the run folder, or of the driver's."""
    return f"logs/{DRIVER if rank is None else f'rank_{rank}'}.log"


class LogFile:
    """A log in the folder of a run, copied to its object store now and then. A full disk ends it, and nothing else.

    Args:
        folder: of the run.
        name: in the folder.
    """

    def __init__(self, folder: RunFolder, name: str) -> None:
        self._folder, self._name = folder, name
        self._path = folder.path / name
        self._file: TextIO | None = None
        self._done = threading.Event()
        self._pushed = 0
        with contextlib.suppress(OSError, StorageError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if folder.uri is not None:  # this process may continue one that ran on another machine
                self._path.unlink(missing_ok=True)
                storage = Storage(folder.uri)
                if storage.size_bytes(name) is not None:
                    storage.download(self._path, name)
                threading.Thread(target=self._push_often, name="log", daemon=True).start()
            self._file = self._path.open("a", encoding="utf-8", errors="replace", buffering=1)

    def write(self, text: str) -> None:
        """Add a text; each line is on disk at once."""
        if self._file is not None:
            try:
                self._file.write(text)
            except (OSError, ValueError):
                self._file = None

    def close(self) -> None:
        self._done.set()
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()
            self._push()

    def _push_often(self) -> None:
        while not self._done.wait(PUSH_S):
            self._push()

    def _push(self) -> None:
        with contextlib.suppress(OSError):
            size = self._path.stat().st_size
            if size != self._pushed:
                self._folder.push(self._path)
                self._pushed = size


class Log:
    """Copies what this process prints to a file of the run while the block runs.

    Args:
        folder: of the run.
        rank: of the worker that this process is; None for the driver.

    Attributes:
        screen: what `sys.stdout` was.
    """

    def __init__(self, folder: RunFolder, rank: int | None = None) -> None:
        self.screen: TextIO = sys.stdout
        self._folder, self._name = folder, log_name(rank)
        self._file: LogFile | None = None
        self._before: tuple[TextIO, TextIO] | None = None

    @property
    def copy(self) -> TextIO | None:
        """Where to draw what is drawn on a terminal, for the log; None where the log gets what is printed."""
        return cast(TextIO, self) if self.screen.isatty() else None

    def write(self, text: str) -> None:
        """Add to the file what is not printed."""
        if self._file is not None:
            self._file.write(text)

    def flush(self) -> None:
        """As text streams have it."""

    def __enter__(self) -> "Log":
        self._before = sys.stdout, sys.stderr
        self._file = LogFile(self._folder, self._name)
        sys.stdout, sys.stderr = (cast(TextIO, _Tee(stream, self)) for stream in self._before)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._before is not None
        assert self._file is not None
        sys.stdout, sys.stderr = self._before
        self._file.close()


class _Tee:
    """A text stream whose text also goes to a log, unless it is a terminal: bars are not for files."""

    def __init__(self, stream: TextIO, log: Log) -> None:
        self._stream, self._log = stream, log

    def write(self, text: str) -> int:
        if not self._stream.isatty():
            self._log.write(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def stored(folder: RunFolder, rank: int | None = None) -> bytes | None:
    """The log of a run as far as it is stored, or None when there is none.

    Raises:
        StorageError: the storage does not answer.
    """
    name = log_name(rank)
    try:
        if folder.uri is None:
            return (folder.path / name).read_bytes()
        return Storage(folder.uri).read(name)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError(f"cannot read {folder.place}/{name}: {error}") from error


def last_lines(text: str, count: int) -> str:
    """The end of a text."""
    return "".join(text.splitlines(keepends=True)[-count:]) if count > 0 else ""


def ranks(folder: RunFolder) -> list[str]:
    """The ranks whose logs are stored."""
    names = [Path(name).stem for name in Storage(folder.place).names("logs")]
    return sorted((name.removeprefix("rank_") for name in names if name.startswith("rank_")), key=int)
