"""The HTTP interface of models: one ASGI application for servers on this machine and on clusters."""

import asyncio
import contextlib
import json
import logging
import math
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_runtime.companions.serving.http import bodies, openapi
from mlx_runtime.companions.serving.http.access import Access
from mlx_runtime.companions.serving.http.batching import Batcher, QueueFullError
from mlx_runtime.companions.serving.http.bodies import Part, RowParser
from mlx_runtime.companions.serving.http.negotiation import (
    ARROW,
    JSON,
    NPY,
    Refusal,
    kind_of,
    wanted_kind,
    wanted_output,
)
from mlx_runtime.companions.serving.predictor import PredictError, Predictor
from mlx_runtime.errors import UsageError, short_message
from mlx_runtime.extras import require

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Answer = tuple[int, Sequence[tuple[bytes, bytes]], bytes]

logger = logging.getLogger(__name__)

PUBLIC = ("/", "/healthz")
"""Paths that need no token: a page without data, and probes."""

NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,99}", re.ASCII)
"""Names of models in URLs."""

HELD = 16
"""Bodies of the largest size that may be in memory at the same time."""

CLOSE_S = 5.0
"""Time in which a model has to finish its batch at the end."""

SAFE = (b"x-content-type-options", b"nosniff")


@dataclass(frozen=True)
class Limits:
    """Limits of a server.

    Attributes:
        max_batch: Rows that are computed at once.
        max_wait_s: Time that a batch waits for further rows. At 0, only rows that arrive while the model computes are
            batched.
        max_queue: Rows that may wait; more are refused with the status 429.
        max_rows: Rows per request.
        max_body: Bytes per request.
        timeout_s: Time in which a request is answered, otherwise its status is 503.
    """

    max_batch: int = 32
    max_wait_s: float = 0.0
    max_queue: int = 1024
    max_rows: int = 1024
    max_body: int = 16 << 20
    timeout_s: float = 30.0

    def __post_init__(self) -> None:
        for name in ("max_batch", "max_queue", "max_rows", "max_body"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; expected at least 1")
        if not 0 <= self.max_wait_s < self.timeout_s < math.inf:
            raise UsageError(f"max_wait_s is {self.max_wait_s}; expected less than timeout_s, {self.timeout_s}")


class Endpoint:
    """One model of an application, with its queue."""

    def __init__(self, name: str, predictor: Predictor, limits: Limits, counters: Any) -> None:
        self.name, self.predictor = name, predictor
        self.parser = RowParser(predictor.schema, min(limits.max_rows, limits.max_queue))
        self.example = json.dumps({"rows": [openapi.example_row(predictor.schema)]}).encode()
        self.watchers: list[Callable[[Sequence[Part]], None]] = []
        self._counters = counters
        self.batcher = Batcher(predictor, limits.max_batch, limits.max_queue, limits.max_wait_s, self._observe)
        counters.watch_queue(name, lambda: self.batcher.queued)

    def _observe(self, parts: Sequence[Part], seconds: float) -> None:
        self._counters.batch(self.name, sum(part.rows for part in parts), seconds)
        for watcher in self.watchers:
            watcher(parts)


class Application:
    """An ASGI application that answers rows with models; see `application`."""

    def __init__(self, models: Mapping[str, Predictor], limits: Limits, access: Access) -> None:
        from mlx_runtime.companions.serving.http.counters import Counters

        self.limits, self.access, self.counters = limits, access, Counters()
        self.endpoints: dict[str, Endpoint] = {}
        self._descriptions: dict[str, Answer] = {}
        self._held = 0  # bytes of bodies
        for name, predictor in models.items():
            self.replace(name, predictor)

    def replace(self, name: str, predictor: Predictor) -> Endpoint | None:
        """Answer later requests for a name with another model. Return the former endpoint, which finishes its queue."""
        if NAME.fullmatch(name) is None:
            raise UsageError(f"{name!r} cannot be the name of a model in a URL; expected letters, digits, and . _ -")
        former = self.endpoints.get(name)
        endpoint = Endpoint(name, predictor, self.limits, self.counters)
        if former is not None:
            endpoint.watchers = former.watchers
        self.endpoints[name] = endpoint
        self._descriptions = self._described()
        return former

    async def close(self) -> None:
        """Answer everything that waits, and end the threads of models."""
        drained = asyncio.gather(*(endpoint.batcher.drain() for endpoint in self.endpoints.values()))
        with contextlib.suppress(asyncio.TimeoutError):  # a model that hangs must not keep the server
            await asyncio.wait_for(drained, CLOSE_S)

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        if scope["type"] != "http":
            raise RuntimeError(f"{scope['type']} is not supported")
        try:
            status, headers, body = await self._answer(scope, receive)
        except Refusal as refusal:
            status, headers, body = error_answer(refusal.status, str(refusal), refusal.headers)
        except Exception:
            logger.exception("a request failed")
            status, headers, body = error_answer(500, "the server failed; its log has the reason")
        self.counters.request(status)
        fixed = [*headers, (b"content-length", str(len(body)).encode()), SAFE]
        await send({"type": "http.response.start", "status": status, "headers": fixed})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

    async def _live(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.shutdown":
                await self.close()
                await send({"type": "lifespan.shutdown.complete"})
                return
            await send({"type": "lifespan.startup.complete"})

    async def _answer(self, scope: MutableMapping[str, Any], receive: Receive) -> Answer:
        headers = dict(scope["headers"])
        path, method = scope["path"], scope["method"]
        if root := scope.get("root_path"):  # of a proxy, such as Ray Serve
            path = path.removeprefix(root) or "/"
        refused = self.access.refusal(headers, public=path in PUBLIC)
        if refused is not None:
            extra = [(b"www-authenticate", b"Bearer")] if refused[0] == 401 else []
            raise Refusal(*refused, (b"connection", b"close"), *extra)
        if path == "/predict":
            name = next(iter(self.endpoints))
        elif path.startswith("/models/") and path.count("/") == 3:
            name, _, path = path[8:].partition("/")
            if name not in self.endpoints:
                raise Refusal(404, f"there is no model {name!a:.60}; there are {', '.join(self.endpoints)}")
            path = f"/{path}"
            if path == "/example":
                return self._read_only(method, f"/models/{name}/example")
        if path != "/predict":
            return self._read_only(method, path)
        if method != "POST":
            raise Refusal(405, f"{method} is not answered here; use POST", (b"allow", b"POST"))
        return await self._predict(self.endpoints[name], headers, scope, receive)

    def _read_only(self, method: str, path: str) -> Answer:
        if path == "/healthz":
            found: Answer | None = self._health()
        elif path == "/metrics":
            from mlx_runtime.companions.serving.http.counters import CONTENT_TYPE

            found = 200, [(b"content-type", CONTENT_TYPE.encode())], self.counters.text()
        else:
            found = self._descriptions.get(path)
        if found is None:
            known = ", ".join(["/predict", *self._descriptions, "/healthz", "/metrics"])
            raise Refusal(404, f"there is no {path!a:.60}; there are {known}")
        if method not in ("GET", "HEAD"):
            raise Refusal(405, f"{method} is not answered here; use GET", (b"allow", b"GET, HEAD"))
        return found

    def _health(self) -> Answer:
        for name, endpoint in self.endpoints.items():
            if (seconds := endpoint.batcher.busy_s) > self.limits.timeout_s:
                return error_answer(503, f"{name} has been computing a batch for {seconds:.0f} s")
        return 200, [(b"content-type", JSON.encode())], b'{"status":"ok"}'

    def _described(self) -> dict[str, Answer]:
        from mlx_runtime.companions.serving.http import page

        models = {name: endpoint.predictor for name, endpoint in self.endpoints.items()}
        documents = {"/schema": openapi.models_document(models), "/openapi.json": openapi.openapi_document(models)}
        kind = [(b"content-type", JSON.encode())]
        examples = {f"/models/{name}/example": endpoint.example for name, endpoint in self.endpoints.items()}
        examples["/example"] = next(iter(examples.values()))
        texts = {path: json.dumps(document).encode() for path, document in documents.items()} | examples
        return {"/": (200, page.HEADERS, page.PAGE)} | {path: (200, kind, text) for path, text in texts.items()}

    async def _predict(
        self, endpoint: Endpoint, headers: Mapping[bytes, bytes], scope: MutableMapping[str, Any], receive: Receive
    ) -> Answer:
        began = time.monotonic()
        kind = kind_of(headers)
        held: list[int] = []
        try:
            parts, errors = endpoint.parser.parse(await self._body(headers, receive, held), kind)
            await self._compute(endpoint.batcher, parts)
        finally:
            self._held -= sum(held)
        rows = bodies.in_rows(parts, errors)
        failed = sum(isinstance(row, Exception) for row in rows)
        self.counters.answered(endpoint.name, len(rows), failed, time.monotonic() - began)
        status = 200
        if failed and failed == len(rows):
            failure = next((row for row in rows if isinstance(row, PredictError)), None)
            status = 422 if failure is None else 500
            if failure is not None:
                logger.warning("%s: %s", endpoint.name, short_message(failure))
        wanted = wanted_kind(headers)
        if wanted == ARROW and rows and status == 200:
            from mlx_runtime.companions.serving.http import arrow

            return status, [(b"content-type", ARROW.encode())], arrow.write(rows)
        if wanted == NPY and rows and not failed:
            return status, [(b"content-type", NPY.encode())], bodies.npy_answer(rows, wanted_output(scope))
        if wanted == NPY and failed:
            status = max(status, 422)  # the rows do not make an array
        return status, [(b"content-type", JSON.encode())], bodies.json_answer(rows)

    async def _body(self, headers: Mapping[bytes, bytes], receive: Receive, held: list[int]) -> bytes:
        """Read the body of a request. Append the size of its pieces to `held`, even if it is refused."""
        limit = self.limits.max_body
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length[:20]) > limit:
            raise Refusal(
                413, f"the body has {int(length[:20]):,} bytes, of at most {limit:,}", (b"connection", b"close")
            )
        pieces: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Refusal(400, "the client disconnected")
            piece = message.get("body", b"")
            pieces.append(piece)
            size += len(piece)
            held.append(len(piece))
            self._held += len(piece)
            if size > limit:
                raise Refusal(413, f"the body has more than {limit:,} bytes", (b"connection", b"close"))
            if self._held > HELD * limit:
                raise Refusal(
                    429,
                    "too many bytes are waiting; try again later",
                    (b"retry-after", b"1"),
                    (b"connection", b"close"),
                )
            if not message.get("more_body"):
                return piece if len(pieces) == 1 else b"".join(pieces)

    async def _compute(self, batcher: Batcher, parts: Iterable[Part]) -> None:
        futures: list[asyncio.Future[None]] = []
        try:
            futures.extend(map(batcher.submit, parts))
        except QueueFullError:
            for future in futures:
                future.cancel()
            raise Refusal(429, "too many rows are waiting; try again later", (b"retry-after", b"1")) from None
        if not futures:
            return
        loop = asyncio.get_running_loop()
        timers = [loop.call_later(self.limits.timeout_s, future.cancel) for future in futures]
        try:
            for future in futures:
                await future
        except asyncio.CancelledError:
            if not any(future.cancelled() for future in futures):
                raise
            text = f"the model has not answered within {self.limits.timeout_s:g} s"
            raise Refusal(503, text, (b"retry-after", b"1")) from None
        finally:
            for timer, future in zip(timers, futures, strict=True):
                timer.cancel()
                future.cancel()


def application(
    models: Mapping[str, Predictor],
    limits: Limits = Limits(),
    access: Access = Access(),  # noqa: B008
) -> Application:
    """Return the ASGI application that answers rows with models by name; `/predict` is the first.

    Create it in the process that serves it. Its threads start with the first request.

    Raises:
        UsageError: there is no model, or a name cannot be in a URL.
        MissingLibraryError: orjson is not installed.
    """
    require("orjson", "serving")
    if not models:
        raise UsageError("there is no model to serve")
    return Application(models, limits, access)


def error_answer(status: int, text: str, headers: Sequence[tuple[bytes, bytes]] = ()) -> Answer:
    """Return an answer with one line."""
    return status, [*headers, (b"content-type", JSON.encode())], json.dumps({"error": text}).encode()
