"""Output of a run's processes, stored in its folder: `logs/driver.log` and one `logs/rank_N.log` per worker."""

import contextlib
import sys
from typing import Any, TextIO, cast

from mlx_runtime.errors import StorageError
from mlx_runtime.runs.folder import RunFolder
from mlx_runtime.storage.files import storage_at
from mlx_runtime.storage.leases import heartbeat
from mlx_runtime.storage.local import regular

PUSH_S = 10.0
"""Interval at which a log is copied to an object store."""


def log_name(rank: int | None = None) -> str:
    """Return the path of the log of a rank, or of the driver, in the run folder."""
    return "logs/driver.log" if rank is None else f"logs/rank_{rank}.log"


class LogFile:
    """A log in the folder of a run, copied to its object store periodically. A full disk ends the log, not the run."""

    def __init__(self, folder: RunFolder, name: str) -> None:
        self._folder, self._path = folder, folder.path / name
        self.stream: TextIO | None = None  # None if it cannot be written
        self._pushing = contextlib.ExitStack()
        self._pushed_bytes = 0
        with contextlib.suppress(OSError, StorageError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if folder.uri is not None:  # the log may have begun on another machine
                self._path.unlink(missing_ok=True)
                storage = storage_at(folder.uri)
                if storage.size_bytes(name) is not None:
                    storage.download(self._path, name)
                self._pushing.enter_context(heartbeat(self.push, PUSH_S))
            self.stream = open(self._path, "a", 1, "utf-8", "replace", opener=regular)  # noqa: SIM115

    def write(self, text: str) -> None:
        """Append text; each line is flushed immediately."""
        if self.stream is not None:
            try:
                self.stream.write(text)
            except (OSError, ValueError):
                self.stream = None

    def close(self) -> None:
        self._pushing.close()
        file, self.stream = self.stream, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()
            self.push()

    def push(self) -> None:
        with contextlib.suppress(OSError, StorageError):
            size = self._path.stat().st_size
            if size != self._pushed_bytes:
                self._folder.push(self._path, must=True)
                self._pushed_bytes = size


class Log(LogFile):
    """Copies the output of this process, a worker or the driver, to a log while the block runs.

    `screen` is the original `sys.stdout`.
    """

    def __init__(self, folder: RunFolder, rank: int | None = None) -> None:
        super().__init__(folder, log_name(rank))
        self.screen: TextIO = sys.stdout
        self._before = sys.stdout, sys.stderr

    @property
    def copy(self) -> TextIO | None:
        """Stream for a copy of the terminal's output; None if the log receives all output anyway."""
        return cast(TextIO, self) if self.screen.isatty() else None

    def flush(self) -> None:
        """Do nothing; part of the interface of text streams."""

    def __enter__(self) -> "Log":
        sys.stdout, sys.stderr = (cast(TextIO, _Tee(stream, self)) for stream in self._before)
        return self

    def __exit__(self, *_: object) -> None:
        sys.stdout, sys.stderr = self._before
        self.close()


class _Tee:
    """A text stream that also writes to a log, unless it is a terminal: logs should not contain progress bars."""

    def __init__(self, stream: TextIO, log: Log) -> None:
        self._stream, self._log = stream, log

    def write(self, text: str) -> int:
        if not self._stream.isatty():
            self._log.write(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def last_lines(text: str, count: int) -> str:
    return "".join(text.splitlines(keepends=True)[-count:]) if count > 0 else ""
