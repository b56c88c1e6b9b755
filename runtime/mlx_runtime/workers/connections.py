"""The channel between processes: TCP connections of workers to the driver, authenticated by its key."""

import contextlib
import os
import queue
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge
from typing import Any

from mlx_runtime.events import Event, WorkerConnected, WorkerPosition, decode, encode
from mlx_runtime.loop.channel import LOCATE, STOP

HANDSHAKE_S = 10.0
"""Time limit for the authentication of a connection, in seconds."""

MAX_PENDING = 256
"""Maximum number of unauthenticated connections; larger than the number of workers that connect at the same time."""


class Remote:
    """A sink over TCP, connected to a `Receiver`. If the driver cannot be reached, rank 0 prints its events to stdout.

    A process that is not a worker has rank -1.
    """

    def __init__(self, address: tuple[str, int], key: bytes, rank: int) -> None:
        self.position: Callable[[], WorkerPosition] = lambda: WorkerPosition(rank)  # the answer to LOCATE
        self._rank = rank
        self._connection: Connection[Any, Any] | None = None
        self._display: Any = None
        self._stop = threading.Event()
        self._sending = threading.Lock()  # because checkpoints are reported from another thread
        with contextlib.suppress(OSError, EOFError):
            self._connection = Client(address, authkey=key)
            threading.Thread(target=self._listen, args=(self._connection,), name="driver", daemon=True).start()
        self.send(WorkerConnected(rank))

    def send(self, event: Event) -> None:
        with self._sending:
            if self._connection is not None:
                try:
                    self._connection.send_bytes(encode(event))
                    return
                except OSError:
                    self._connection = None  # the driver is gone; the engine ends this worker soon
            if self._rank == 0:
                if self._display is None:
                    from mlx_runtime.tracking.console import Display  # rarely needed, and rich is slow to import

                    self._display = Display(sys.stdout)
                self._display.handle(event)

    def stop_asked(self) -> bool:
        return self._stop.is_set()

    def close(self) -> None:
        with self._sending:
            if self._connection is not None:
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as peer:
                    peer.shutdown(socket.SHUT_WR)  # `_listen` keeps the connection open until the driver ends it
                self._connection.close()
                self._connection = None

    def _listen(self, connection: "Connection[Any, Any]") -> None:
        with contextlib.suppress(EOFError, OSError, TypeError):  # TypeError: closed while this thread was waiting
            while True:
                order = connection.recv_bytes()
                if order == STOP:
                    self._stop.set()
                elif order == LOCATE:
                    self.send(self.position())


class Listener:
    """Accepts TCP connections, and serves those that authenticate, each in a thread.

    Anyone on the network can connect. A connection has to authenticate within `HANDSHAKE_S`; if more than `MAX_PENDING`
    are unauthenticated, the oldest are closed.
    """

    def __init__(self, host: str, port: int = 0) -> None:
        self._listener = socket.create_server((host, port), backlog=128)
        self.address: tuple[str, int] = (host, self._listener.getsockname()[1])
        self.pending: dict[socket.socket, float] = {}
        self._lock = threading.Lock()  # guards `pending`
        self._closed = threading.Event()
        threading.Thread(target=self._accept, name="progress", daemon=True).start()

    def authenticate(self, connection: "Connection[Any, Any]") -> Any:
        """Raise an exception unless the peer has the key. The result is passed to `serve`."""
        raise NotImplementedError

    def serve(self, connection: "Connection[Any, Any]", peer: Any) -> None:
        """Serve an authenticated connection until it is closed."""
        raise NotImplementedError

    def close(self) -> None:
        self._closed.set()
        self._listener.close()
        self._drop_pending(0)

    def _accept(self) -> None:
        self._listener.settimeout(min(1.0, HANDSHAKE_S))
        while not self._closed.is_set():
            try:
                peer, _ = self._listener.accept()
            except TimeoutError:
                peer = None
            except OSError:  # the listener is closed, or too many files are open
                self._closed.wait(0.1)
                continue
            if peer is not None:
                peer.settimeout(None)
                with self._lock:
                    self.pending[peer] = time.monotonic()
                threading.Thread(target=self._serve, args=(peer,), daemon=True).start()
            self._drop_pending(MAX_PENDING)

    def _drop_pending(self, limit: int) -> None:
        """Close connections that did not authenticate in time, and the oldest beyond `limit`."""
        with self._lock:
            excess, deadline = len(self.pending) - limit, time.monotonic() - HANDSHAKE_S
            for index, (peer, since) in enumerate(list(self.pending.items())):
                if index < excess or since < deadline:
                    del self.pending[peer]
                    with contextlib.suppress(OSError):
                        peer.shutdown(socket.SHUT_RDWR)  # ends the reading thread, which closes the socket

    def _serve(self, peer: socket.socket) -> None:
        with contextlib.suppress(OSError), peer, Connection(os.dup(peer.fileno())) as connection:
            try:
                identity = self.authenticate(connection)
            except Exception:  # a peer without the key, or one that hung up
                return
            finally:
                with self._lock:
                    in_time = self.pending.pop(peer, None) is not None
            if in_time:
                with contextlib.suppress(EOFError):
                    self.serve(connection, identity)


class Receiver(Listener):
    """The driver's end of the channel: receives the events of all workers, including replacements."""

    def __init__(self, host: str) -> None:
        self.key = secrets.token_bytes(16)
        self._messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.readers: list[threading.Thread] = []
        self._workers: list[Connection[Any, Any]] = []
        super().__init__(host)

    def authenticate(self, connection: "Connection[Any, Any]") -> None:
        deliver_challenge(connection, self.key)
        self.readers.append(threading.current_thread())  # before the peer can send anything
        answer_challenge(connection, self.key)

    def serve(self, connection: "Connection[Any, Any]", peer: None) -> None:
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
