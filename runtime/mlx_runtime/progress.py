"""What a person sees while a run trains: workers send events, the driver draws them, and can ask workers to stop.

The driver draws, because Ray streams workers' output late and line by line: a bar would be unreadable and the last
lines could come after the end. An event is a JSON object with a `kind` and, from another process, the `rank` of
its sender:

    step        stage, epoch, step, steps, rate (steps per second), values (latest, may be empty)
    epoch       epoch, epochs, values, seconds, samples_per_s and data_wait_pct where a training set was read
    report      step, epoch, values, facts: sent only when a callback wants it
    checkpoint  epoch, finished, step, path, metrics
    notice      text, once: True when several workers may say the same
    warning     text, which a quiet display shows too
    output      text, to_stderr: lines that a worker of the local engine has printed
    hello       a worker is connected
    hang        no step for long: epoch, stage, step, at, waits_in, seconds
    where       the same, when asked
"""

import contextlib
import json
import os
import pdb
import queue
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge
from typing import Any, Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from mlx_runtime.epochs import EpochTable

Event = dict[str, Any]

LINES_PER_EPOCH = 5
"""In a pipe, how many lines a long stage of an epoch prints at the most."""

RECENT_EPOCHS = 5
"""By how many of the latest epochs the time left is told; the first take longer."""

SECONDS_PER_LINE = 2.0
"""In a pipe, the shortest time between two lines of one stage, so that short epochs print only their summary."""


NOWHERE: dict[str, Any] = {
    "epoch": 0,
    "stage": None,
    "step": 0,
    "at": "",
    "waits_in": None,
    "seconds": 0.0,
    "gpu": False,
}
"""Where a worker stands that is not ready yet."""

STOP, WHERE = b"stop", b"where"
"""What the driver says to workers: save a checkpoint and end; tell where you stand."""


HANDSHAKE_S = 10.0
"""How long a connection to the driver has to prove that it is a worker's."""

STRANGERS = 256
"""Connections that may be about to prove it; more than workers that connect at the same time."""


class Sink(Protocol):
    """Where a worker sends its events, and whether the driver wants it to stop."""

    def send(self, event: Event) -> None: ...

    def stop_asked(self) -> bool: ...


class Direct:
    """A sink in the driver's own process.

    Args:
        handle: takes events.
        stop_asked: whether the run shall end.
    """

    def __init__(self, handle: Callable[[Event], None], stop_asked: Callable[[], bool] = lambda: False) -> None:
        self.send, self.stop_asked = handle, stop_asked


class Remote:
    """A sink over TCP to the driver. When it cannot be reached, what rank 0 says is drawn on this worker's stdout.

    Attributes:
        where: asked by the driver, gives what it wants to know about where this worker stands.

    Args:
        address, key: of the driver's `Receiver`.
        rank: of this worker.
    """

    def __init__(self, address: tuple[str, int], key: bytes, rank: int) -> None:
        self.where: Callable[[], Event] = lambda: NOWHERE
        self._rank = rank
        self._connection: Connection[Any, Any] | None = None
        self._display = Display(sys.stdout)
        self._stop = threading.Event()
        self._sending = threading.Lock()  # checkpoints are told about from a thread of their own
        with contextlib.suppress(OSError, EOFError):
            self._connection = Client(address, authkey=key)
            threading.Thread(target=self._listen, args=(self._connection,), name="driver", daemon=True).start()
        self.send({"kind": "hello"})

    def send(self, event: Event) -> None:
        with self._sending:
            if self._connection is not None:
                try:
                    self._connection.send_bytes(json.dumps(event | {"rank": self._rank}).encode())
                    return
                except OSError:
                    self._connection = None  # the driver is gone; Ray ends this worker soon
        if self._rank == 0:
            self._display.handle(event)

    def stop_asked(self) -> bool:
        return self._stop.is_set()

    def close(self) -> None:
        with self._sending:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def _listen(self, connection: "Connection[Any, Any]") -> None:
        with contextlib.suppress(EOFError, OSError, TypeError):  # TypeError: closed while this thread waits
            while True:
                question = connection.recv_bytes()
                if question == STOP:
                    self._stop.set()
                elif question == WHERE:
                    self.send({"kind": "where", **self.where()})


