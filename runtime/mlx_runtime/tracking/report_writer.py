"""Record metrics on rank 0: append them to `metrics.jsonl`, and pass them to the trackers."""

import contextlib
import datetime
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from mlx_runtime.errors import StorageError
from mlx_runtime.events import RunEnded
from mlx_runtime.runs.folder import RunFolder
from mlx_runtime.tracking.callbacks import Listeners, Report, RunInfo
from mlx_runtime.tracking.trackers import JSONL, TensorBoard


class ReportWriter:
    """Writer of a run's reports to metrics.jsonl and the trackers of `cfg.trackers`. Rank 0 only.

    Args:
        warn: called with a line about each tracker that fails.
        forward: called with each report, for the driver; None if no callback needs reports.
        host: address of this machine.
    """

    def __init__(
        self,
        run: RunInfo,
        folder: RunFolder,
        trackers: Mapping[str, Any],
        warn: Callable[[str], None],
        forward: Callable[[Report], None] | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        self._run, self._folder, self._warn, self._forward = run, folder, warn, forward
        self._record = JSONL(folder.metrics.name)
        self.trackers = Listeners(trackers, "trackers", warn)
        self._process = {"hostname": socket.gethostname(), "node_ip": host, "pid": os.getpid()}
        self._reports = 0
        self._started = self._reported = time.monotonic()  # the start is moved back by previous attempts
        self._active = False

    def start(self) -> None:
        """Start trackers, before the first report."""
        self._record.on_run_start(self._run)
        self.trackers.call("on_run_start", self._run)
        self._active = True

    def report(self, values: Mapping[str, float], *, step: int, epoch: int) -> None:
        """Record metrics, like `{"train/loss": 0.3}`, at a global step, the x axis."""
        present, moment = time.monotonic(), time.time()
        self._reports += 1
        facts = {
            "training_iteration": self._reports,
            "timestamp": round(moment, 3),
            "date": datetime.datetime.fromtimestamp(moment, datetime.timezone.utc).isoformat(timespec="seconds"),
            "time_this_iter_s": round(present - self._reported, 6),
            "time_total_s": round(present - self._started, 6),
            **self._process,
        }
        self._reported = present
        report = Report(step, epoch, values, facts)
        self._record.on_report(report)
        self.trackers.handle(report)
        if self._forward is not None:
            self._forward(report)

    def end(self, status: str, metrics: Mapping[str, float], error: BaseException | None = None) -> None:
        """End trackers; only the first call has an effect."""
        if self._active:
            self._active = False
            self.trackers.handle(RunEnded(status, metrics, error=error))

    @property
    def tensorboard(self) -> Any:
        """The torch SummaryWriter of this run, or None without a TensorBoard tracker."""
        return next((item.writer for item in self.trackers if isinstance(item, TensorBoard)), None)

    def push_for_checkpoint(self) -> None:
        """Copy the files of trackers to the object store, before a checkpoint that refers to them becomes visible.

        Raises:
            StorageError: another driver has taken over the run, or the storage rejects a file.
        """
        if not self._owns_run():
            raise StorageError(f"{self._folder.title} was taken over by another driver; this one stops writing")
        self._folder.push(*self._files(append_only=False), must=True)

    def _owns_run(self) -> bool:
        return self._folder.attempts() <= self._run.attempt

    def state(self) -> dict[str, Any]:
        """Return the state for checkpoints: the length of each append-only file in bytes, and counters."""
        self.trackers.call("flush")
        sizes = {file.name: file.stat().st_size for file in self._files(append_only=True)}
        return {"sizes": sizes, "reports": self._reports, "seconds": time.monotonic() - self._started}

    def rewind(self, state: Mapping[str, Any] | None, step: int) -> None:
        """Discard rows written after a checkpoint, so that no step is recorded twice; without one, all rows."""
        sizes = state["sizes"] if state else {}
        self._reports = state["reports"] if state else 0
        self._reported = time.monotonic()
        self._started = self._reported - (state["seconds"] if state else 0.0)
        files = self._files(append_only=True)
        if files or sizes:
            from mlx_runtime.tracking.rewinding import cut

            cut(self._folder, files, sizes, step, self._warn)
        if self._active:
            self._record.on_run_end("", {})
            self._record.on_run_start(self._run)
        self.trackers.call("on_rewind", step if state else 0)

    def _files(self, *, append_only: bool) -> list[Path]:
        """Return metrics.jsonl and the files of trackers, optionally only append-only ones."""
        writers = [item for item in (self._record, *self.trackers) if not append_only or hasattr(item, "append_only")]
        patterns = [pattern for item in writers for pattern in getattr(item, "files", ())]
        return sorted({file for pattern in patterns for file in self._folder.path.glob(pattern) if file.is_file()})

    def __enter__(self) -> "ReportWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.end("STOPPED" if isinstance(error, KeyboardInterrupt) else "FAILED", {}, error)
        self._record.on_run_end("", {})
        with contextlib.suppress(StorageError):
            if self._folder.uri is not None and self._owns_run():
                self._folder.push(*self._files(append_only=False))
