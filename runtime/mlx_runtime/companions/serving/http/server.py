"""A server on this machine: an application behind uvicorn, in a thread, with limits on slow clients."""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Coroutine, Mapping
from types import TracebackType
from typing import Any

from mlx_runtime.companions.serving.http.access import LOOPBACK, MAKE_A_TOKEN, Access, digest_of
from mlx_runtime.companions.serving.http.asgi import Application, application
from mlx_runtime.companions.serving.predictor import Predictor
from mlx_runtime.errors import MlxError, UsageError
from mlx_runtime.extras import require

KEEP_ALIVE_S = 30
MAX_CONNECTIONS = 1000


class Server:
    """Serves an application on a port of this machine until `stop` is called.

    Args:
        app: the application.
        host: address to listen on.
        port: port to listen on; 0 for any free one.

    Raises:
        UsageError: the port cannot be used.
    """

    def __init__(self, app: Application, host: str = "127.0.0.1", port: int = 0) -> None:
        for library in ("uvicorn", "httptools", "uvloop"):
            require(library, "serving")
        import uvicorn

        from mlx_runtime.companions.serving.http.connections import Connection, sweeper

        self.app = app
        self._socket = _listen(host, port)
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://{_shown(host)}:{self.port}"
        config = uvicorn.Config(
            app,
            http=Connection,
            loop="uvloop",
            ws="none",
            lifespan="on",
            log_config=None,
            log_level="critical",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_notify=1,
            timeout_graceful_shutdown=int(app.limits.timeout_s) + 5,
            limit_concurrency=MAX_CONNECTIONS,
        )
        self._server = uvicorn.Server(config)
        config.callback_notify = sweeper(self._server.server_state.connections)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="serve", daemon=True)

    def start(self) -> "Server":
        """Start to answer. Returns when requests are accepted."""
        self._thread.start()
        until = time.monotonic() + 30
        while not self._server.started:
            if self._ended.is_set() or time.monotonic() > until:
                raise MlxError("the server did not start")
            time.sleep(0.005)
        return self

    def call(self, work: "Coroutine[Any, Any, Any]") -> Any:
        """Run a coroutine in the event loop of the server, from another thread, and return its result."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def request_stop(self) -> None:
        """Accept no more connections, answer accepted requests, and end. Returns at once."""
        self._server.should_exit = True

    def wait(self) -> None:
        """Wait for the end."""
        self._ended.wait()

    def stop(self) -> None:
        """Stop as `request_stop` does, and wait for the end."""
        self.request_stop()
        if self._thread.ident is not None:
            self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            await self._server.serve(sockets=[self._socket])

        try:
            factory = self._server.config.get_loop_factory()
            loop = asyncio.new_event_loop() if factory is None else factory()
            with contextlib.closing(loop):
                loop.run_until_complete(serve())
        finally:
            self._ended.set()

    def __enter__(self) -> str:
        return self.start().url

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def serve(models: Mapping[str, Predictor]) -> Server:
    """Return a server of models for programs on this machine: `with serve({"digits": predictor}) as url:`."""
    return Server(application(models))


def access_for(host: str, token: str | None) -> Access:
    """Return the requests that a server on an address answers. Beyond this machine, it needs a token."""
    digest = None if token is None else digest_of(token)
    if is_loopback(host):
        return Access(digest, LOOPBACK | {_shown(host).encode()})
    if token is None:
        raise UsageError(f"a server on {host} needs a token; {MAKE_A_TOKEN}")
    return Access(digest, hosts=None)


def is_loopback(host: str) -> bool:
    """Return True if only programs on this machine can call an address."""
    import ipaddress

    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _shown(host: str) -> str:
    """Return an address as it is written in URLs."""
    return f"[{host}]" if ":" in host else host


def _listen(host: str, port: int) -> socket.socket:
    try:
        kind, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(kind, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(2048)
        except BaseException:
            listener.close()
            raise
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"cannot listen on {host}:{port}: {reason}; choose another --port") from error
    return listener
