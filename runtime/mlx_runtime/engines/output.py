"""What workers print, on its way to the log of their rank and to the driver."""

import codecs
import contextlib
import multiprocessing
import os
import queue
import threading
from collections.abc import Iterator
from multiprocessing import connection
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from mlx_runtime.layout import RunFolder
from mlx_runtime.logs import LogFile, log_name

CHUNK_BYTES = 65_536
"""What is read at once: as much as a pipe holds."""


class Lines(NamedTuple):
    """Whole lines that a worker printed, without the last newline."""

    rank: int
    text: str
    to_stderr: bool


class Output:
    """Pipes that take the place of the workers' stdout and stderr, and a thread that reads them.

    Native libraries write to the file descriptors themselves, so their messages arrive as well. Each
    complete line goes to the log at once, and to the driver when it asks.

    Args:
        folder: of the run.
        workers: their number.

    Attributes:
        writers: the workers' ends: stdout and stderr of each rank.
    """

    def __init__(self, folder: RunFolder, workers: int) -> None:
        self._lines: queue.SimpleQueue[Lines] = queue.SimpleQueue()
        self._logs = [LogFile(folder, log_name(rank)) for rank in range(workers)]
        pipes = [(multiprocessing.Pipe(duplex=False), multiprocessing.Pipe(duplex=False)) for _ in range(workers)]
        self.writers = [(stdout[1], stderr[1]) for stdout, stderr in pipes]
        self._readers = [
            _Reader(pair[number][0], rank, bool(number)) for rank, pair in enumerate(pipes) for number in (0, 1)
        ]
        self._closed, self._close = multiprocessing.Pipe(duplex=False)
        self._thread = threading.Thread(target=self._read, name="output", daemon=True)
        self._thread.start()

    def lines(self) -> Iterator[Lines]:
        """Yield what has arrived so far, not what arrives meanwhile, which may never end."""
        for _ in range(self._lines.qsize()):
            yield self._lines.get_nowait()

    def close(self) -> None:
        """Read what is left, for a last call of `lines`; the workers must have ended."""
        self._close.close()
        self._thread.join()
        for end in (*(reader.end for reader in self._readers), *(end for pair in self.writers for end in pair)):
            end.close()
        for log in self._logs:
            log.close()

    def _read(self) -> None:
        by_end: dict[Any, _Reader] = {reader.end: reader for reader in self._readers}
        while True:
            ready = connection.wait([*by_end, self._closed])
            for end in ready:
                if end is not self._closed:
                    self._take(by_end[end])
            if self._closed in ready:
                break
        for reader in self._readers:
            self._take(
                reader
            )  # no more than was there when the workers ended: a child of theirs may never stop printing
            if reader.rest:
                self._pass_on(reader, "\n")
        self._closed.close()

    def _take(self, reader: "_Reader") -> None:
        """Read what a pipe holds."""
        with contextlib.suppress(BlockingIOError):
            self._pass_on(reader, reader.decode(os.read(reader.end.fileno(), CHUNK_BYTES)))

    def _pass_on(self, reader: "_Reader", text: str) -> None:
        whole, newline, rest = text.rpartition("\n")
        if newline:
            whole, reader.rest = "".join([*reader.rest, whole]), []
            self._logs[reader.rank].write(whole + newline)
            self._lines.put(Lines(reader.rank, whole, reader.to_stderr))
        if rest:
            reader.rest.append(rest)


class _Reader:
    """One pipe, and its incomplete last line."""

    def __init__(self, end: "Connection[Any, Any]", rank: int, to_stderr: bool) -> None:
        os.set_blocking(end.fileno(), False)
        self.end, self.rank, self.to_stderr = end, rank, to_stderr
        self.rest: list[str] = []
        self.decode = codecs.getincrementaldecoder("utf-8")("replace").decode
