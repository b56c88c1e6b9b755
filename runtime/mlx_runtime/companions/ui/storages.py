"""The storages that a page shows: read in threads, because one that does not answer must not hold the page."""

import contextlib
import functools
import math
import multiprocessing
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pandas

from mlx_runtime.companions.ui.tables import RECORDS, folder_of, roots, runs_table
from mlx_runtime.errors import StorageError, short_message
from mlx_runtime.storage.files import storage_at
from mlx_runtime.workers.fork_server import die_with_parent

WAIT_S = 5.0
"""Time for a storage to answer; after that, its runs are shown as last read."""


class Reader:
    """What a function reads from a storage, for all tabs of all browsers.

    Attributes:
        value: what it has returned last.
        problem: a line, if the last call failed, or takes longer than `WAIT_S`.
    """

    def __init__(self, root: str, read: Callable[[str], Any]) -> None:
        self.value: Any = None
        self.problem: str | None = None
        self._root, self._read = root, read
        self._lock, self._thread = threading.Lock(), threading.Thread()
        self._began_s, self._ended_s = 0.0, -math.inf  # of the last call, and the last one that has returned

    @property
    def reads(self) -> bool:
        """True during a call."""
        return self._thread.is_alive()

    def begin(self, read: Callable[[str], Any] | None = None, age_s: float = 0.0) -> None:
        """Begin a call, optionally of another function, unless another tab has, or the value is no older than this."""
        with self._lock:
            if not self.reads and time.monotonic() - self._ended_s >= age_s:
                self._began_s = time.monotonic()
                self._thread = threading.Thread(target=self._work, args=[read or self._read], daemon=True)
                self._thread.start()

    def wait(self) -> None:
        """Wait for the end of the call, for at most `WAIT_S` from its beginning."""
        self._thread.join(max(0.0, self._began_s + WAIT_S - time.monotonic()))
        if self.reads:
            self.problem = f"{self._root} has not answered within {WAIT_S:g} s; its runs are listed as last read"

    def _work(self, read: Callable[[str], Any]) -> None:
        try:
            self.value, self.problem, self._ended_s = read(self._root), None, time.monotonic()
        except Exception as error:  # also of libraries: a thread would end without a word
            self.problem = f"{self._root} cannot be read: {short_message(error)}"


storage = functools.cache(lambda root: Reader(root, runs_table))
"""The table of the runs of a storage, which all tabs share."""

_experiments = functools.cache(lambda root: Reader(root, lambda root: storage_at(root).names()))


def begin(roots: Iterable[str]) -> None:
    """Begin to read storages, each in another process, because threads would slow down the start of the server."""
    pipes = {}
    for root in roots:  # all of them before there are threads, which must not be forked
        pipes[root], theirs = multiprocessing.Pipe(duplex=False)
        multiprocessing.get_context("fork").Process(target=_send, args=[root, theirs], daemon=True).start()
        theirs.close()
    for root, ours in pipes.items():
        storage(root).begin(functools.partial(_receive, ours))


def _receive(connection: Any, root: str) -> Any:
    try:
        table, known = connection.recv()
    except EOFError:  # it could not be read
        return runs_table(root)
    RECORDS.update(known)
    return table


def _send(root: str, connection: Any) -> None:
    die_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a handler would wait for a storage that hangs
    with contextlib.suppress(Exception, KeyboardInterrupt):
        connection.send((runs_table(root), RECORDS.entries))


def check(places: Iterable[str]) -> None:
    """Raise StorageError if a storage of these runs does not answer: what reads them would hold the page as long."""
    for root in {folder_of(place).root: None for place in places}:
        reader = _experiments(root)
        reader.begin()
        reader.wait()
        if reader.problem:
            raise StorageError(reader.problem)


def read(given: Sequence[str], age_s: float = 0.0) -> tuple[pandas.DataFrame, list[str], bool]:
    """Read storages. Return their runs, newest first, what cannot be read, and whether one has yet to answer.

    What was read within the last `age_s` seconds, perhaps for another tab, is not read again.
    """
    found = [storage(root) for root in given or roots(None)]
    for item in found:
        item.begin(age_s=age_s)
    for item in found:
        item.wait()
    known = [item.value for item in found if item.value is not None and len(item.value)]
    runs = pandas.concat(known, ignore_index=True) if known else runs_table([])
    problems = [line for line in (*(item.problem for item in found), *runs["problem"]) if isinstance(line, str)]
    runs = runs.drop(columns="age_s")  # which always changes
    runs = runs.sort_values("start", ascending=False, kind="stable", ignore_index=True)
    return runs, problems, any(item.reads for item in found)
