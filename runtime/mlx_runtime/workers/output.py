"""Output of local workers, passed to the log of each rank and to the driver."""

import codecs
import contextlib
import multiprocessing
import os
import queue
import threading
from collections.abc import Iterator
from multiprocessing import connection
from typing import Any

from mlx_runtime.events import WorkerOutput
from mlx_runtime.runs.folder import RunFolder
from mlx_runtime.runs.logs import LogFile, log_name

CHUNK_BYTES = 65_536
"""Bytes to read at once: the capacity of a pipe."""


class Output:
    """Pipes in place of the workers' stdout and stderr, and a thread that reads them.

    Messages of native libraries, which write to the file descriptors, arrive as well. Each complete line is written to
    the log immediately, and kept until the driver reads it. `writers` are the workers' ends: stdout and stderr by rank.
    """

    def __init__(self, folder: RunFolder, workers: int) -> None:
        self._lines: queue.SimpleQueue[WorkerOutput] = queue.SimpleQueue()
        self._logs = [LogFile(folder, log_name(rank)) for rank in range(workers)]
        self._readers: list[_Reader] = []
        self.writers: list[tuple[Any, Any]] = []
        for log in self._logs:
            (stdout, stdouts_writer), (stderr, stderrs_writer) = (multiprocessing.Pipe(duplex=False) for _ in range(2))
            self._readers += [_Reader(stdout, log, self._lines, False), _Reader(stderr, log, self._lines, True)]
            self.writers.append((stdouts_writer, stderrs_writer))
        self._closed, self._close = multiprocessing.Pipe(duplex=False)
        self._thread = threading.Thread(target=self._read, name="output", daemon=True)
        self._thread.start()

    def lines(self) -> Iterator[WorkerOutput]:
        """Yield the lines that arrived before this call."""
        for _ in range(self._lines.qsize()):
            yield self._lines.get_nowait()

    def close(self) -> None:
        """Read the remaining output, for a last call of `lines`. The workers must have ended."""
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
                by_end[end].take()
        for reader in self._readers:  # once: a child process of a worker may never stop printing
            reader.take()
            reader.complete()
        self._closed.close()


class _Reader:
    """One pipe, and its incomplete last line."""

    def __init__(self, end: Any, log: LogFile, lines: "queue.SimpleQueue[WorkerOutput]", to_stderr: bool) -> None:
        os.set_blocking(end.fileno(), False)
        self.end, self._log, self._lines, self._to_stderr = end, log, lines, to_stderr
        self._rest: list[str] = []
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def take(self) -> None:
        """Read from the pipe, and pass on complete lines."""
        with contextlib.suppress(BlockingIOError):
            self._pass_on(self._decode(os.read(self.end.fileno(), CHUNK_BYTES)))

    def complete(self) -> None:
        """Pass on an incomplete last line."""
        if self._rest:
            self._pass_on("\n")

    def _pass_on(self, text: str) -> None:
        lines, newline, rest = text.rpartition("\n")
        if newline:
            lines, self._rest = "".join([*self._rest, lines]), []
            self._log.write(lines + newline)
            self._lines.put(WorkerOutput(lines, self._to_stderr))
        if rest:
            self._rest.append(rest)