class Receiver:
    """The driver's end: collects the events of the workers, of their replacements too.

    Anybody on the network can connect. A connection has `HANDSHAKE_S` to prove that it knows the key; with more than
    `STRANGERS` that have not, the oldest are closed.

    Attributes:
        address: (host, port) that workers connect to.
        key: secret that they must know.
    """

    def __init__(self, host: str) -> None:
        self.key = secrets.token_bytes(16)
        self._listener = socket.create_server((host, 0), backlog=128)
        self.address: tuple[str, int] = (host, self._listener.getsockname()[1])
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._open: list[threading.Thread] = []
        self._workers: list[Connection[Any, Any]] = []
        self._strangers: dict[socket.socket, float] = {}
        self._lock = threading.Lock()  # of `_strangers`
        self._closed = threading.Event()
        threading.Thread(target=self._accept, name="progress", daemon=True).start()

    def events(self, timeout_s: float) -> Iterator[Event]:
        """What has arrived; waits `timeout_s` for a first event."""
        with contextlib.suppress(queue.Empty):
            yield self._events.get(timeout=timeout_s)
            while True:
                yield self._events.get_nowait()

    def drain(self, timeout_s: float = 2.0) -> Iterator[Event]:
        """What is left once the workers have closed their ends."""
        for thread in list(self._open):
            thread.join(timeout_s)
        yield from self.events(timeout_s=0.01)

    def tell(self, order: bytes) -> None:
        """Say something to every worker that listens."""
        for connection in list(self._workers):
            with contextlib.suppress(OSError):
                connection.send_bytes(order)

    def close(self) -> None:
        self._closed.set()
        self._listener.close()
        self._drop_strangers(0)

    def _accept(self) -> None:
        self._listener.settimeout(min(1.0, HANDSHAKE_S))
        while not self._closed.is_set():
            try:
                stranger, _ = self._listener.accept()
            except TimeoutError:
                stranger = None
            except OSError:  # closed, or too many files are open
                self._closed.wait(0.1)
                continue
            if stranger is not None:
                stranger.settimeout(None)
                with self._lock:
                    self._strangers[stranger] = time.monotonic()
                threading.Thread(target=self._talk, args=(stranger,), daemon=True).start()
            self._drop_strangers(STRANGERS)

    def _drop_strangers(self, most: int) -> None:
        """Hang up on connections that have not proved in time to be a worker's, and on the oldest beyond `most`."""
        with self._lock:
            number, latest = len(self._strangers), time.monotonic() - HANDSHAKE_S
            for index, (stranger, since) in enumerate(list(self._strangers.items())):
                if index < number - most or since < latest:
                    del self._strangers[stranger]
                    with contextlib.suppress(OSError):
                        stranger.shutdown(socket.SHUT_RDWR)  # the thread that reads from it ends and closes it

    def _talk(self, stranger: socket.socket) -> None:
        with contextlib.suppress(OSError), stranger, Connection(os.dup(stranger.fileno())) as connection:
            try:
                deliver_challenge(connection, self.key)
                answer_challenge(connection, self.key)
            except Exception:  # a stranger without the key, or one who hung up
                return
            finally:
                with self._lock:
                    in_time = self._strangers.pop(stranger, None) is not None
            if in_time:
                self._open.append(threading.current_thread())
                self._read(connection)

    def _read(self, connection: "Connection[Any, Any]") -> None:
        self._workers.append(connection)
        with contextlib.suppress(EOFError, OSError):
            while True:
                event = _event(connection.recv_bytes())
                if event is not None:
                    self._events.put(event)
        self._workers.remove(connection)


def _event(message: bytes) -> Event | None:
    """The event in a message, or None if there is none in it."""
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(message)
        if isinstance(found, dict) and isinstance(found.get("kind"), str) and type(found.get("rank")) is int:
            return found
    return None


