"""The storages that a page shows: read in threads, because one that does not answer must not hold the page."""

import functools
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mlx_runtime.companions.ui.tables import no_runs, roots, runs_table
from mlx_runtime.errors import MlxError, short_message

if TYPE_CHECKING:
    import pandas

WAIT_S = 5.0
"""Time for a storage to answer; after that, its runs of the last time are shown."""


class Storage:
    """The runs of one storage, for all tabs of all browsers."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.runs: pandas.DataFrame | None = None  # as far as they are known
        self.problem: str | None = None  # a line, if the storage could not be read
        self._lock, self._reader = threading.Lock(), threading.Thread()

    def read(self) -> threading.Thread:
        """Begin to read the runs, unless another tab has, and return the thread that does."""
        with self._lock:
            if not self._reader.is_alive():
                self._reader = threading.Thread(target=self._work, name=self.root, daemon=True)
                self._reader.start()
            return self._reader

    def wait(self, reader: threading.Thread) -> None:
        """Wait for a thread that reads the runs, but not for ever."""
        reader.join(WAIT_S)
        if reader.is_alive():
            self.problem = f"{self.root} has not answered within {WAIT_S:g} s; these are its runs of the last time"

    def _work(self) -> None:
        try:
            self.runs, self.problem = runs_table(self.root), None
        except (MlxError, OSError) as error:
            self.problem = f"{self.root} cannot be read: {short_message(error)}"


storage = functools.cache(Storage)
"""Returns the storage at a root, which all tabs share."""


def read(given: Sequence[str]) -> "tuple[pandas.DataFrame, list[str]]":
    """Return the runs of storages, newest first, and a line for each storage and run that cannot be read."""
    import pandas

    found = [storage(root) for root in given or roots(None)]
    for item, reader in [(item, item.read()) for item in found]:  # all at the same time
        item.wait(reader)
    known = [item.runs for item in found if item.runs is not None and len(item.runs)]
    runs = pandas.concat(known, ignore_index=True) if known else no_runs()
    problems = [line for line in (*(item.problem for item in found), *runs["problem"]) if isinstance(line, str)]
    runs = runs.drop(columns="age_s")  # which always changes
    return runs.sort_values("start", ascending=False, kind="stable", ignore_index=True), problems
