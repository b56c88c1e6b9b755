"""The HTTP interface of models: one Starlette application for servers on this machine and on clusters."""

import asyncio
import contextlib
import json
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from mlx_runtime.companions.serving.http import bodies, openapi, page
from mlx_runtime.companions.serving.http.access import Access
from mlx_runtime.companions.serving.http.batching import Batcher
from mlx_runtime.companions.serving.http.bodies import Part
from mlx_runtime.companions.serving.http.limits import Limits
from mlx_runtime.companions.serving.http.openapi import JSON
from mlx_runtime.companions.serving.predictor import PredictError, Predictor
from mlx_runtime.errors import UsageError, short_message

logger = logging.getLogger(__name__)

PUBLIC = ("/", "/healthz")
"""Paths that need no token: a page without data, and probes."""

NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,99}", re.ASCII)
"""Names of models in URLs."""

HELD = 16
"""Bodies of the largest size that may be in memory at the same time."""

SMALL_BYTES = 16 << 10
"""Size of bodies that are parsed, and of outputs that are written, in the event loop; a thread does it for others."""

CLOSE_S = 5.0
"""Time in which a model has to finish its batch at the end."""

RETRY = {"retry-after": "1"}

T = TypeVar("T")


class Deadline:
    """Raises TimeoutError if its block takes longer, like `asyncio.timeout` of Python 3.11."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._expired = False

    def __enter__(self) -> None:
        self._task = asyncio.current_task()
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self._expire)

    def _expire(self) -> None:
        self._expired = True
        if self._task is not None:
            self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        if self._expired and isinstance(error, asyncio.CancelledError):
            raise TimeoutError from error


class Application:
    """The ASGI application that answers rows with models by name; `/predict` is the first.

    Create it in the process that serves it, because it starts a thread per model.

    Raises:
        UsageError: a name cannot be in a URL.
    """

    def __init__(
        self,
        models: Mapping[str, Predictor],
        limits: Limits = Limits(),  # noqa: B008
        access: Access = Access(),  # noqa: B008
    ) -> None:
        for name in models:
            if NAME.fullmatch(name) is None:
                raise UsageError(f"{name!r} cannot be the name of a model in a URL; expected letters, digits, . _ -")
        self.limits, self.access = limits, access
        self.batchers = {name: Batcher(model, limits.max_batch, limits.max_wait_s) for name, model in models.items()}
        self._held = 0  # bytes of bodies
        self._bodies = ThreadPoolExecutor(1, "bodies")
        self._predicts = {"/predict": next(iter(models))} | {f"/models/{name}/predict": name for name in models}
        routes = []
        for path, name in self._predicts.items():
            example = json.dumps({"rows": [openapi.example_row(models[name].schema)]})
            routes.append(Route(path, partial(self._predict, name), methods=["POST"]))
            routes.append(Route(path.removesuffix("predict") + "example", _constant(example)))
        routes += [
            Route("/", _constant(page.PAGE, page.HEADERS)),
            Route("/healthz", self._health),
            Route("/schema", _constant(json.dumps(openapi.models_document(models)))),
            Route("/openapi.json", _constant(json.dumps(openapi.openapi_document(models)))),
        ]
        self._paths = ", ".join(route.path for route in routes)
        handlers: dict[Any, Any] = {HTTPException: self._refused}
        self._app = Starlette(routes=routes, exception_handlers=handlers, lifespan=self._live)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = scope["path"].removeprefix(scope.get("root_path", ""))  # of a proxy, such as Ray Serve
            if refusal := self.access.refusal(Headers(scope=scope), public=path in PUBLIC):
                await _error(*refusal)(scope, receive, send)
                return
            if scope["method"] == "POST" and path in self._predicts:  # routing takes longer than the rest
                await self._answer(self._predicts[path], scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def _answer(self, name: str, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await self._predict(name, Request(scope, receive))
        except HTTPException as error:
            response = _error(error.status_code, error.detail, error.headers)
        except Exception:  # uvicorn logs it
            await _error(500, "the server failed; its log has the reason")(scope, receive, send)
            raise
        await response(scope, receive, send)

    @contextlib.asynccontextmanager
    async def _live(self, _: Starlette) -> AsyncIterator[None]:
        yield
        for batcher in self.batchers.values():
            batcher.close(CLOSE_S)
        self._bodies.shutdown(wait=False, cancel_futures=True)

    async def _health(self, _: Request) -> Response:
        for name, batcher in self.batchers.items():
            if (seconds := batcher.busy_s) > self.limits.timeout_s:
                raise HTTPException(503, f"{name} has been computing a batch for {seconds:.0f} s")
        return Response('{"status":"ok"}', media_type=JSON)

    async def _predict(self, name: str, request: Request) -> Response:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != JSON:
            raise HTTPException(415, f"Content-Type is {kind!a:.60}; expected {JSON}")
        pieces: list[bytes] = []
        size = 0
        try:
            with Deadline(self.limits.timeout_s):
                async for piece in request.stream():
                    pieces.append(piece)
                    size += len(piece)
                    self._held += len(piece)
                    self._refuse_large(size)
                parts, rows = await self._parse(name, b"".join(pieces))
                await self._compute(self.batchers[name], parts, rows)
                content = await self._call(_bytes_of(rows), partial(bodies.answer, rows))
        except TimeoutError:
            text = f"there is no answer after {self.limits.timeout_s:g} s"
            raise HTTPException(503, text, RETRY) from None
        except ClientDisconnect:
            raise HTTPException(400, "the client disconnected") from None
        finally:
            self._held -= size
        failures = [row for row in rows if isinstance(row, PredictError)]
        if failures:
            logger.warning("%s: %s", name, short_message(failures[0]))
        answered = not rows or any(not isinstance(row, Exception) for row in rows)
        return Response(content, 200 if answered else 500 if failures else 422, media_type=JSON)

    def _refuse_large(self, size: int) -> None:
        limit = self.limits.max_body
        if size > limit:
            raise HTTPException(413, f"the body has more than {limit:,} bytes")
        if self._held > HELD * limit:
            raise HTTPException(429, "too many bytes are waiting; try again later", RETRY)

    async def _parse(self, name: str, body: bytes) -> tuple[list[Part], list[Any]]:
        schema = self.batchers[name].predictor.schema
        call = partial(bodies.parse, schema, body, self.limits.max_rows, self.limits.max_batch)
        return await self._call(len(body), call)

    async def _call(self, size: int, call: Callable[[], T]) -> T:
        """Call a function that processes so many bytes, in a thread if it would keep the event loop."""
        if size <= SMALL_BYTES:
            return call()
        return await asyncio.get_running_loop().run_in_executor(self._bodies, call)

    async def _compute(self, batcher: Batcher, parts: list[Part], rows: list[Any]) -> None:
        """Put the answers of parts into `rows`."""
        if batcher.rows >= self.limits.max_queue:
            raise HTTPException(429, "too many rows are waiting; try again later", RETRY)
        futures = [batcher.submit(part) for part in parts]
        try:
            for part, future in zip(parts, futures, strict=True):
                for number, answer in zip(part.numbers, await future, strict=True):
                    rows[number] = answer
        finally:
            for future in futures:
                future.cancel()

    async def _refused(self, request: Request, error: HTTPException) -> Response:
        text = f"there is no {request['path']!a:.60}; there are {self._paths}"
        return _error(error.status_code, text if error.status_code == 404 else error.detail, error.headers)


def _bytes_of(rows: list[Any]) -> int:
    return sum(value.nbytes for row in rows if isinstance(row, dict) for value in row.values())


def _constant(
    content: str | bytes, headers: Mapping[str, str] | None = None
) -> Callable[[Request], Awaitable[Response]]:
    async def answer(_: Request) -> Response:
        return Response(content, headers=headers, media_type=JSON)

    return answer


def _error(status: int, text: str, headers: Mapping[str, str] | None = None) -> Response:
    """Return an answer with one line. The rest of the request need not be read."""
    own = {"connection": "close"} | ({"www-authenticate": "Bearer"} if status == 401 else {})
    return Response(json.dumps({"error": text}), status, own | dict(headers or {}), JSON)