@contextlib.contextmanager
def at_breakpoint(allowed: Callable[[], bool]) -> Iterator[None]:
    """While the block runs, ask at each `breakpoint()` whether the debugger may start, unless it is switched off."""
    before = sys.breakpointhook

    def hook(*args: Any, **options: Any) -> Any:
        debugger = os.environ.get("PYTHONBREAKPOINT", "")
        if debugger == "0" or not allowed():
            return None
        if before is not sys.__breakpointhook__ or debugger not in ("", "pdb.set_trace"):
            return before(*args, **options)
        return pdb.Pdb().set_trace(sys._getframe().f_back)  # not in this function, as `before` would

    sys.breakpointhook = hook
    try:
        yield
    finally:
        sys.breakpointhook = before


class _Screen(Console):
    """A console that raises when nobody reads any more; rich would exit with nothing but `1` to record."""

    def on_broken_pipe(self) -> None:
        raise


class Display:
    """Draws events: one bar per stage on a terminal, a few lines per epoch in a pipe, a table of epochs.

    Args:
        stream: to draw on.
        copy: gets the same as a pipe would.
        epochs: of the run, to tell the time it still takes.
        quiet: draw only what is printed in spite of it; the copy is complete.
    """

    def __init__(
        self, stream: TextIO, copy: TextIO | None = None, *, epochs: int | None = None, quiet: bool = False
    ) -> None:
        self._copy = Display(copy, epochs=epochs) if copy is not None else None
        self._quiet = quiet
        self._time_left = TimeLeft(epochs)
        self._table = EpochTable()
        self._said: set[str] = set()
        self._console = _Screen(file=stream, highlight=False, soft_wrap=True)
        self._draws_bars = self._console.is_terminal
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._stage: tuple[str, int] | None = None
        self._last_line = time.monotonic()

    def handle(self, event: Event) -> None:
        if self._copy is not None:
            self._copy.handle(event)
        if event["kind"] == "warning":
            self._line(f"warning   {event['text']}")
        if self._quiet:
            return
        if event["kind"] == "step":
            self._step(event)
        elif event["kind"] == "epoch":
            self._time_left.epoch(event)
            self._epoch(event)
        elif event["kind"] == "notice" and event["text"] not in self._said:
            if event.get("once"):
                self._said.add(event["text"])
            self._line(event["text"])

    def print(self, text: str = "", *, always: bool = False) -> None:
        """A line of text, above the bar when there is one; one that is printed `always` on a quiet display, too."""
        if self._copy is not None:
            self._copy.print(text)
        if always or not self._quiet:
            self._line(text)

    def output(self, text: str, *, to_stderr: bool) -> None:
        """Lines that a worker has printed, as they are; they come even on a quiet display."""
        to_stderr = to_stderr and self._bar is None
        if self._copy is not None and not (to_stderr and not sys.stderr.isatty()):  # then the log has it from there
            self._copy.output(text, to_stderr=False)
        if self._bar is not None:
            self._bar.console.out(text, highlight=False)
        else:
            print(text, file=sys.stderr if to_stderr else self._console.file, flush=True)

    def preparing(self, name: str, done: int, rows: int) -> None:
        """Rows of a dataset that are prepared, of all."""
        self.counting(f"prepare {name}", done, rows, " rows")

    def step_aside(self) -> bool:
        """A debugger takes the terminal: draw no bars any more, only lines. Returns True."""
        self.close()
        self._draws_bars = False
        return True

    def counting(self, title: str, done: int, total: int, unit: str = "") -> None:
        """How many of something are done, of all: a bar, or in a pipe a line per tenth at the most."""
        if self._copy is not None:
            self._copy.counting(title, done, total, unit)
        if self._quiet:
            return
        tenth = 10 * done // total
        if self._draws_bars:
            self._draw_bar(title, done, total, None)
            if done == total:
                self.close()
        elif (title, tenth) != self._stage and time.monotonic() - self._last_line >= SECONDS_PER_LINE:
            self._stage, self._last_line = (title, tenth), time.monotonic()
            self._line(f"{title} | {done:,}/{total:,}{unit}")

    def _line(self, text: str, style: str = "") -> None:
        # A style of `print` itself would also be that of the bar.
        (self._bar.console if self._bar else self._console).print(
            Text(text, style=style) if style else text, markup=False
        )

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = self._task = None

    def _step(self, event: Event) -> None:
        stage = (event["stage"], event["epoch"])
        if stage != self._stage:
            self._stage, self._last_line = stage, time.monotonic()
        left = self._time_left.text(event)
        if self._draws_bars:
            title = f"epoch {event['epoch'] + 1} {event['stage']}"
            self._draw_bar(title, event["step"], event["steps"], " | ".join(_numbers(event, left)))
            return
        every = max(1, event["steps"] // LINES_PER_EPOCH)
        if event["step"] % every == 0 and time.monotonic() - self._last_line >= SECONDS_PER_LINE:
            self._last_line = time.monotonic()
            self._line(" | ".join([event["stage"], f"{event['step']}/{event['steps']}", *_numbers(event, left)]))

    def _draw_bar(self, title: str, done: int, total: int, note: str | None) -> None:
        if self._bar is None:
            self._bar = Progress(console=self._console, transient=True)
            self._bar.start()
        said = TimeRemainingColumn() if note is None else TextColumn("{task.fields[note]}")
        self._bar.columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), said)
        if self._task is None:
            self._task = self._bar.add_task(title, total=total, note=note)
        self._bar.update(self._task, description=title, total=total, completed=done, note=note)

    def _epoch(self, event: Event) -> None:
        width = self._console.width if self._console.is_terminal else None
        for text, is_header in self._table.lines(event, width):
            self._line(text, style="bold" if is_header else "")


