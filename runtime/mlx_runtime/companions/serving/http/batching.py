"""Dynamic batching: requests that wait while the model computes are answered in one batch."""

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from mlx_runtime.companions.serving.http.bodies import Part
from mlx_runtime.companions.serving.predictor import PredictError, Predictor, as_array, part_of
from mlx_runtime.data.batches import Batch
from mlx_runtime.errors import located


class QueueFullError(Exception):
    """The queue of a model has no room for a request."""


class Batcher:
    """Computes the parts of requests in batches, in one thread. All methods are called in the event loop.

    Args:
        predictor: computes a batch.
        max_batch: rows per batch.
        max_queue: rows that may wait.
        max_wait_s: time that a batch waits for further rows.
        observe: called with the parts of each batch and its seconds.
    """

    def __init__(
        self,
        predictor: Predictor,
        max_batch: int,
        max_queue: int,
        max_wait_s: float = 0.0,
        observe: Callable[[Sequence[Part], float], None] = lambda parts, seconds: None,
    ) -> None:
        self.predictor, self.max_queue = predictor, max_queue
        self.queued = 0  # rows
        self._busy_since: float | None = None
        self._max_batch, self._max_wait_s, self._observe = max_batch, max_wait_s, observe
        self._groups: dict[Any, deque[tuple[Part, asyncio.Future[None]]]] = {}
        self._timer: asyncio.Handle | None = None
        self._work: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._drained = False
        self._idle: list[asyncio.Future[None]] = []

    def submit(self, part: Part) -> "asyncio.Future[None]":
        """Return a future that is done when the part has its answer. Cancel it to drop the part.

        Raises:
            QueueFullError: too many rows wait.
        """
        if self.queued + part.rows > self.max_queue:
            raise QueueFullError
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self.queued += part.rows
        self._groups.setdefault(part.shapes, deque()).append((part, future))
        if self._busy_since is None:
            if self._timer is None:
                self._timer = (
                    loop.call_later(self._max_wait_s, self._start) if self._max_wait_s else loop.call_soon(self._start)
                )
            elif self._max_wait_s and self.queued >= self._max_batch:
                self._timer.cancel()
                self._timer = loop.call_soon(self._start)
        return future

    @property
    def busy_s(self) -> float:
        """Seconds for which the present batch has been computed; 0 without one."""
        return 0.0 if self._busy_since is None else time.monotonic() - self._busy_since

    async def drain(self) -> None:
        """Wait until everything that was submitted has its answer, and end the thread."""
        while self._busy_since is not None or self._groups:
            self._idle.append(asyncio.get_running_loop().create_future())
            await self._idle[-1]
        self._drained = True
        self._end_thread()

    def _end_thread(self) -> None:
        if self._thread is not None:
            self._work.put(None)
            self._thread.join(1)  # it is idle, and Python must not end while a thread uses torch
            self._thread = None

    def _start(self) -> None:
        self._timer = None
        taken = self._take()
        if not taken:
            for future in self._idle:
                if not future.done():
                    future.set_result(None)
            self._idle.clear()
            return
        loop = asyncio.get_running_loop()
        parts = [part for part, _ in taken]
        self._busy_since = time.monotonic()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="predict", daemon=True)
            self._thread.start()
        self._work.put((loop, taken, parts))

    def _take(self) -> list[tuple[Part, "asyncio.Future[None]"]]:
        """Remove the parts of the next batch from the queue: those of equal shapes, longest waiting first."""
        taken: list[tuple[Part, asyncio.Future[None]]] = []
        rows = 0
        while self._groups and not taken:
            shapes, group = next(iter(self._groups.items()))
            while group and (not rows or rows + group[0][0].rows <= self._max_batch):
                part, future = group.popleft()
                self.queued -= part.rows
                if not future.done():
                    taken.append((part, future))
                    rows += part.rows
            del self._groups[shapes]
            if group:
                self._groups[shapes] = group  # behind the others
        return taken

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            loop, taken, parts = item
            found = answers(self.predictor, parts, self._max_batch)
            try:
                loop.call_soon_threadsafe(self._finish, taken, found)
            except RuntimeError:  # the event loop was closed
                return

    def _finish(self, taken: Sequence[tuple[Part, "asyncio.Future[None]"]], found: Sequence[Any]) -> None:
        seconds, self._busy_since = self.busy_s, None
        for (part, future), answer in zip(taken, found, strict=True):
            part.answer = answer
            if not future.done():
                future.set_result(None)
        self._observe([part for part, _ in taken], seconds)
        if self._timer is None and (self._groups or self._idle):
            self._timer = asyncio.get_running_loop().call_soon(self._start)
        elif self._drained:  # the part was submitted after its model had been replaced
            self._end_thread()


def merged(parts: Sequence[Part]) -> Batch:
    """Return one batch with the rows of all parts."""
    if len(parts) == 1:
        return parts[0].batch
    return {
        name: torch.cat([part.batch[name] for part in parts])
        if isinstance(item, torch.Tensor)
        else [value for part in parts for value in part.batch[name]]
        for name, item in parts[0].batch.items()
    }


def answers(predictor: Predictor, parts: Sequence[Part], max_batch: int) -> list[Any]:
    """Return the answer of each part. If a batch fails, its halves are computed, down to the rows at fault.

    Called in a thread, where Ctrl-C does not arrive: even a KeyboardInterrupt comes from `predict`.
    """
    try:
        rows = sum(part.rows for part in parts)
        if len(parts) == 1 and rows > max_batch:
            return [_in_slices(predictor, parts[0], max_batch)]
        return split(as_arrays(predictor.predict(merged(parts), rows)), parts)
    except BaseException as error:
        if len(parts) > 1:
            middle = len(parts) // 2
            return answers(predictor, parts[:middle], max_batch) + answers(predictor, parts[middle:], max_batch)
        if parts[0].rows > 1:
            return [_in_slices(predictor, parts[0], (parts[0].rows + 1) // 2)]
        return [[error if isinstance(error, PredictError) else PredictError(located(error))]]


def _in_slices(predictor: Predictor, part: Part, size: int) -> Any:
    """Return the answer of a part that is computed in batches of a number of rows."""
    slices = []
    for start in range(0, part.rows, size):
        rows = min(size, part.rows - start)
        piece = Part(part_of(part.batch, start, rows), rows, range(rows))
        slices.append((rows, answers(predictor, [piece], size)[0]))
    return [answer for rows, found in slices for answer in as_list(found, rows)]


def as_list(answer: Any, rows: int) -> list[Any]:
    """Return the outputs or the error of each row of an answer."""
    if isinstance(answer, list):
        return answer
    return [{name: array[row] for name, array in answer.items()} for row in range(rows)]


def as_arrays(outputs: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    return {name: as_array(value) for name, value in outputs.items()}


def split(outputs: Mapping[str, Any], parts: Sequence[Part]) -> list[Any]:
    """Return the outputs of each part of a batch."""
    if len(parts) == 1:
        return [outputs]
    found, start = [], 0
    for part in parts:
        found.append({name: array[start : start + part.rows] for name, array in outputs.items()})
        start += part.rows
    return found
