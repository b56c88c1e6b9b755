"""Connections of a server, which end if a client is slow or sends endless headers."""

import time
from collections.abc import Awaitable, Callable, Collection
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

READ_S = 10.0
"""Time in which a client has to send a request."""

WRITE_S, WRITE_BYTES = 30.0, 64 << 10
"""Time after which a client that has not read so much of its answer, or the rest of it, is disconnected."""

MAX_HEADER = 64 << 10


class Connection(HttpToolsProtocol):
    """A connection that knows since when it waits for its client. uvicorn limits only the time between requests."""

    awaited_since: float | None = None
    blocked_since: float | None = None
    _unread = 0  # bytes of the answer at that time
    _headers = 0  # bytes; None while a body is read

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.awaited_since = time.monotonic()

    def data_received(self, data: bytes) -> None:
        self._headers += len(data)
        super().data_received(data)
        if self._headers > MAX_HEADER and not self.transport.is_closing():
            self.refuse(b"431 Request Header Fields Too Large", b"the headers are too large")

    def on_message_begin(self) -> None:
        if self.awaited_since is None:
            self.awaited_since = time.monotonic()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._headers = 0

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._headers = 0

    def on_message_complete(self) -> None:
        self.awaited_since = None
        super().on_message_complete()

    def refuse(self, status: bytes, text: bytes) -> None:
        """Send an answer that is not the application's, unless it has begun to answer, and disconnect."""
        if self.cycle is None or not self.cycle.response_started or self.cycle.response_complete:
            body = b'{"error": "' + text + b'"}'
            head = b"HTTP/1.1 " + status + b"\r\ncontent-type: application/json\r\nconnection: close\r\n"
            self.transport.write(head + b"content-length: " + str(len(body)).encode() + b"\r\n\r\n" + body)
        self.transport.close()

    def sweep(self, now: float) -> None:
        """End the connection if the client is too slow. Called once a second."""
        unread = self.transport.get_write_buffer_size()
        if not unread:
            self.blocked_since = None
        elif self.blocked_since is None or unread <= self._unread - WRITE_BYTES:
            self.blocked_since, self._unread = now, unread
        if self.blocked_since is not None and now - self.blocked_since > WRITE_S:
            self.transport.abort()
        elif self.awaited_since is not None and now - self.awaited_since > READ_S and not self.flow.read_paused:
            self.refuse(b"408 Request Timeout", b"the request did not arrive in time")

    def send_400_response(self, msg: str) -> None:
        self.refuse(b"400 Bad Request", b"this is not an HTTP request")


def sweeper(connections: Collection[Any]) -> Callable[[], Awaitable[None]]:
    """Return the function that ends connections to slow clients."""

    async def sweep() -> None:
        now = time.monotonic()
        for connection in list(connections):
            connection.sweep(now)

    return sweep
