"""Requests to end a run early: by code, SIGTERM, `mlx xp stop`, or another driver that takes the run over.

A closed terminal sends SIGHUP, which has the same effect as SIGTERM unless it is ignored, as under nohup.
"""

import _thread
import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from mlx_runtime.errors import RunStopped, StorageError
from mlx_runtime.runs.folder import RunFolder

GRACE_S = 25.0
"""Time for workers to finish the current step and a checkpoint. Kubernetes kills 30 s after SIGTERM."""

POLL_S = 1.0
"""Interval at which the run folder is checked; ten times as long on an object store."""

DRIVER_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end a run. A terminal sends them to all of its processes."""

OUTPUT_CLOSED = "standard output was closed"
"""Reason of the stop if nobody reads the output of the run any more."""

EXIT_CODES = {"SIGHUP": 129, OUTPUT_CLOSED: 141}
"""Exit codes of shells for signals, by reason of the stop; 141 is for SIGPIPE. Other reasons have that of SIGTERM."""


@contextlib.contextmanager
def held_signals() -> Iterator[None]:
    """Hold back `DRIVER_SIGNALS` from processes started in the block until they call `leave_the_terminal`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, DRIVER_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Terminated(KeyboardInterrupt):
    """The run ends because of a request other than Ctrl-C."""


class StopRequests:
    """Collects requests to end a run, from any thread, and ends it if the workers take too long.

    After a request, workers that train save a checkpoint; before training, and after `GRACE_S`, the run ends
    immediately. From other threads, `interrupt` raises `Terminated` in the driver's thread, which may be busy; by
    default, the driver ends at its next call of `check`.
    """

    def __init__(self, interrupt: Callable[[], None] = lambda: None) -> None:
        self.reason: str | None = None  # reason of the first request
        self.pruned = False  # that request was to prune the run
        self.taken_over = False  # another driver owns the run
        self.outage = ""  # error of the storage, while it does not answer
        self.locate: Callable[[RunFolder], None] | None = None  # stores the positions of workers, if there are any
        self.interrupted = False  # `interrupt` has just been called
        self._interrupt = interrupt
        self._requested_at = 0.0
        self._graceful = False

    @property
    def exit_code(self) -> int:
        """Exit code of the process after a request to end the run."""
        return EXIT_CODES.get(self.reason or "", 143)

    def allow_checkpoint(self) -> None:
        """Record that workers are training, and can save a checkpoint before they stop."""
        self._graceful = True

    def request(self, reason: str, *, prune: bool = False) -> None:
        """Request the end of the run; with `prune`, for good."""
        if self.reason is None or reason == RunStopped.REQUESTED:
            self.reason, self.pruned, self._requested_at = reason, prune, time.monotonic()
        if not self._graceful:
            self.interrupt()

    def interrupt(self) -> None:
        """End the run in the driver's thread without waiting for a checkpoint."""
        self.interrupted = True
        self._interrupt()

    def immediate(self) -> bool:
        """Return True if another request ends the run immediately: it is the second, or comes before training."""
        return self.taken_over or self.reason is not None or not self._graceful

    def check(self) -> None:
        """End the run if it must not wait for a checkpoint.

        Raises:
            Terminated: the request came before training, or the time for a checkpoint is over.
        """
        patience = GRACE_S if self._graceful else 0.0
        if self.taken_over or (self.reason is not None and time.monotonic() - self._requested_at >= patience):
            raise Terminated

    @contextlib.contextmanager
    def watch(self, folder: RunFolder, attempt: int) -> Iterator[None]:
        """Watch the run folder within the block for stop requests and for drivers with a higher attempt."""
        done = threading.Event()
        threading.Thread(target=self._watch, args=(folder, attempt, done), name="control", daemon=True).start()
        try:
            yield
        finally:
            done.set()
            folder.withdraw(folder.STOP)

    def _watch(self, folder: RunFolder, attempt: int, done: threading.Event) -> None:
        while not done.wait(POLL_S * (10 if folder.uri else 1)):
            try:
                names, self.outage = folder.names(), ""
            except StorageError as error:
                self.outage = str(error)
                continue
            if folder.STOP in names and self.reason != RunStopped.REQUESTED:
                self.request(RunStopped.REQUESTED)
            if folder.LOCATE in names:
                from mlx_runtime.workers.deadlocks import answer_here

                with contextlib.suppress(Exception):  # an error must not end this thread
                    (self.locate or answer_here)(folder)
            self.taken_over = folder.attempts(names) > attempt
            if self.taken_over:
                self.interrupt()
                return


@contextlib.contextmanager
def sigterm_stops(control: StopRequests, *, once: bool = False) -> Iterator[None]:
    """Turn SIGTERM, and SIGHUP unless it is ignored, into a request within the block.

    Does nothing outside the main thread.

    Args:
        control: collects the request.
        once: Ignore a signal after the first request of any kind; otherwise, it ends the run immediately.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminate(number: int, _: Any) -> None:
        interrupted, control.interrupted = control.interrupted, False
        if once and control.reason is not None and not interrupted:
            return
        if control.immediate():
            control.reason = control.reason or signal.Signals(number).name
            raise Terminated
        control.request(signal.Signals(number).name)

    numbers = [item for item in (signal.SIGTERM, signal.SIGHUP) if not (item == signal.SIGHUP and hangup_ignored())]
    before = {number: signal.signal(number, terminate) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def hangup_ignored() -> bool:
    """Return True if this process should outlive its terminal, as under nohup."""
    return signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def interrupt_main() -> None:
    """Raise `Terminated` in the main thread, within `sigterm_stops`."""
    _thread.interrupt_main(signal.SIGTERM)
