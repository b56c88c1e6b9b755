"""A shadow: another model answers the same rows off the path of requests, and differences are counted."""

import contextlib
import queue
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from mlx_runtime.companions.serving.http.batching import answers, as_list
from mlx_runtime.companions.serving.http.bodies import Part
from mlx_runtime.companions.serving.http.counters import Counters
from mlx_runtime.companions.serving.predictor import Predictor
from mlx_runtime.errors import UsageError

CLOSE_S = 5.0
"""Time in which the shadow has to finish at the end."""

WAITING = 64
"""Batches that may wait for the shadow; further ones are skipped."""


class Shadow:
    """Computes the batches of a model with another one, in a thread.

    Args:
        model: name of the model in the application.
        predictor: the other model, which reads the same columns.
        counters: counts the rows that are equal, differ, or are skipped.
    """

    def __init__(self, model: str, predictor: Predictor, counters: Counters) -> None:
        self._predictor = predictor
        self._model, self._counters = model, counters
        self._waiting: queue.Queue[Sequence[Part] | None] = queue.Queue(WAITING)
        self._thread = threading.Thread(target=self._run, name="shadow", daemon=True)
        self._thread.start()

    def __call__(self, parts: Sequence[Part]) -> None:
        """Compare the answers of a batch later. Returns at once."""
        try:
            self._waiting.put_nowait(parts)
        except queue.Full:
            self._counters.compared(self._model, "skipped", sum(part.rows for part in parts))

    def close(self) -> None:
        """Compare the waiting batches, and end. A model that hangs does not keep the server."""
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=CLOSE_S)
            self._thread.join(CLOSE_S)

    def line(self) -> str:
        """Return how many rows differ, like `shadow digits/run_002 differs on 3 of 120 rows`."""
        count = {
            outcome: self._counters.total("mlx_shadow_rows_total", model=self._model, outcome=outcome)
            for outcome in ("equal", "differ", "skipped")
        }
        rest = f", {count['skipped']:,} skipped" if count["skipped"] else ""
        compared = count["equal"] + count["differ"]
        return f"shadow {self._predictor.title} differs on {count['differ']:,} of {compared:,} rows{rest}"

    def _run(self) -> None:
        while (parts := self._waiting.get()) is not None:
            others = answers(self._predictor, parts, max(part.rows for part in parts))
            for part, other in zip(parts, others, strict=True):
                pairs = zip(as_list(part.answer, part.rows), as_list(other, part.rows), strict=True)
                equal = sum(agree(one, another) for one, another in pairs)
                self._counters.compared(self._model, "equal", equal)
                self._counters.compared(self._model, "differ", part.rows - equal)


def refuse_other_columns(one: Predictor, other: Predictor) -> None:
    """Raise UsageError if two models do not read the same columns."""
    if one.schema.columns != other.schema.columns:
        raise UsageError(f"{other.title} reads different columns than {one.title}: {other.schema.text}")


def agree(one: Any, other: Any) -> bool:
    """Return True if two answers to a row are the same: whole numbers equal, vectors with their maximum at the same
    position, other numbers within 1%."""
    if isinstance(one, Exception) or isinstance(other, Exception):
        return isinstance(one, Exception) and isinstance(other, Exception)
    if one.keys() != other.keys():
        return False
    return all(_same(np.asarray(value), np.asarray(other[name])) for name, value in one.items())


def _same(one: Any, other: Any) -> bool:
    if one.shape != other.shape:
        return False
    if one.dtype.kind != "f":
        return bool(np.array_equal(one, other))
    if one.ndim and one.size:
        return bool(np.array_equal(one.argmax(-1), other.argmax(-1)))
    return bool(np.allclose(one, other, rtol=0.01, atol=1e-6, equal_nan=True))
