"""Numbers about a server, for Prometheus."""

from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)

CONTENT_TYPE = CONTENT_TYPE_LATEST


class Counters:
    """The numbers of one application, which are not shared with others of the process."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        own: dict[str, Any] = {"registry": self._registry}
        self._requests = Counter("mlx_requests", "Requests by status.", ["status"], **own)
        self._rows = Counter("mlx_rows", "Rows by outcome.", ["model", "outcome"], **own)
        self._seconds = Histogram("mlx_request_seconds", "Time to answer.", ["model"], buckets=SECONDS, **own)
        self._batch = Histogram("mlx_batch_rows", "Rows per batch.", ["model"], buckets=ROWS, **own)
        self._computing = Histogram("mlx_batch_seconds", "Time to compute a batch.", ["model"], buckets=SECONDS, **own)
        self._queued = Gauge("mlx_queued_rows", "Rows that wait.", ["model"], **own)
        self._compared = Counter("mlx_shadow_rows", "Rows compared with the shadow.", ["model", "outcome"], **own)
        self._known: dict[Any, Any] = {}

    def request(self, status: int) -> None:
        """Count a request."""
        self._child(self._requests, str(status)).inc()

    def answered(self, model: str, rows: int, failed: int, seconds: float) -> None:
        """Count the rows of a request."""
        if rows > failed:
            self._child(self._rows, model, "answered").inc(rows - failed)
        if failed:
            self._child(self._rows, model, "failed").inc(failed)
        self._child(self._seconds, model).observe(seconds)

    def batch(self, model: str, rows: int, seconds: float) -> None:
        """Count a batch."""
        self._child(self._batch, model).observe(rows)
        self._child(self._computing, model).observe(seconds)

    def compared(self, model: str, outcome: str, rows: int) -> None:
        """Count rows that a shadow has answered, too: `equal`, `differ` or `skipped`."""
        if rows:
            self._child(self._compared, model, outcome).inc(rows)

    def watch_queue(self, model: str, rows: Callable[[], float]) -> None:
        """Report the rows that wait for a model."""
        self._queued.labels(model).set_function(rows)

    def total(self, name: str, **labels: str) -> int:
        """Return the sum of a counter over all labels that are not given."""
        samples = (sample for family in self._registry.collect() for sample in family.samples)
        return int(sum(item.value for item in samples if item.name == name and labels.items() <= item.labels.items()))

    def text(self) -> bytes:
        """Return the text that Prometheus reads."""
        return bytes(generate_latest(self._registry))

    def _child(self, metric: Any, *labels: str) -> Any:
        """Return a metric with labels; looking it up in `metric` takes ten times as long."""
        key = metric, labels
        child = self._known.get(key)
        if child is None:
            child = self._known[key] = metric.labels(*labels)
        return child
