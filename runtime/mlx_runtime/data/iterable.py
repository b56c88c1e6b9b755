"""An `IterableDataset` → batches."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from mlx_runtime.data.batches import Batch, BatchReader, note, rows_of
from mlx_runtime.data.readers import ReadFailure, ReadingProcesses, received
from mlx_runtime.data.sampling import WorkerPass
from mlx_runtime.distributed.randomness import random_state, seed_everything, seeded, set_random_state
from mlx_runtime.errors import DatasetError


class IterableReader:
    """Reads an `IterableDataset`. Every worker iterates over all of it, and stacks its own samples.

    Any number of reading processes but 0 means one.
    """

    window_rows = 1

    def __init__(self, dataset: Any, name: str, processes: ReadingProcesses) -> None:
        self._dataset, self._name, self._processes = dataset, name, processes

    @property
    def advice(self) -> str | None:
        return None if self._processes.count else "read it beside the worker with cfg.loader=workers=1"

    def rows(self) -> int:
        return rows_of(self._dataset, self._name)

    def batches(self, part: WorkerPass) -> Iterator[Batch]:
        batches = _IterableBatches(self._dataset, self._name, part)
        if self._processes.count:
            return received(self._processes.loader(batches, num_workers=1))
        return map(self._processes.pinned, batches.read())


class _IterableBatches(IterableDataset[Any]):
    """The batches that one worker reads of an `IterableDataset`, as a dataset for a reading process."""

    def __init__(self, dataset: Any, name: str, part: WorkerPass) -> None:
        self.dataset, self.name, self.part = dataset, name, part

    def __iter__(self) -> "Iterator[Batch | ReadFailure]":
        seed_everything(self.part.epoch_seed)
        try:
            yield from self.read()
        except Exception as error:
            yield ReadFailure.of(error, self.name)

    def read(self) -> Iterator[Batch]:
        reader, samples = BatchReader(self.dataset, self.name), self._own_samples()
        for number, size in enumerate(self.part.plan.sizes(self.part.rank)):
            batch = list(islice(samples, size))
            if number >= self.part.skip:
                yield reader.stack(batch)

    def _own_samples(self) -> Iterator[Any]:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(self.part.epoch)
        randomness = _Randomness(self.part.epoch_seed)  # all workers see the same stream
        with randomness:
            samples = iter(self.dataset)
        position = before = 0
        for rank, count in self.part.plan.assignments():
            if rank != self.part.rank:
                before += count
                continue
            with randomness:
                own = self._next(samples, position, before, count)
            position, before = position + before + count, 0
            yield from own

    def _next(self, samples: Iterator[Any], position: int, before: int, count: int) -> list[Any]:
        """Skip `before` samples of other workers, and return the next `count`."""
        try:
            skipped = sum(1 for _ in islice(samples, before))
            own = list(islice(samples, count))
        except Exception as error:
            note(error, f"while reading samples {position} to {position + before + count - 1} of datasets.{self.name}")
            raise
        if len(own) < count:
            raise DatasetError(
                f"datasets.{self.name}: {type(self.dataset).__name__} ended after {position + skipped + len(own)} "
                f"samples, but its __len__ is {self.part.plan.rows}"
            )
        return own


class _Randomness:
    """A random state of its own: the block of a `with` neither sees nor changes the random numbers of training."""

    def __init__(self, seed: int) -> None:
        self._alone = get_worker_info() is not None  # a reading process has no other random numbers
        with seeded(seed):
            self._own = random_state()

    def __enter__(self) -> None:
        if not self._alone:
            self._outside = random_state()
            set_random_state(self._own)

    def __exit__(self, *error: object) -> None:
        if not self._alone:
            self._own = random_state()
            set_random_state(self._outside)
