"""Requests to end a run early: `Driver.stop`, SIGTERM, `mlx xp stop`, or another driver that takes the run over."""

import _thread
import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from mlx_runtime.errors import StorageError
from mlx_runtime.runs.folder import RunFolder, asked_to_stop, withdraw_stop

GRACE_S = 25.0
"""How long workers have to finish the current step and a checkpoint. Kubernetes kills 30 s after SIGTERM."""

POLL_S = 1.0
"""Interval between two looks at the run folder; ten times as long on an object store."""


class Terminated(KeyboardInterrupt):
    """The run ends because it was asked to, not by Ctrl-C."""


class StopRequests:
    """Collects requests to end a run, from any thread, and ends it if the workers take too long.

    While workers train, a request lets them save a checkpoint first; before that, and after `GRACE_S`, the run ends
    immediately. From other threads, `interrupt` raises `Terminated` in the driver's thread, which may be busy; if not,
    the driver ends the next time it calls `check`.
    """

    def __init__(self, interrupt: Callable[[], None] = lambda: None) -> None:
        self.reason: str | None = None  # of the first request
        self.pruned = False  # that request was to prune the run
        self.taken_over = False  # another driver owns the run
        self._interrupt = interrupt
        self._requested_at = 0.0
        self._graceful = False

    def allow_checkpoint(self) -> None:
        """Record that workers are training, and can save a checkpoint before they stop."""
        self._graceful = True

    def request(self, reason: str, *, prune: bool = False) -> None:
        """Ask the run to end, with `prune` for good."""
        if self.reason is None:
            self.reason, self.pruned, self._requested_at = reason, prune, time.monotonic()
        if not self._graceful:
            self._interrupt()

    def immediate(self) -> bool:
        """Return True if another request ends the run immediately: it is the second, or comes before training."""
        return self.taken_over or self.reason is not None or not self._graceful

    def check(self) -> None:
        """End the run if it may not wait for a checkpoint.

        Raises:
            Terminated: the request came before workers were training, or they have had enough time to stop.
        """
        patience = GRACE_S if self._graceful else 0.0
        if self.taken_over or (self.reason is not None and time.monotonic() - self._requested_at >= patience):
            raise Terminated

    @contextlib.contextmanager
    def watching(self, folder: RunFolder, attempt: int) -> Iterator[None]:
        """Watch the run folder within the block for stop requests and for drivers with a higher attempt."""
        done = threading.Event()
        threading.Thread(target=self._watch, args=(folder, attempt, done), name="control", daemon=True).start()
        try:
            yield
        finally:
            done.set()
            withdraw_stop(folder)

    def _watch(self, folder: RunFolder, attempt: int, done: threading.Event) -> None:
        while not done.wait(POLL_S * (10 if folder.uri else 1)):
            if self.reason is None and asked_to_stop(folder):
                self.request("mlx xp stop")
            with contextlib.suppress(StorageError):
                if folder.attempts() > attempt:
                    self.taken_over = True
                    self._interrupt()
                    return


@contextlib.contextmanager
def sigterm_stops(control: StopRequests) -> Iterator[None]:
    """Turn SIGTERM into a request within the block. Does nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminate(*_: Any) -> None:
        if control.immediate():
            raise Terminated
        control.request("SIGTERM")

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def interrupt_main() -> None:
    """Raise `Terminated` in the main thread, within `sigterm_stops`."""
    _thread.interrupt_main(signal.SIGTERM)
