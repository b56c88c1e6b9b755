"""The storages that a page shows: read in threads, because one that does not answer must not hold the page."""

import functools
import threading
import time
from collections.abc import Sequence

import pandas

from mlx_runtime.companions.ui.tables import roots, runs_table
from mlx_runtime.errors import short_message

WAIT_S = 5.0
"""Time for a storage to answer; after that, its runs are shown as last read."""


class Storage:
    """The runs of one storage, for all tabs of all browsers."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.runs: pandas.DataFrame | None = None  # as far as they are known
        self.problem: str | None = None  # a line, if the storage could not be read
        self._lock, self._reader, self._began_s = threading.Lock(), threading.Thread(), 0.0

    def read(self) -> None:
        """Begin to read the runs, unless another tab has."""
        with self._lock:
            if not self._reader.is_alive():
                self._began_s = time.monotonic()
                self._reader = threading.Thread(target=self._work, name=self.root, daemon=True)
                self._reader.start()

    def wait(self) -> None:
        """Wait until the runs have been read, for at most `WAIT_S` from the beginning of the read."""
        self._reader.join(max(0.0, self._began_s + WAIT_S - time.monotonic()))
        if self._reader.is_alive():
            self.problem = f"{self.root} has not answered within {WAIT_S:g} s; showing its runs as last read"

    def _work(self) -> None:
        try:
            self.runs, self.problem = runs_table(self.root), None
        except Exception as error:  # also of libraries: a thread would end without a word
            self.problem = f"{self.root} cannot be read: {short_message(error)}"


storage = functools.cache(Storage)
"""Returns the storage at a root, which all tabs share."""


def read(given: Sequence[str]) -> tuple[pandas.DataFrame, list[str]]:
    """Return the runs of storages, newest first, and a line for each storage and run that cannot be read."""
    found = [storage(root) for root in given or roots(None)]
    for item in found:
        item.read()
    for item in found:
        item.wait()
    known = [item.runs for item in found if item.runs is not None and len(item.runs)]
    runs = pandas.concat(known, ignore_index=True) if known else runs_table([])
    problems = [line for line in (*(item.problem for item in found), *runs["problem"]) if isinstance(line, str)]
    runs = runs.drop(columns="age_s")  # which always changes
    return runs.sort_values("start", ascending=False, kind="stable", ignore_index=True), problems
