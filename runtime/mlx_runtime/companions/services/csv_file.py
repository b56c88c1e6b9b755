"""The tracker `CSV`: a table of all reports."""

import csv
from collections.abc import Mapping

from mlx_runtime.runs.folder import read_rows
from mlx_runtime.storage.local import regular
from mlx_runtime.tracking.callbacks import RunInfo


class CSV:
    """A CSV file with one line per report and one column per metric; cells of missing metrics are empty.

    The reports of an epoch are added from `metrics.jsonl` when it ends. A new metric is a new column, so the file is
    then written again.

    Args:
        file: name in the run's folder.
    """

    def __init__(self, file: str = "metrics.csv"):
        self.file, self.files = file, (file,)
        self._run: RunInfo | None = None
        self._columns: dict[str, None] = {}
        self._read = 0  # bytes of metrics.jsonl that are in the file

    def on_run_start(self, run: RunInfo) -> None:
        self._run = run
        self._write(anew=True)

    def on_rewind(self, step: int) -> None:
        if self._run is not None:
            self._write(anew=True)

    def on_epoch_end(self, epoch: int, values: Mapping[str, float]) -> None:
        self._write()

    def on_run_end(self, status: str, metrics: Mapping[str, float]) -> None:
        self._write()

    def _write(self, *, anew: bool = False) -> None:
        """Append the rows that are not in the file yet, or write the whole file."""
        assert self._run is not None, "on_run_start was called"
        record, file = self._run.folder / "metrics.jsonl", self._run.folder / self.file
        content = b""
        if record.exists():
            with record.open("rb") as stream:
                stream.seek(0 if anew else self._read)
                content = stream.read()
        lines = [*read_rows(content)]
        rows = [row for _, row in lines if row is not None]
        columns = dict.fromkeys(name for row in rows for name in row)
        if not anew and columns.keys() - self._columns.keys():
            self._write(anew=True)
            return
        if anew:
            self._columns, self._read = columns, 0
        self._read += sum(len(line) for line, _ in lines)
        half = file.with_name(f".{file.name}.part")
        with open(half if anew else file, "w" if anew else "a", encoding="utf-8", newline="", opener=regular) as stream:
            writer = csv.DictWriter(stream, self._columns, lineterminator="\n")
            if anew:
                writer.writeheader()
            writer.writerows(rows)
        if anew:
            half.replace(file)
