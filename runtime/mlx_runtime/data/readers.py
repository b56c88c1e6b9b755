"""The protocol of readers, and readers of torch datasets, in the worker itself or in separate processes.

The epoch of a dataset, and random generators that are its attributes, are set before rows are read, so that its numbers
depend on neither the reader nor an interruption.
"""

import gc
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, starmap
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from mlx_runtime.data.batches import Batch, BatchReader, owner_of, rows_of
from mlx_runtime.data.sampling import WorkerPass, mix_seeds
from mlx_runtime.distributed.randomness import (
    GENERATORS,
    random_state,
    seed_generators,
    set_random_state,
    set_seed,
    temporary_seed,
)
from mlx_runtime.errors import DatasetError, note, short_message


class Reader(Protocol):
    """Reads the rows of one dataset for one worker. A dataset with a method `to_reader` supplies its own."""

    window_rows: int  # consecutive rows per worker, within which a stream is shuffled; 1 for random access

    def rows(self) -> int:
        """Return the number of rows in one pass. Raises DatasetError if the dataset has no length."""

    def batches(self, part: WorkerPass, prefetch: int | None = None) -> Iterator[Batch]:
        """Yield the remaining batches of a pass. Each reading process reads `prefetch` batches ahead; None means 2."""


@dataclass(frozen=True)
class ReadingProcesses:
    """Separate processes that read the samples of a worker."""

    count: int = 0  # 0 reads in the worker itself
    pin_memory: bool = False  # copying from it to a GPU does not block

    def loader(self, dataset: Dataset[Any], prefetch: int | None, **options: Any) -> DataLoader[Any]:
        """Return a DataLoader for a dataset whose items are batches; each process reads some ahead."""
        return DataLoader(
            dataset,
            batch_size=None,
            collate_fn=_identity,
            pin_memory=self.pin_memory,
            prefetch_factor=2 if prefetch is None else max(1, prefetch),  # 0 would read nothing
            generator=torch.Generator(),  # otherwise each pass would advance the random state of training
            **options,
        )


def _identity(batch: Any) -> Any:
    return batch


def _failure(error: Exception, name: str) -> DatasetError:
    """Return the error of a reading process, which yields it in place of a batch.

    The exception itself may not survive pickling, and a DataLoader would put its traceback into the message.
    """
    if isinstance(error, DatasetError):
        return DatasetError(str(error))  # without its cause, which may not survive either
    notes = "".join(f" ({text})" for text in getattr(error, "__notes__", []))
    frames = [item for item in traceback.extract_tb(error.__traceback__) if "site-packages" not in item.filename]
    where = f'\n  File "{frames[-1].filename}", line {frames[-1].lineno}, in {frames[-1].name}'
    return DatasetError(f"datasets.{name} cannot be read: {type(error).__name__}: {short_message(error)}{notes}{where}")


def _receive(loader: DataLoader[Any]) -> Iterator[Batch]:
    """Yield the batches of reading processes. Raises DatasetError if reading failed."""
    for batch in loader:
        if isinstance(batch, DatasetError):
            raise batch
        yield batch


def _generators(dataset: Any) -> list[Any]:
    """Return the random generators among the attributes of a dataset."""
    owner = owner_of(dataset)
    held = gc.get_referents(owner)  # once Python 3.11 has made a `__dict__`, each access to an attribute takes longer
    if any(isinstance(item, dict) for item in held):  # it may be that
        held = list(getattr(owner, "__dict__", {}).values())
    return [item for item in held if isinstance(item, GENERATORS)]


class MapReader:
    """Reads the rows of a map-style dataset."""

    window_rows = 1

    def __init__(self, dataset: Any, name: str, processes: ReadingProcesses) -> None:
        self._dataset, self._name, self._processes = dataset, name, processes
        self._batches = _MapBatches(BatchReader(dataset, name))
        self._idle: tuple[_Sampler, DataLoader[Any]] | None = None  # processes waiting for the next pass

    def rows(self) -> int:
        return rows_of(self._dataset, self._name)

    def batches(self, part: WorkerPass, prefetch: int | None = None) -> Iterator[Batch]:
        if self._processes.count:
            return self._read_by_processes(part, prefetch)
        return starmap(self._batches.read, _Sampler(part))  # a DataLoader is a fifth slower for small batches

    def _read_by_processes(self, part: WorkerPass, prefetch: int | None) -> Iterator[Batch]:
        own, self._idle = self._idle, None  # a nested pass needs its own
        if own is None:
            sampler, count = _Sampler(part), self._processes.count
            options = {"sampler": sampler, "num_workers": count, "persistent_workers": True}
            own = sampler, self._processes.loader(self._batches, prefetch, **options)
        sampler, loader = own
        sampler.part = part
        try:
            yield from _receive(loader)
        finally:
            self._idle = own


