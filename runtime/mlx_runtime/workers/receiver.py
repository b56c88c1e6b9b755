"""The driver's end of the channel to workers elsewhere: TCP connections, authenticated by its key."""

import contextlib
import os
import secrets
import socket
import threading
import time
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

from mlx_runtime.workers.connections import Pipes

HANDSHAKE_S = 10.0
"""Time limit for the authentication of a connection, in seconds."""

MAX_PENDING = 256
"""Maximum number of unauthenticated connections; larger than the number of workers that connect at the same time."""


class Receiver(Pipes):
    """Receives the events of all workers, including replacements, wherever they connect from.

    Anyone on the network can connect. A connection has to authenticate within `HANDSHAKE_S`; if more than `MAX_PENDING`
    are unauthenticated, the oldest are closed.
    """

    def __init__(self, host: str) -> None:
        super().__init__()
        self.key = secrets.token_bytes(16)
        self._listener = socket.create_server((host, 0), backlog=128)
        self.address: tuple[str, int] = (host, self._listener.getsockname()[1])
        self.pending: dict[socket.socket, float] = {}
        self._closed = threading.Event()
        threading.Thread(target=self._accept, name="progress", daemon=True).start()

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
                self.pending[peer] = time.monotonic()
                threading.Thread(target=self._serve, args=(peer,), daemon=True).start()
            self._drop_pending(MAX_PENDING)

    def _drop_pending(self, limit: int) -> None:
        """Close connections that did not authenticate in time, and the oldest beyond `limit`."""
        excess, deadline = len(self.pending) - limit, time.monotonic() - HANDSHAKE_S
        for index, (peer, since) in enumerate(list(self.pending.items())):
            late = index < excess or since < deadline
            if late and self.pending.pop(peer, None) is not None:  # otherwise it has authenticated by now
                with contextlib.suppress(OSError):
                    peer.shutdown(socket.SHUT_RDWR)  # ends the reading thread, which closes the socket

    def _serve(self, peer: socket.socket) -> None:
        with contextlib.suppress(OSError), peer, Connection(os.dup(peer.fileno())) as connection:
            try:
                deliver_challenge(connection, self.key)
                self.readers.append(threading.current_thread())  # before the peer can send anything
                answer_challenge(connection, self.key)
            except Exception:  # a peer without the key, or one that hung up
                return
            finally:
                in_time = self.pending.pop(peer, None) is not None
            if in_time:
                self.read(connection)