class TimeLeft:
    """How long a pass and the whole run still take, by what was measured so far.

    Args:
        epochs: of the run; without it, only the pass is told about.
    """

    def __init__(self, epochs: int | None) -> None:
        self._epochs = epochs
        self._seconds: dict[int, float] = {}
        self._since: float | None = None

    def epoch(self, event: Event) -> None:
        """An epoch has ended, or what came after its checkpoint."""
        self._seconds[event["epoch"]] = self._seconds.get(event["epoch"], 0.0) + event["seconds"]
        self._since = time.monotonic()

    def text(self, event: Event) -> str:
        """`8 s left, 3 min in all` for a step; the second part only where it is known and more."""
        present = time.monotonic()
        self._since = present if self._since is None else self._since
        if not event["rate"]:
            return ""
        of_pass = (event["steps"] - event["step"]) / event["rate"]
        told = f"{_time(of_pass)} left"
        if self._epochs is None or event["epoch"] in self._seconds:
            return told  # after the epoch's end nobody knows whether another follows
        elapsed = present - self._since
        recent = list(self._seconds.values())[-RECENT_EPOCHS:]
        of_one = sum(recent) / len(recent) if recent else elapsed + of_pass
        of_epoch = max(of_pass, of_one - elapsed)
        more = self._epochs - event["epoch"] - 1
        return f"{told}, {_time(of_epoch + more * of_one)} in all" if more > 0 or of_epoch > of_pass else told


def _time(seconds: float) -> str:
    for unit, length in (("s", 1), ("min", 60)):
        if seconds < 99.5 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds / 3600:.1f} h"


def _numbers(event: Event, left: str) -> list[str]:
    """`33.1 it/s`, `8 s left`, `loss 0.1234`; the stage is said already."""
    numbers = [_number(name.partition("/")[2], value) for name, value in event["values"].items()]
    return ([f"{event['rate']:.1f} it/s"] if event["rate"] else []) + ([left] if left else []) + numbers


def _number(name: str, value: float) -> str:
    return f"{name} {value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e4 else f"{name} {value:.2e}"
