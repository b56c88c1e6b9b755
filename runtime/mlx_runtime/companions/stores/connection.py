"""Calls of an object store that users can interrupt, and that do not add up during an outage."""

import io
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

OUTAGE_S = 2.0
"""Minimum time for which calls fail at once after one that got no answer; otherwise as long as that one took."""

NO_ANSWER = "NETWORK_CONNECTION"
"""Part of pyarrow's messages about S3 servers that do not answer, after its retries."""

NO_TLS = "wrong version number"
"""Part of OpenSSL's message about a server that answers in plain HTTP."""

T = TypeVar("T")


class Connection:
    """Calls an object store, so that the main thread can be interrupted and does not wait for each call of an outage.

    An interrupted call continues in its thread, and the next one waits for it, so that writes keep their order.
    """

    def __init__(self) -> None:
        self._lost_until, self._reason = 0.0, ""
        self._last: Future[Any] | None = None  # of the main thread

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function of the store; raise ConnectionError if the store does not answer."""
        if threading.current_thread() is not threading.main_thread():
            return self.attempt(function, *arguments)
        if self._last is not None:
            wait([self._last])
        self._last = future = Future[T]()

        def work() -> None:
            try:
                future.set_result(self.attempt(function, *arguments))
            except Exception as error:  # whatever it is, it is raised in the main thread
                future.set_exception(error)

        threading.Thread(target=work, name="object store", daemon=True).start()
        return future.result()

    def attempt(self, function: Callable[..., T], *arguments: Any) -> T:
        """Do the same in this thread."""
        began = time.monotonic()
        if began < self._lost_until:
            raise ConnectionError(self._reason)
        try:
            return function(*arguments)
        except OSError as error:
            reason = str(error)
            if NO_TLS in reason:
                reason = "the server does not use TLS; if it serves plain HTTP, add the option scheme=http to the URI"
            elif NO_ANSWER in reason:
                reason = f"the server does not answer: {reason.rpartition('Details: ')[2]}"
            else:
                raise
            now = time.monotonic()
            self._lost_until, self._reason = now + max(OUTAGE_S, now - began), reason
            raise ConnectionError(self._reason) from error


class Upload(io.RawIOBase):
    """A new object, which exists once it is closed."""

    def __init__(self, stream: Any, connection: Connection) -> None:
        self._stream, self._connection = stream, connection
        self._position = 0

    def tell(self) -> int:
        return self._position

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._connection.attempt(self._stream.write, data)
        count = memoryview(data).nbytes
        self._position += count
        return count

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._connection.call(self._stream.close)
