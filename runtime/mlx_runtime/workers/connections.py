"""The channel between a driver and its workers: pipes that workers inherit, or connections to a `Receiver`."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Client, Connection
from typing import Any

from mlx_runtime.events import Event, WorkerConnected, WorkerPosition, decode, encode
from mlx_runtime.loop.job import LOCATE, STOP, Inbox


class Remote:
    """A sink over a pipe that this worker has inherited or, without one, over TCP to a `Receiver`.

    Events are lost if the driver is gone; its engine ends this worker soon. A process that is not a worker has rank -1.
    """

    def __init__(self, address: tuple[str, int], key: bytes, rank: int, pipe: "Connection[Any, Any] | None" = None):
        self.position: Callable[[], WorkerPosition] = lambda: WorkerPosition(rank)  # the answer to LOCATE
        self._connection: Connection[Any, Any] | None = None
        self._stop = threading.Event()
        self._sending = threading.Lock()  # because checkpoints are reported from another thread
        with contextlib.suppress(OSError, EOFError):
            self._connection = pipe or Client(address, authkey=key)
            threading.Thread(target=self._listen, args=(self._connection,), name="driver", daemon=True).start()
        self.send(WorkerConnected(rank))

    def send(self, event: Event) -> None:
        with self._sending:
            if self._connection is not None:
                try:
                    self._connection.send_bytes(encode(event))
                    return
                except OSError:
                    self._connection = None

    def stop_asked(self) -> bool:
        return self._stop.is_set()

    def _listen(self, connection: "Connection[Any, Any]") -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                order = connection.recv_bytes()
                if order == STOP:
                    self._stop.set()
                elif order == LOCATE:
                    self.send(self.position())


class Pipes(Inbox):
    """The driver's end of the channel: receives the events of all workers, including replacements."""

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.readers: list[threading.Thread] = []
        self._workers: list[Connection[Any, Any]] = []

    def add(self) -> "Connection[Any, Any]":
        """Return the end of a new pipe for a worker; close it once the worker has inherited it."""
        ours, theirs = Pipe()
        self.readers.append(threading.Thread(target=self.read, args=(ours,), name="progress", daemon=True))
        self.readers[-1].start()
        return theirs

    def read(self, connection: "Connection[Any, Any]") -> None:
        """Receive the messages of a worker until it closes its end."""
        self._workers.append(connection)
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._messages.put(connection.recv_bytes())  # decoding could exceed the wait of `drain`
        self._workers.remove(connection)

    def events(self, timeout_s: float) -> Iterator[Event]:
        """Yield the events that have arrived, waiting up to `timeout_s` for the first."""
        with contextlib.suppress(queue.Empty):
            while True:
                try:
                    event = decode(self._messages.get(timeout=timeout_s))
                except ValueError:  # not an event
                    continue
                yield event
                timeout_s = 0.0

    def drain(self, timeout_s: float = 2.0) -> Iterator[Event]:
        """Yield the remaining events until all workers have closed their ends or have sent none for `timeout_s`.

        After five times as long, give up on workers that keep sending.
        """
        until = time.monotonic() + timeout_s
        limit = until + 4 * timeout_s
        for thread in list(self.readers):
            while thread.is_alive() and (left_s := until - time.monotonic()) > 0:
                received = self._messages.qsize()
                thread.join(left_s)
                if self._messages.qsize() > received:
                    until = min(time.monotonic() + timeout_s, limit)
        yield from self.events(timeout_s=0.01)

    def broadcast(self, order: bytes) -> None:
        """Send an order to every connected worker."""
        for connection in list(self._workers):
            with contextlib.suppress(OSError):
                connection.send_bytes(order)
