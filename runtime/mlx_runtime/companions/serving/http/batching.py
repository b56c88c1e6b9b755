"""Dynamic batching: requests that wait while the model computes are answered in one batch."""

import asyncio
import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from mlx_runtime.companions.serving.http.bodies import Part
from mlx_runtime.companions.serving.predictor import PredictError, Predictor, as_array, part_of, user_line
from mlx_runtime.data.batches import Batch

Job = tuple[Part, "asyncio.Future[list[Any]]"]


class Batcher:
    """Computes the parts of requests in batches, in a thread of its own. Methods are called in the event loop.

    Args:
        predictor: computes a batch.
        max_batch: rows per batch.
        max_wait_s: time that a batch waits for further rows.
    """

    def __init__(self, predictor: Predictor, max_batch: int, max_wait_s: float = 0.0) -> None:
        self.predictor = predictor
        self.rows = 0  # that wait or are being computed
        self._max_batch, self._max_wait_s = max_batch, max_wait_s
        self._busy_since: float | None = None
        self._fresh: list[Job] = []  # submitted in this turn of the event loop
        self._submitted: queue.SimpleQueue[list[Job] | None] = queue.SimpleQueue()
        self._waiting: dict[Any, deque[Job]] = {}  # by shapes of the rows; only the thread uses it
        self._thread = threading.Thread(target=self._run, name="predict", daemon=True)
        self._thread.start()

    def submit(self, part: Part) -> "asyncio.Future[list[Any]]":
        """Return the future outputs of each row of a part by name, or its error. Cancel the future to drop the part."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[list[Any]] = loop.create_future()
        self.rows += len(part.numbers)
        if not self._fresh:
            loop.call_soon(self._hand_over)
        self._fresh.append((part, future))
        return future

    @property
    def busy_s(self) -> float:
        """Seconds for which the present batch has been computed; 0 without one."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def close(self, timeout_s: float) -> None:
        """End the thread: Python must not end while it uses torch, but a model that hangs is left alone."""
        self._submitted.put(None)
        self._thread.join(timeout_s)

    def _hand_over(self) -> None:
        """Wake the thread once for all requests that have arrived, instead of for a batch with the first of them."""
        self._submitted.put(self._fresh)
        self._fresh = []

    def _run(self) -> None:
        while self._collect():
            taken = self._take()
            jobs = [(part, future) for part, future in taken if not future.cancelled()]
            self._busy_since = time.monotonic()
            found = answers_of(self.predictor, [part for part, _ in jobs]) if jobs else []
            self._busy_since = None
            rows = sum(len(part.numbers) for part, _ in taken)
            with contextlib.suppress(RuntimeError):  # the event loop was closed
                taken[0][1].get_loop().call_soon_threadsafe(self._finish, jobs, found, rows)

    def _collect(self) -> bool:
        """Wait for parts, and for further ones as long as a batch may wait. Return False at the end."""
        until, rows = time.monotonic(), 0
        while True:
            timeout_s = max(0.0, until - time.monotonic()) if self._waiting else None
            try:
                jobs = self._submitted.get(timeout=timeout_s)
            except queue.Empty:
                return True
            if jobs is None:
                return False
            if not self._waiting:
                until = time.monotonic() + self._max_wait_s
            for part, future in jobs:
                rows += len(part.numbers)
                self._waiting.setdefault(part.shapes, deque()).append((part, future))
            if rows >= self._max_batch:
                until = 0.0

    def _take(self) -> list[Job]:
        """Remove the parts of the next batch: those of equal shapes, longest waiting first."""
        shapes, group = next(iter(self._waiting.items()))
        taken: list[Job] = []
        rows = 0
        while group and (not taken or rows + len(group[0][0].numbers) <= self._max_batch):
            taken.append(group.popleft())
            rows += len(taken[-1][0].numbers)
        del self._waiting[shapes]
        if group:
            self._waiting[shapes] = group  # behind the others
        return taken

    def _finish(self, jobs: Sequence[Job], found: Sequence[Any], rows: int) -> None:
        self.rows -= rows
        start = 0
        for part, future in jobs:
            end = start + len(part.numbers)
            if not future.done():
                future.set_result(list(found[start:end]))
            start = end


def answers_of(predictor: Predictor, parts: Sequence[Part]) -> list[Any]:
    """Return the outputs of each row of some parts by name, or its error. Nothing ends the thread that calls it."""
    rows = sum(len(part.numbers) for part in parts)
    try:
        return answers(predictor, merged(parts), rows)
    except BaseException as error:  # such as a lack of memory for the batch
        return [PredictError(f"a batch of {rows} rows failed: {user_line(error)}")] * rows


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


def answers(predictor: Predictor, batch: Batch, rows: int) -> list[Any]:
    """Return the outputs of each row by name, or its error. If a batch fails, its halves are computed.

    Called in a thread, where Ctrl-C does not arrive: even a KeyboardInterrupt comes from `predict`.
    """
    try:
        outputs = {name: as_array(value) for name, value in predictor.predict(batch, rows).items()}
        return [dict(zip(outputs, values, strict=True)) for values in zip(*outputs.values(), strict=True)]
    except BaseException as error:
        if rows == 1:
            known = isinstance(error, PredictError)
            return [error if known else PredictError(f"predict failed: {user_line(error)}")]
        half = rows // 2
        first, second = part_of(batch, 0, half), part_of(batch, half, rows - half)
        return answers(predictor, first, half) + answers(predictor, second, rows - half)
