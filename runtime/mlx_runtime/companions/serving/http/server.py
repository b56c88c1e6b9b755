"""A server on this machine: an application behind uvicorn, in a thread."""

import socket
import threading
import time
from collections.abc import Mapping
from types import TracebackType

import uvicorn

from mlx_runtime.companions.serving.http.access import in_url
from mlx_runtime.companions.serving.http.application import Application
from mlx_runtime.companions.serving.predictor import Predictor
from mlx_runtime.errors import MlxError, UsageError

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
        self.app = app
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = socket.create_server((host, port), family=family, backlog=2048)
        except (OSError, OverflowError) as error:
            reason = str(getattr(error, "strerror", None) or error).partition(" (while")[0]  # the address follows
            raise UsageError(f"cannot listen on {host}:{port}: {reason}; choose another --port") from error
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://{in_url(host)}:{self.port}"
        config = uvicorn.Config(
            app,
            ws="none",
            lifespan="on",
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(app.limits.timeout_s) + 5,
            limit_concurrency=MAX_CONNECTIONS,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), name="serve", daemon=True)

    def start(self) -> "Server":
        """Start to answer. Returns when requests are accepted."""
        self._thread.start()
        until = time.monotonic() + 30
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > until:
                raise MlxError("the server did not start")
            time.sleep(0.005)
        return self

    def request_stop(self) -> None:
        """Accept no more connections, answer accepted requests, and end. Returns at once."""
        self._server.should_exit = True

    def wait(self) -> None:
        """Wait for the end."""
        self._thread.join()

    def __enter__(self) -> str:
        return self.start().url

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.request_stop()
        self.wait()


def serve(models: Mapping[str, Predictor]) -> Server:
    """Return a server of models for programs on this machine: `with serve({"digits": predictor}) as url:`."""
    return Server(Application(models))
