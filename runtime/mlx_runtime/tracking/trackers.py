"""Trackers that write files, TensorBoard and JSONL, and the writer that passes reports to all trackers, on rank 0.

Independently of trackers, every run records all metrics in `metrics.jsonl` in its folder, for listings, reports and
`open_run`.
"""

import contextlib
import datetime
import json
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from mlx_runtime.errors import StorageError
from mlx_runtime.events import RunEnded
from mlx_runtime.runs.folder import RunFolder, read_rows
from mlx_runtime.storage.files import storage_at, storage_errors
from mlx_runtime.storage.local import open_regular, regular, write_atomic
from mlx_runtime.tracking.callbacks import Listeners, Report, RunInfo

__all__ = ["JSONL", "TensorBoard"]

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


@dataclass
class TensorBoard:
    """TensorBoard event files with the metrics of every report, and all that user code adds to `self.tensorboard`.

    Args:
        hparams: at the end, write the values of conf.yaml and the last metrics for TensorBoard's HParams tab.
        flush_secs: interval between writes to disk, in seconds.
    """

    files = ("events.out.tfevents.*",)
    append_only = True

    hparams: bool = True
    flush_secs: int = 30
    _writer: "SummaryWriter | None" = field(default=None, init=False, repr=False, compare=False)
    _run: RunInfo | None = field(default=None, init=False, repr=False, compare=False)
    _purge_step: int | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def writer(self) -> "SummaryWriter":
        """The torch SummaryWriter, created on first use."""
        from torch.utils.tensorboard import SummaryWriter

        if self._writer is None:
            assert self._run is not None, "on_run_start was called"
            self._writer = SummaryWriter(str(self._run.folder), purge_step=self._purge_step, flush_secs=self.flush_secs)
        return self._writer

    def on_run_start(self, run: RunInfo) -> None:
        import torch.utils.tensorboard  # noqa: F401 - takes half a second, so before the first step

        self._run = run

    def on_rewind(self, step: int) -> None:
        """Make TensorBoard hide points after `step` that it has already read. They are no longer in the files."""
        if self._writer is not None:
            self._writer.close()
        self._writer, self._purge_step = None, step + 1 if step else None

    def on_report(self, report: Report) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = {**report.values, "epoch": report.epoch}
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        # One event with all values takes a fifth of the time of one event per value.
        self._add(Summary(value=scalars), report.step, report.facts["timestamp"])

    def on_epoch_end(self, epoch: int, values: Mapping[str, float]) -> None:
        self.flush()

    def flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def on_run_end(self, status: str, metrics: Mapping[str, float]) -> None:
        if self.hparams and status == "SUCCEEDED" and metrics:
            from torch.utils.tensorboard.summary import hparams

            assert self._run is not None
            config = {name: item for name, item in flatten(self._run.config) if isinstance(item, int | float | str)}
            for summary in hparams(config, dict(metrics)):  # type: ignore[no-untyped-call] # torch's own
                self._add(summary)
        if self._writer is not None:
            self._writer.close()

    def _add(self, summary: Any, step: int | None = None, moment: float | None = None) -> None:
        files: Any = self.writer.file_writer  # torch declares it as None
        files.add_summary(summary, step, moment)


class JSONL:
    """A file with one JSON object per report and line: step, epoch, facts, and the values, with null for NaN.

    Args:
        file: name in the run's folder.
    """

    append_only = True

    def __init__(self, file: str = "metrics.jsonl"):
        self.file, self.files = file, (file,)
        self._lines: TextIO | None = None

    def on_run_start(self, run: RunInfo) -> None:
        # Line-buffered, so that only complete lines are written.
        self._lines = open(run.folder / self.file, "a", 1, "utf-8", opener=regular)  # noqa: SIM115

    def on_report(self, report: Report) -> None:
        assert self._lines is not None, "on_run_start was called"
        self._lines.write(json.dumps(row(report)) + "\n")

    def on_run_end(self, status: str, metrics: Mapping[str, float]) -> None:
        if self._lines is not None:
            self._lines.close()


def row(report: Report) -> dict[str, Any]:
    """Return a report as one flat dict, with None for NaN and infinity."""
    values = {name: value if abs(value) < float("inf") else None for name, value in report.values.items()}
    return {"step": report.step, "epoch": report.epoch, **report.facts, **values}


def flatten(config: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value of a config with its full key: `("cfg.seed", 0)`, …"""
    if isinstance(config, Mapping) and config:
        for name, item in config.items():
            yield from flatten(item, f"{key}.{name}" if key else str(name))
    elif isinstance(config, list) and config:
        for number, item in enumerate(config):
            yield from flatten(item, f"{key}.{number}")
    else:
        yield key, config


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


def cut(
    folder: RunFolder, files: Iterable[Path], sizes: Mapping[str, int], step: int, warn: Callable[[str], object]
) -> None:
    """Truncate files to their sizes in a checkpoint at a global step, and remove those created after it.

    Each is replaced by a new file, because a driver that was wrongly considered dead may still have the old one open.

    Raises:
        StorageError: the run folder cannot be written.
    """
    with storage_errors(f"cannot write {folder.path}"):
        write_atomic(folder.metrics, _rows_until(folder, sizes.get(folder.metrics.name, 0), step, warn))
        for file in files:
            if file.name in sizes and file != folder.metrics:
                with open_regular(str(file)) as lines:
                    write_atomic(file, lines.read(sizes[file.name]))
            elif file != folder.metrics:
                file.unlink()
                if folder.uri is not None:
                    with contextlib.suppress(OSError, StorageError):
                        storage_at(folder.uri).remove_file(file.name)


def _rows_until(folder: RunFolder, size_bytes: int, step: int, warn: Callable[[str], object]) -> bytes:
    """Return the rows of metrics.jsonl up to a checkpoint. If some are damaged, rename the file, and warn."""
    file, content = folder.metrics, b""
    with contextlib.suppress(OSError), open_regular(str(file)) as stream:
        content = stream.read(size_bytes)
    rows = [line for line, row in read_rows(content) if row is not None and row["step"] <= step]
    kept = b"".join(rows)
    if len(kept) < size_bytes:
        aside = file.with_name(f"damaged_{file.name}_{uuid.uuid4().hex[:8]}")
        try:
            file.rename(aside)
            warn(
                f"{file.name} is damaged; it was renamed to {aside.name}, and its readable rows ({len(rows)}) are kept"
            )
        except FileNotFoundError:
            warn(f"{file.name} is missing, so the metrics of earlier epochs are lost")
    return kept
