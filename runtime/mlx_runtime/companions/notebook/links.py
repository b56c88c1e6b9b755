"""The connection between the process of a run and the process that started it.

It carries events of the run in one direction, and requests to stop in the other.
"""

import contextlib
import multiprocessing
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlx_runtime.errors import MlxError, full_message
from mlx_runtime.events import Event, RunEnded, RunStarted
from mlx_runtime.workers.fork_server import ForkServer
from mlx_runtime.workers.stop_requests import StopRequests, interrupt_main

PRUNE = "the scheduler of the sweep"
"""Reason that prunes a run; any other reason stops it."""


class RunProcess:
    """A run in a separate process, as seen by the process that started it.

    Args:
        server: Server that starts the process.
        number: Number of the process on that server.
        target: Function to call in the process with the connection of a `Link`; returns the exit code.
        variables: Environment variables of the process.

    Attributes:
        events: Connection to the process; readable when an event has arrived.
        ended: Last event of the run, once it has arrived, at the time `ended_at`.
        closed: True once the process can send nothing more.
    """

    def __init__(
        self, server: ForkServer, number: int, target: Callable[[Any], int], variables: Mapping[str, str]
    ) -> None:
        self.events, theirs = multiprocessing.Pipe()
        with theirs, Path(os.devnull).open("w") as nowhere:  # until its log is open
            server.start(number, target, dict(variables), [nowhere, nowhere, theirs])
        self.ended: RunEnded | None = None
        self.ended_at = 0.0
        self.closed = False
        self._asked = False

    def read(self) -> Iterator[Event]:
        """Yield the events that have arrived, except the end of the run, which `ended` holds."""
        while not self.closed and self.ended is None and self.events.poll():  # `ended`: by a listener
            try:
                event = self.events.recv()
            except (EOFError, OSError):
                self.closed = True
                return
            if isinstance(event, RunEnded):
                self.ended, self.ended_at = event, time.monotonic()
            else:
                yield event

    def ask(self, reason: str, *, again: bool = False) -> None:
        """Ask the run, once, to end with a checkpoint; with `again`, ask it not to wait for the checkpoint."""
        if again or not self._asked:
            self._asked = True
            with contextlib.suppress(OSError):
                self.events.send(reason)


class Link:
    """The connection of the process of a run to the one that started it.

    Only threads use it, because a request to stop interrupts the main thread anywhere. They start with the run, because
    nothing can be forked once there are threads.

    Attributes:
        control: Requests that have arrived.
    """

    def __init__(self, connection: Any) -> None:
        self.control = StopRequests(interrupt_main)
        self._connection = connection
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send, name="events", daemon=True)

    def emit(self, event: Event) -> None:
        """Send an event of the run, except its end."""
        if isinstance(event, RunStarted):
            self._sender.start()
            threading.Thread(target=self._listen, name="requests", daemon=True).start()
        if not isinstance(event, RunEnded):
            self._events.put(event)

    def finish(self, ended: RunEnded) -> None:
        """Send the end of the run, and wait until everything is sent."""
        error = ended.error if isinstance(ended.error, MlxError | None) else MlxError(full_message(ended.error))
        self._events.put(replace(ended, error=error))
        self._events.put(None)
        if not self._sender.is_alive():
            self._sender.start()
        self._sender.join()

    def _send(self) -> None:
        while (event := self._events.get()) is not None:
            with contextlib.suppress(OSError):  # the other process has ended
                self._connection.send(event)

    def _listen(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            reason = self._connection.recv()
            if self.control.reason is None:  # otherwise, a signal came first
                self.control.request(reason, prune=reason == PRUNE)
            while True:
                self._connection.recv()
                self.control.interrupt()
