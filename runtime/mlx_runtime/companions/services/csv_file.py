"""The tracker `CSV`: a table of all reports."""

import csv
from collections.abc import Mapping
from typing import TextIO

from mlx_runtime.runs.folder import read_rows
from mlx_runtime.storage.local import regular
from mlx_runtime.tracking.callbacks import Report, RunInfo
from mlx_runtime.tracking.trackers import row


class CSV:
    """A CSV file with one line per report and one column per metric; cells of missing metrics are empty.

    A new metric adds a column, for which the file is rewritten from `metrics.jsonl`.

    Args:
        file: name in the run's folder.
    """

    def __init__(self, file: str = "metrics.csv"):
        self.file, self.files = file, (file,)
        self._run: RunInfo | None = None
        self._columns: list[str] = []
        self._lines: TextIO | None = None

    def on_run_start(self, run: RunInfo) -> None:
        self._run = run
        self._rewrite()

    def on_rewind(self, step: int) -> None:
        if self._run is not None:
            self._rewrite()

    def on_report(self, report: Report) -> None:
        line = row(report)
        if not set(line) <= set(self._columns):
            self._rewrite()  # metrics.jsonl already has this report
        else:
            assert self._lines is not None
            self._writer(self._lines).writerow(line)

    def on_run_end(self, status: str, metrics: Mapping[str, float]) -> None:
        if self._lines is not None:
            self._lines.close()

    def _writer(self, stream: TextIO) -> "csv.DictWriter[str]":
        return csv.DictWriter(stream, self._columns, lineterminator="\n")

    def _rewrite(self) -> None:
        assert self._run is not None
        if self._lines is not None:
            self._lines.close()
        record = self._run.folder / "metrics.jsonl"
        rows = [row for _, row in read_rows(record.read_bytes() if record.exists() else b"") if row is not None]
        self._columns = list(dict.fromkeys(name for line in rows for name in line))
        file = self._run.folder / self.file
        half = file.with_name(f".{file.name}.part")
        with open(half, "w", encoding="utf-8", newline="", opener=regular) as stream:
            writer = self._writer(stream)
            writer.writeheader()
            writer.writerows(rows)
        half.replace(file)
        self._lines = file.open("a", encoding="utf-8", newline="", buffering=1)
