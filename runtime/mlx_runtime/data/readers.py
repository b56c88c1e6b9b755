"""What a loader reads from, and map-style datasets, read in the worker that trains or in processes beside it."""

import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset

from mlx_runtime.data.batches import Batch, BatchReader, move_tensors, rows_of
from mlx_runtime.data.sampling import WorkerPass, mix_seeds
from mlx_runtime.distributed.randomness import seed_everything
from mlx_runtime.errors import DatasetError, short_message


class Reader(Protocol):
    """Reads the rows of one dataset for one worker."""

    window_rows: int  # consecutive rows that a worker reads, within which a stream is shuffled; 1 for random access

    @property
    def advice(self) -> str | None:
        """How to read faster; None if there is no better way."""

    def rows(self) -> int:
        """Return the number of rows in one pass. Raises DatasetError if the dataset has no length."""

    def batches(self, part: WorkerPass) -> Iterator[Batch]:
        """Yield the remaining batches of a pass."""


@dataclass(frozen=True)
class ReadingProcesses:
    """Processes beside a worker that read its samples."""

    count: int = 0  # 0 reads in the worker itself
    pin_memory: bool = False  # from which copying to a GPU does not block

    def loader(self, dataset: Dataset[Any], **options: Any) -> DataLoader[Any]:
        """Return a DataLoader for a dataset whose items are batches."""
        return DataLoader(
            dataset,
            batch_size=None,
            collate_fn=_unchanged,
            pin_memory=self.pin_memory,
            generator=torch.Generator(),  # else each pass would draw a random number of training
            **options,
        )

    def pinned(self, batch: Batch) -> Batch:
        """Return a batch read in the worker, in pinned memory if that is set."""
        return move_tensors(batch, torch.Tensor.pin_memory) if self.pin_memory else batch


def _unchanged(batch: Any) -> Any:
    return batch


class MapReader:
    """Reads the rows of a map-style dataset."""

    window_rows = 1

    def __init__(self, dataset: Any, name: str, processes: ReadingProcesses) -> None:
        self._dataset, self._name, self._processes = dataset, name, processes
        self._batches = BatchReader(dataset, name)
        self._sampler = _Sampler()
        self._loader: DataLoader[Any] | None = None
        if processes.count:
            options = {"sampler": self._sampler, "num_workers": processes.count, "persistent_workers": True}
            self._loader = processes.loader(_MapBatches(self._batches), **options)

    @property
    def advice(self) -> str | None:
        more = f"cfg.loader=workers={max(2, 2 * self._processes.count)}"
        if getattr(self._dataset, "prepare", True):
            return "prepare it once with --prepare-batches" + (f", or try {more}" if self._processes.count else "")
        return f"try {more}" if self._processes.count else f"spread it with {more}"

    def rows(self) -> int:
        return rows_of(self._dataset, self._name)

    def batches(self, part: WorkerPass) -> Iterator[Batch]:
        if self._loader is None:  # without a DataLoader, whose overhead is a fifth for small batches
            return (self._processes.pinned(self._batches.read(rows)) for rows in part.batch_rows())
        self._sampler.part = part
        return received(self._loader)


class _Sampler:
    """A sampler for a `DataLoader` whose pass is set before each iteration; yields the seed of it with row numbers."""

    part: WorkerPass

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        seed = self.part.epoch_seed
        return ((seed, rows) for rows in self.part.batch_rows())


class _MapBatches(Dataset[Any]):
    """A map-style dataset whose items are batches, for reading processes."""

    def __init__(self, batches: BatchReader) -> None:
        self._batches = batches

    def __getitem__(self, item: tuple[int, list[int]]) -> "Batch | ReadFailure":
        seed, rows = item
        seed_everything(mix_seeds(seed, rows[0]))  # random samples are the same whichever process reads them
        try:
            return self._batches.read(rows)
        except Exception as error:
            return ReadFailure.of(error, self._batches.name)


@dataclass(frozen=True)
class ReadFailure:
    """What a reading process returns instead of a batch if reading raised an exception.

    The exception itself may not survive pickling, and a DataLoader would put its traceback into the message.
    """

    message: str

    @classmethod
    def of(cls, error: Exception, name: str) -> "ReadFailure":
        if isinstance(error, DatasetError):
            return cls(str(error))
        notes = "".join(f" ({text})" for text in getattr(error, "__notes__", []))
        frames = [item for item in traceback.extract_tb(error.__traceback__) if "site-packages" not in item.filename]
        where = f'\n  File "{frames[-1].filename}", line {frames[-1].lineno}, in {frames[-1].name}'
        return cls(f"datasets.{name} cannot be read: {type(error).__name__}: {short_message(error)}{notes}{where}")


def received(loader: DataLoader[Any]) -> Iterator[Batch]:
    """Yield the batches of reading processes. Raises DatasetError if reading failed."""
    for batch in loader:
        if isinstance(batch, ReadFailure):
            raise DatasetError(batch.message)
        yield batch
