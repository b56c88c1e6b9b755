"""Output of local workers, on its way to the log of each rank and to the driver."""

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

from mlx_runtime.runs.folder import RunFolder
from mlx_runtime.runs.logs import LogFile, log_name

CHUNK_BYTES = 65_536
"""Bytes to read at once: the capacity of a pipe."""


class Lines(NamedTuple):
    """Complete lines that a worker printed, without the last newline."""

    rank: int
    text: str
    to_stderr: bool


class Output:
    """Pipes in place of the workers' stdout and stderr, and a thread that reads them.

    Native libraries write to the file descriptors, so their messages arrive as well. Each complete line is written to
    the log at once, and kept until the driver asks for it.

    Args:
        folder: The run folder, which holds the logs.
        workers: Number of workers.

    Attributes:
        writers: The workers' ends of the pipes: stdout and stderr by rank.
    """

    def __init__(self, folder: RunFolder, workers: int) -> None:
        self._lines: queue.SimpleQueue[Lines] = queue.SimpleQueue()
        self._logs = [LogFile(folder, log_name(rank)) for rank in range(workers)]
        pipes = [[multiprocessing.Pipe(duplex=False) for _ in range(2)] for _ in range(workers)]
        self.writers = [(stdout, stderr) for (_, stdout), (_, stderr) in pipes]
        self._readers = [
            _Reader(end, rank, bool(number)) for rank, pair in enumerate(pipes) for number, (end, _) in enumerate(pair)
        ]
        self._closed, self._close = multiprocessing.Pipe(duplex=False)
        self._thread = threading.Thread(target=self._read, name="output", daemon=True)
        self._thread.start()

    def lines(self) -> Iterator[Lines]:
        """Yield the lines that arrived before this call."""
        for _ in range(self._lines.qsize()):
            yield self._lines.get_nowait()

    def close(self) -> None:
        """Read the rest, for a last call of `lines`. The workers must have ended."""
        self._close.close()
        self._thread.join()
        for end in (*(reader.end for reader in self._readers), *(end for pair in self.writers for end in pair)):
            end.close()
        for log in self._logs:
            log.close()

    def _read(self) -> None:
        by_end: dict[Any, _Reader] = {reader.end: reader for reader in self._readers}
        while self._closed not in (ready := connection.wait([*by_end, self._closed])):
            for end in ready:
                self._take(by_end[end])
        for reader in self._readers:  # once: a child process of a worker may never stop printing
            self._take(reader)
            if reader.rest:
                self._pass_on(reader, "\n")
        self._closed.close()

    def _take(self, reader: "_Reader") -> None:
        """Read what a pipe holds."""
        with contextlib.suppress(BlockingIOError):
            self._pass_on(reader, reader.decode(os.read(reader.end.fileno(), CHUNK_BYTES)))

    def _pass_on(self, reader: "_Reader", text: str) -> None:
        complete, newline, rest = text.rpartition("\n")
        if newline:
            complete, reader.rest = "".join([*reader.rest, complete]), []
            self._logs[reader.rank].write(complete + newline)
            self._lines.put(Lines(reader.rank, complete, reader.to_stderr))
        if rest:
            reader.rest.append(rest)


class _Reader:
    """One pipe, and its incomplete last line."""

    def __init__(self, end: "Connection[Any, Any]", rank: int, to_stderr: bool) -> None:
        os.set_blocking(end.fileno(), False)
        self.end, self.rank, self.to_stderr = end, rank, to_stderr
        self.rest: list[str] = []
        self.decode = codecs.getincrementaldecoder("utf-8")("replace").decode
