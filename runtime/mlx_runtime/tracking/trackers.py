"""Trackers that write files: TensorBoard and JSONL. They run on rank 0 (see `callbacks`).

Independently of trackers, every run records all metrics in `metrics.jsonl` in its folder, for listings, reports and
`open_run`.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from mlx_runtime.storage.local import open_regular, regular
from mlx_runtime.tracking.callbacks import Report, RunInfo

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
    if isinstance(config, Mapping):
        for name, item in config.items():
            yield from flatten(item, f"{key}.{name}" if key else str(name))
    elif isinstance(config, list):
        for number, item in enumerate(config):
            yield from flatten(item, f"{key}.{number}")
    else:
        yield key, config


def read_or_create(file: Path, make: Callable[[], str]) -> str:
    """Return the content of a file, created with the result of `make` if it does not exist."""
    if not file.exists():
        file.write_text(make())
    with open_regular(str(file)) as stream:
        return stream.read().decode()
