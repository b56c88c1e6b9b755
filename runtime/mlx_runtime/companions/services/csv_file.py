"""The tracker `CSV`: a table of all reports."""

import csv
from collections.abc import Mapping

from mlx_runtime.runs.folder import read_rows
from mlx_runtime.storage.local import regular
from mlx_runtime.tracking.callbacks import RunInfo


class CSV:
    """A CSV file with one line per report and one column per metric; cells of missing metrics are empty.

    It is written from `metrics.jsonl` at the end of each epoch, because a new metric adds a column.

    Args:
        file: name in the run's folder.
    """

    def __init__(self, file: str = "metrics.csv"):
        self.file, self.files = file, (file,)
        self._run: RunInfo | None = None

    def on_run_start(self, run: RunInfo) -> None:
        self._run = run
        self._write()

    def on_rewind(self, step: int) -> None:
        if self._run is not None:
            self._write()

    def on_epoch_end(self, epoch: int, values: Mapping[str, float]) -> None:
        self._write()

    def on_run_end(self, status: str, metrics: Mapping[str, float]) -> None:
        self._write()

    def _write(self) -> None:
        assert self._run is not None, "on_run_start was called"
        record = self._run.folder / "metrics.jsonl"
        rows = [row for _, row in read_rows(record.read_bytes() if record.exists() else b"") if row is not None]
        file = self._run.folder / self.file
        half = file.with_name(f".{file.name}.part")
        with open(half, "w", encoding="utf-8", newline="", opener=regular) as stream:
            writer = csv.DictWriter(stream, dict.fromkeys(name for row in rows for name in row), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        half.replace(file)
