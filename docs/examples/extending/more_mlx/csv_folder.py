"""A kind of dataset: the rows of all CSV files in a folder."""

import csv
from pathlib import Path

import torch


class CSVFolder:
    """A dataset for the group `Datasets`.

    Args:
        path: folder of CSV files with the same numeric columns and one header line.
        batch_size: rows per worker and step.
        target: column with class numbers, returned as `y`; all other columns are `x`.
    """

    def __init__(self, path: str = "rows", batch_size: int = 32, target: str = "label"):
        self.path, self.batch_size, self.target = Path(path), batch_size, target

    def to_reader(self):
        return CSVReader(self.path, self.target)


class CSVReader:
    window_rows = 1  # rows can be read in any order

    def __init__(self, path, target):
        rows = [row for file in sorted(path.glob("*.csv")) for row in csv.DictReader(file.open())]
        self.y = torch.tensor([int(row.pop(target)) for row in rows])
        self.x = torch.tensor([[float(value) for value in row.values()] for row in rows])

    def rows(self):
        return len(self.x)

    def batches(self, part, prefetch=None):
        """Yield the batches of one worker in a pass. `part` knows its rows in order, even after an interruption."""
        for rows in part.batch_rows():
            yield {"x": self.x[rows], "y": self.y[rows]}