class _Sampler:
    """A sampler for a `DataLoader` whose pass is set before each iteration; yields epoch, seed and row numbers."""

    def __init__(self, part: WorkerPass) -> None:
        self.part = part

    def __iter__(self) -> Iterator[tuple[int, int, list[int]]]:
        epoch, seed = self.part.epoch, self.part.epoch_seed
        return ((epoch, seed, rows) for rows in self.part.batch_rows())


class _MapBatches(Dataset[Any]):
    """A map-style dataset whose items are batches, also for reading processes."""

    def __init__(self, batches: BatchReader) -> None:
        self._batches = batches
        self._generators = _generators(batches.dataset)
        self._set_epoch = getattr(batches.dataset, "set_epoch", None)
        self._epoch: int | None = None

    def read(self, epoch: int, seed: int, rows: list[int]) -> Batch:
        """Return a batch of these rows, in the state that the dataset has for them."""
        if self._set_epoch is not None and epoch != self._epoch:
            self._epoch = epoch
            self._set_epoch(epoch)
        if self._generators:
            seed_generators(self._generators, mix_seeds(seed, rows[0]))
        return self._batches.read(rows)

    def __getitem__(self, item: tuple[int, int, list[int]]) -> "Batch | DatasetError":
        _, seed, rows = item
        set_seed(mix_seeds(seed, rows[0]))  # so that random samples do not depend on the process
        try:
            return self.read(*item)
        except Exception as error:
            return _failure(error, self._batches.name)


class IterableReader:
    """Reads an `IterableDataset`. Every worker iterates over all of it, and stacks its own samples.

    It uses at most one reading process; any number above 0 means 1.
    """

    window_rows = 1

    def __init__(self, dataset: Any, name: str, processes: ReadingProcesses) -> None:
        self._dataset, self._name, self._processes = dataset, name, processes

    def rows(self) -> int:
        return rows_of(self._dataset, self._name)

    def batches(self, part: WorkerPass, prefetch: int | None = None) -> Iterator[Batch]:
        batches = _IterableBatches(self._dataset, self._name, part)
        if self._processes.count:
            return _receive(self._processes.loader(batches, prefetch, num_workers=1))
        return batches.read()


class _IterableBatches(IterableDataset[Any]):
    """One worker's batches of an `IterableDataset`, as a dataset for a reading process."""

    def __init__(self, dataset: Any, name: str, part: WorkerPass) -> None:
        self.dataset, self.name, self.part = dataset, name, part

    def __iter__(self) -> "Iterator[Batch | DatasetError]":
        from mlx_runtime.distributed.torch_private import outside_data_loader  # here, because few runs need it

        try:
            with outside_data_loader():  # which would change the order of Hugging Face's streams
                yield from self.read(alone=True)
        except Exception as error:
            yield _failure(error, self.name)

    def read(self, *, alone: bool = False) -> Iterator[Batch]:
        """Yield the batches; `alone` in a process that does nothing else."""
        reader, samples = BatchReader(self.dataset, self.name), self._own_samples()
        for number, size in enumerate(self.part.plan.sizes(self.part.rank)):
            positions, batch = zip(*islice(samples, size), strict=True)
            if number >= self.part.skip:
                if alone:  # as in `_MapBatches`
                    set_seed(mix_seeds(self.part.epoch_seed, positions[0]))
                yield reader.stack(list(batch), positions)

    def _own_samples(self) -> Iterator[tuple[int, Any]]:
        """Yield this worker's samples, each with its position in the stream."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(self.part.epoch)
        seed_generators(_generators(self.dataset), self.part.epoch_seed)
        randomness = _Randomness(self.part.epoch_seed)  # all workers see the same stream
        with randomness:
            if hasattr(self.dataset, "in_order"):
                samples = self.dataset.in_order(self.part.epoch_seed if self.part.shuffle else None)
            else:
                samples = iter(self.dataset)
        position = before = 0
        for rank, count in self.part.plan.assignments():
            if rank != self.part.rank:
                before += count
                continue
            with randomness:
                own = self._next(samples, position, before, count)
            first, position, before = position + before, position + before + count, 0
            yield from enumerate(own, first)

    def _next(self, samples: Iterator[Any], position: int, before: int, count: int) -> list[Any]:
        """Skip `before` samples of other workers, and return the next `count`."""
        try:
            skipped = sum(1 for _ in islice(samples, before))
            own = list(islice(samples, count))
        except Exception as error:
            note(error, f"while reading samples {position} to {position + before + count - 1} of datasets.{self.name}")
            raise
        if len(own) < count:
            owner = type(owner_of(self.dataset)).__name__
            raise DatasetError(
                f"datasets.{self.name}: {owner} ended after {position + skipped + len(own)} "
                f"samples, but __len__() is {self.part.plan.rows}"
            )
        return own


class _Randomness:
    """A separate random state: code in its `with` block does not affect the random numbers of training."""

    def __init__(self, seed: int) -> None:
        with temporary_seed(seed):
            self._own = random_state()

    def __enter__(self) -> None:
        self._outside = random_state()
        set_random_state(self._own)

    def __exit__(self, *error: object) -> None:
        self._own = random_state()
        set_random_state(self._outside)
