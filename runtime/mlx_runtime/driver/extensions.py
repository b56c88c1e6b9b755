"""Extensions that accompany a run in the process of its driver, like the upload to a mirror."""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from mlx_runtime.errors import USER_ERRORS, MlxError, located
from mlx_runtime.events import Event, WarningNotice
from mlx_runtime.runs.records import Record

Listener = Callable[[Event], object]


class RunExtension(Protocol):
    """Accompanies a run. Companions provide one for a setting, and any object of `cfg.callbacks` can be one.

    It is entered after the driver has claimed the run folder, before anything else is written, and exited after the
    outcome is recorded, before it is announced. A `MlxError` on entering fails the run; all other exceptions are
    reported, and the run continues without the extension.
    """

    def accompany(self, run: "AccompaniedRun") -> contextlib.AbstractContextManager[Listener | None]:
        """Return a context manager. A function that it yields is called with the events of the run, one at a time."""


class AccompaniedRun:
    """A run as seen by its extensions.

    Args:
        record: fields of `run.json`; `record.folder` is the folder of the run.
        stop: called with a reason, ends the run after a checkpoint. May be called from any thread.
    """

    def __init__(self, record: Record, stop: Callable[[str], object]) -> None:
        self.record, self.stop = record, stop
        self.taken_over = False  # True at the end if another driver owns the run folder now: do not write to it
        self.interrupted = False  # True at the end if the user pressed Ctrl-C: do not make them wait
        self._sent: deque[Event] = deque()

    def notify(self, event: Event) -> None:
        """Send an event, such as a `Notice`, to all listeners of the run. May be called from any thread."""
        self._sent.append(event)

    def received(self) -> Iterator[Event]:
        """Yield the events that were sent since the last call."""
        for _ in range(len(self._sent)):  # events sent meanwhile are received by the next call
            yield self._sent.popleft()


class Extensions:
    """All extensions of one run, entered and exited together."""

    def __init__(self, extensions: Iterable[RunExtension]) -> None:
        self._extensions = tuple(extensions)
        self._run: AccompaniedRun | None = None
        self._entered: list[_EnteredExtension] = []
        self._calling = threading.RLock()  # because without workers, another thread reports checkpoints

    def enter(self, run: AccompaniedRun) -> None:
        self._run = run
        for extension in self._extensions:
            with self._catch_errors(extension):
                context = extension.accompany(run)
                self._entered.append(_EnteredExtension(extension, context, context.__enter__()))

    def handle(self, event: Event) -> None:
        """Call the listeners with an event. A listener that fails is not called again."""
        with self._calling:
            for entered in self._entered:
                if (listener := entered.listener) is not None:
                    with self._catch_errors(entered.extension, entered):
                        listener(event)

    def received(self) -> Iterator[Event]:
        """Yield the events that extensions have sent since the last call."""
        return self._run.received() if self._run is not None else iter(())

    def exit(self, *, taken_over: bool, interrupted: bool) -> None:
        if self._run is not None:
            self._run.taken_over, self._run.interrupted = taken_over, interrupted
        while self._entered:
            entered = self._entered.pop()
            try:
                with self._catch_errors(entered.extension, entered):
                    entered.context.__exit__(None, None, None)
            except KeyboardInterrupt:  # exit the others, too, without waiting
                assert self._run is not None
                self._run.interrupted = True

    @contextlib.contextmanager
    def _catch_errors(self, extension: RunExtension, entered: "_EnteredExtension | None" = None) -> Iterator[None]:
        """Report an exception of an extension, and send it no more events."""
        try:
            yield
        except USER_ERRORS as error:
            assert self._run is not None
            if entered is not None:
                entered.listener = None
            elif isinstance(error, MlxError):
                raise  # on entering
            text = f"{type(extension).__name__} failed, the run continues without it: {located(error)}"
            self._run.notify(WarningNotice(text))


@dataclass
class _EnteredExtension:
    extension: RunExtension
    context: contextlib.AbstractContextManager[Listener | None]
    listener: Listener | None
