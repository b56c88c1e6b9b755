"""The tracker `CSV`: a table of all reports."""

import contextlib
import csv
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

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
        rows = list(_rows(self._run.folder / "metrics.jsonl"))
        self._columns = list(dict.fromkeys(name for line in rows for name in line))
        file = self._run.folder / self.file
        half = file.with_name(f".{file.name}.part")
        with open(half, "w", encoding="utf-8", newline="", opener=regular) as stream:
            writer = self._writer(stream)
            writer.writeheader()
            writer.writerows(rows)
        half.replace(file)
        self._lines = file.open("a", encoding="utf-8", newline="", buffering=1)


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete lines of a JSONL file."""
    with contextlib.suppress(FileNotFoundError):
        yield from map(json.loads, file.read_text(encoding="utf-8").rpartition("\n")[0].splitlines())
