"""What rank 0 does with numbers: keeps the run's record of them, `metrics.jsonl`, and hands them to the trackers."""

import contextlib
import datetime
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from mlx_runtime.callbacks import Listeners, Report, RunInfo
from mlx_runtime.errors import StorageError
from mlx_runtime.layout import RunFolder
from mlx_runtime.storage import write_atomic
from mlx_runtime.trackers import JSONL, TensorBoard

FACTS = (
    "training_iteration",
    "timestamp",
    "date",
    "time_this_iter_s",
    "time_total_s",
    "hostname",
    "node_ip",
    "pid",
)
"""What a report says of itself, beside `step` and `epoch`."""


class Tracking:
    """Reports of a run, to its record and to the objects of `cfg.trackers`.

    Args:
        run: what trackers get to know.
        folder: of the run.
        trackers: by name, from `cfg.trackers`.
        tell: takes a line about one that fails.
        ours: whether this run has not been taken over by another driver.
        host: address of this machine.
    """

    def __init__(
        self,
        run: RunInfo,
        folder: RunFolder,
        trackers: Mapping[str, Any],
        tell: Callable[[str], None],
        ours: Callable[[], bool] = lambda: True,
        host: str = "127.0.0.1",
    ) -> None:
        self._run, self._folder, self._ours = run, folder, ours
        self._record = JSONL(folder.metrics.name)
        self.trackers = Listeners(trackers, "trackers", tell)
        self._where = {"hostname": socket.gethostname(), "node_ip": host, "pid": os.getpid()}
        self._reports = 0
        self._trained_s = 0.0
        self._started = self._reported = time.monotonic()
        self._begun = self._over = False

    def start(self) -> None:
        """The run begins, or goes on; before the first report."""
        self._record.on_run_start(self._run)
        self.trackers.call("on_run_start", self._run)
        self._begun = True

    def report(self, values: Mapping[str, float], *, step: int, epoch: int) -> Report:
        """Record numbers.

        Args:
            values: like `{"train/loss": 0.3}`.
            step: global step, the x axis.
            epoch: as user code counts them.
        """
        present, moment = time.monotonic(), time.time()
        self._reports += 1
        facts = {
            "training_iteration": self._reports,
            "timestamp": round(moment, 3),
            "date": datetime.datetime.fromtimestamp(moment, datetime.timezone.utc).isoformat(timespec="seconds"),
            "time_this_iter_s": round(present - self._reported, 6),
            "time_total_s": round(self._seconds(present), 6),
            **self._where,
        }
        self._reported = present
        report = Report(step, epoch, values, facts)
        self._record.on_report(report)
        self.trackers.call("on_report", report)
        return report

    def end_epoch(self, epoch: int, values: Mapping[str, float]) -> None:
        self.trackers.call("on_epoch_end", epoch, values)

    def stored(self, checkpoint: Mapping[str, Any]) -> None:
        self.trackers.call("on_checkpoint", checkpoint)

    def end(self, status: str, metrics: Mapping[str, float], error: BaseException | None = None) -> None:
        """The run ends here; only the first time counts."""
        if not self._over and self._begun:
            self._over = True
            if error is not None:
                self.trackers.call("on_exception", error)
            self.trackers.call("on_run_end", status, metrics)

    @property
    def tensorboard(self) -> Any:
        """Torch's SummaryWriter of this run, or None without one."""
        found = [item for item in self.trackers if isinstance(item, TensorBoard)]
        return found[0].writer if found else None

    def push(self, *, must: bool = False) -> None:
        """Copy what trackers have written to where the run is stored.

        Args:
            must: a failure is an error, not made good for by the next time.

        Raises:
            StorageError: the storage does not take it.
        """
        self._folder.push(*self._files(append_only=False), must=must)

    def state(self) -> dict[str, Any]:
        """What a checkpoint remembers: how long each growing file is, in bytes, and what was counted."""
        self.trackers.call("flush")
        sizes = {file.name: file.stat().st_size for file in self._files(append_only=True)}
        return {"sizes": sizes, "reports": self._reports, "seconds": self._seconds(time.monotonic())}

    def rewind(self, state: Mapping[str, Any] | None, step: int) -> None:
        """Take back what was written after a checkpoint, so that no step is recorded twice.

        Args:
            state: from the checkpoint, or None for the very beginning.
            step: global step then.
        """
        sizes = state["sizes"] if state else {}
        self._reports, self._trained_s = (state["reports"], state["seconds"]) if state else (0, 0.0)
        self._started = self._reported = time.monotonic()
        for file in self._files(append_only=True):
            if file.name in sizes or file == self._folder.metrics:
                # Another file of the same name: a driver that was taken for dead may still have the old one open.
                with file.open("rb") as lines:
                    write_atomic(file, lines.read(sizes.get(file.name, 0)))
            else:
                file.unlink()
                self._folder.forget(file)
        if self._begun:
            self._record.on_run_end("", {})
            self._record.on_run_start(self._run)
        self.trackers.call("on_rewind", step if state else 0)

    def _seconds(self, present: float) -> float:
        return self._trained_s + present - self._started

    def _files(self, *, append_only: bool) -> list[Path]:
        """Of the run's record and its trackers; of those that only grow, or of all."""
        makers = [item for item in (self._record, *self.trackers) if not append_only or hasattr(item, "append_only")]
        patterns = [pattern for item in makers for pattern in getattr(item, "files", ())]
        found = {file for pattern in patterns for file in self._folder.path.glob(pattern) if file.is_file()}
        return sorted(found)

    def __enter__(self) -> "Tracking":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            stopped = isinstance(error, KeyboardInterrupt)
            self.end("STOPPED" if stopped else "FAILED", {}, error)
        self._record.on_run_end("", {})
        with contextlib.suppress(StorageError):
            if self._folder.uri is not None and self._ours():
                self.push()
