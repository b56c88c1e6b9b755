"""The storages that a page shows: read in threads, because one that does not answer must not hold the page."""

import functools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pandas

from mlx_runtime.companions.ui.tables import folder_of, roots, runs_table
from mlx_runtime.errors import StorageError, short_message
from mlx_runtime.storage.files import storage_at

WAIT_S = 5.0
"""Time for a storage to answer; after that, its runs are shown as last read."""


class Reader:
    """What a function reads from a storage, for all tabs of all browsers.

    Attributes:
        value: what it has returned last.
        problem: a line, if the last call failed, or takes longer than `WAIT_S`.
    """

    def __init__(self, root: str, read: Callable[[], Any]) -> None:
        self.value: Any = None
        self.problem: str | None = None
        self._root, self._read = root, read
        self._lock, self._thread, self._began_s = threading.Lock(), threading.Thread(), 0.0

    @property
    def reads(self) -> bool:
        """True during a call."""
        return self._thread.is_alive()

    def begin(self) -> None:
        """Begin a call, unless another tab has."""
        with self._lock:
            if not self.reads:
                self._began_s = time.monotonic()
                self._thread = threading.Thread(target=self._work, name=self._root, daemon=True)
                self._thread.start()

    def wait(self) -> None:
        """Wait for the end of the call, for at most `WAIT_S` from its beginning."""
        self._thread.join(max(0.0, self._began_s + WAIT_S - time.monotonic()))
        if self.reads:
            self.problem = f"{self._root} has not answered within {WAIT_S:g} s; its runs are listed as last read"

    def _work(self) -> None:
        try:
            self.value, self.problem = self._read(), None
        except Exception as error:  # also of libraries: a thread would end without a word
            self.problem = f"{self._root} cannot be read: {short_message(error)}"


@functools.cache
def storage(root: str) -> Reader:
    """Return the table of the runs of a storage, which all tabs share."""
    return Reader(root, lambda: runs_table(root))


@functools.cache
def _experiments(root: str) -> Reader:
    return Reader(root, lambda: storage_at(root).names())


def check(places: Iterable[str]) -> None:
    """Raise StorageError if a storage of these runs does not answer: what reads them would hold the page as long."""
    for root in {folder_of(place).root: None for place in places}:
        reader = _experiments(root)
        reader.begin()
        reader.wait()
        if reader.problem:
            raise StorageError(reader.problem)


def read(given: Sequence[str]) -> tuple[pandas.DataFrame, list[str], bool]:
    """Read storages. Return their runs, newest first, what cannot be read, and whether one has yet to answer."""
    found = [storage(root) for root in given or roots(None)]
    for item in found:
        item.begin()
    for item in found:
        item.wait()
    known = [item.value for item in found if item.value is not None and len(item.value)]
    runs = pandas.concat(known, ignore_index=True) if known else runs_table([])
    problems = [line for line in (*(item.problem for item in found), *runs["problem"]) if isinstance(line, str)]
    runs = runs.drop(columns="age_s")  # which always changes
    runs = runs.sort_values("start", ascending=False, kind="stable", ignore_index=True)
    return runs, problems, any(item.reads for item in found)
