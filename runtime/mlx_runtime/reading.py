"""Samples of a torch dataset → batches, in the worker that trains or in processes beside it."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from operator import length_hint
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from mlx_runtime.errors import DatasetError
from mlx_runtime.parallel import random_state, seed_everything, seeded, set_random_state
from mlx_runtime.sampling import Plan, mixed

Batch = dict[str, Any]
"""By name: tensors (rows, ...), and whatever else `ray_map_batches` gives, like a list of strings."""

_STAND_INS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes per element: what a type that NumPy lacks is stored as."""


class Rows(list[int]):
    """The row numbers of one batch, and the seed of the pass that they belong to."""

    seed = 0

    def seed_reader(self) -> None:
        """Seed a process that reads nothing else: random samples are then the same whichever process reads them."""
        seed_everything(mixed(self.seed, self[0]))


class Samples(Dataset[Any]):
    """A dataset that reads one batch of samples at a time, and names itself and the sample when one raises.

    Args:
        dataset: map-style.
        name: in `Datasets`, like `train`.
    """

    def __init__(self, dataset: Any, name: str) -> None:
        self.dataset, self.name = dataset, name

    def __getitems__(self, rows: Sequence[int]) -> list[Any]:
        if isinstance(rows, Rows) and get_worker_info() is not None:
            rows.seed_reader()
        coming = iter(rows)
        try:
            if hasattr(self.dataset, "__getitems__"):
                return self.dataset.__getitems__(rows)  # type: ignore[no-any-return]
            return list(map(self.dataset.__getitem__, coming))  # the fastest loop that Python has
        except Exception as error:
            count = len(rows) - length_hint(coming)
            which = f"sample {rows[count - 1]}" if count else f"samples {rows[0]} …"
            note(error, f"while reading {which} of datasets.{self.name}")
            raise

    def __getitem__(self, row: int) -> Any:
        return self.__getitems__([row])[0]


class Stacked:
    """`ray_map_batches` as a collate function, its result checked.

    Args:
        dataset: that has it.
        name: in `Datasets`.
    """

    def __init__(self, dataset: Any, name: str) -> None:
        self.stack, self.name = dataset.ray_map_batches, name

    def __call__(self, samples: list[Any]) -> Batch:
        """The batch of some samples.

        Raises:
            DatasetError: `ray_map_batches` gave none.
        """
        try:
            batch = self.stack({"item": samples})
        except Exception as error:
            note(error, f"in ray_map_batches, while stacking {len(samples)} samples of datasets.{self.name}")
            raise
        return tensors(batch, len(samples), f"datasets.{self.name}: ray_map_batches gave")


def tensors(batch: Any, rows: int, where: str) -> Batch:
    """A batch with all numbers as tensors (rows, ...); strings, nested lists and other objects are passed through.

    Raises:
        DatasetError: it is no mapping, or does not have so many rows; the message begins with `where`.
    """
    if not isinstance(batch, Mapping) or not batch:
        given = "nothing" if batch in (None, {}) else type(batch).__name__
        raise DatasetError(f"{where} {given}; it must give {{name: tensor}}")
    made = {}
    for key, value in batch.items():
        if not isinstance(key, str):
            raise DatasetError(f"{where} a tensor named {key!r}; names must be text")
        made[key] = value if (tensor := _as_tensor(value)) is None else tensor
        if tensor is not None and tensor.shape[:1] != (rows,):
            raise DatasetError(
                f"{where} {key!r} of shape {tuple(tensor.shape)} for {rows} samples; "
                "its first dimension must be their number"
            )
        if tensor is None and isinstance(value, list | tuple | np.ndarray) and len(value) != rows:
            raise DatasetError(f"{where} {key!r} with {len(value)} items for {rows} samples; it must have one for each")
    return made


def _as_tensor(value: Any) -> torch.Tensor | None:
    """A tensor, an array of numbers or a flat list of numbers as a tensor; None of anything else."""
    if isinstance(value, torch.Tensor):
        return value
    numbers = (bool, int, float, complex, np.generic)
    if isinstance(value, list | tuple):
        flat = all(isinstance(item, numbers) or (isinstance(item, torch.Tensor) and not item.ndim) for item in value)
    else:
        flat = isinstance(value, (*numbers, np.ndarray))
    try:
        return torch.as_tensor(value) if flat else None
    except (TypeError, ValueError, RuntimeError):
        return None  # text, dates, numbers that are too large


def move_tensors(batch: Batch, move: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
    """A batch with its tensors moved; what else it carries stays as it is."""
    return {key: move(value) if isinstance(value, torch.Tensor) else value for key, value in batch.items()}


class MapReader:
    """Reads the rows of a map-style dataset, in processes beside this one through a `DataLoader`.

    Args:
        dataset, name: the dataset and its name in `Datasets`.
        processes: that read; none reads in this one.
        prefetch_batches: that each of them reads ahead.
        pin_memory: put batches where a GPU fetches them from without waiting.
    """

    def __init__(self, dataset: Any, name: str, *, processes: int, prefetch_batches: int, pin_memory: bool) -> None:
        self._samples, self._stacked, self._pin_memory = Samples(dataset, name), Stacked(dataset, name), pin_memory
        self._sampler = _Sampler()
        self._loader: DataLoader[Any] | None = None
        if processes:
            self._loader = DataLoader(
                self._samples,
                batch_sampler=self._sampler,
                collate_fn=self._stacked,
                num_workers=processes,
                prefetch_factor=max(1, prefetch_batches),
                persistent_workers=True,
                pin_memory=pin_memory,
                generator=torch.Generator(),  # else each pass would take a random number from training
            )

    def batches(self, rows: torch.Tensor, sizes: Sequence[int], seed: int) -> Iterator[Batch]:
        """One batch after the other.

        Args:
            rows: to read, (n,).
            sizes: rows in each batch; n in all.
            seed: of random samples, where reading processes make them; another one for every batch follows from it.
        """
        if self._loader is None:
            return self._here(rows, sizes, seed)
        self._sampler.next_pass = (rows, sizes, seed)
        return _clearly(iter(self._loader), self._samples.name)

    def _here(self, rows: torch.Tensor, sizes: Sequence[int], seed: int) -> Iterator[Batch]:
        """In this process, without a `DataLoader`: of small batches its own work is a fifth."""
        for batch in row_batches(rows, sizes, seed):
            made = self._stacked(self._samples.__getitems__(batch))
            yield move_tensors(made, torch.Tensor.pin_memory) if self._pin_memory else made


class _Sampler:
    """The batch sampler of a `DataLoader` that is told before each pass what to read."""

    next_pass: tuple[torch.Tensor, Sequence[int], int] = (torch.empty(0), (), 0)

    def __iter__(self) -> Iterator[Rows]:
        return row_batches(*self.next_pass)


def row_batches(rows: torch.Tensor, sizes: Sequence[int], seed: int) -> Iterator[Rows]:
    """The row numbers of one batch after the other, with the seed of the pass."""
    start = 0
    for size in sizes:
        batch = Rows(rows[start : start + size].tolist())
        batch.seed = seed
        start += size
        yield batch


class StreamReader:
    """Reads an `IterableDataset`: every worker runs through all of it, and stacks the samples that are its own.

    Args:
        dataset, name: the dataset and its name in `Datasets`.
        processes: any number but 0 means one: it reads beside this one.
        prefetch_batches, pin_memory: as for `MapReader`.
    """

    def __init__(self, dataset: Any, name: str, *, processes: int, prefetch_batches: int, pin_memory: bool) -> None:
        self._dataset, self._name, self._pin_memory = dataset, name, pin_memory
        self._options: dict[str, Any] = {}
        if processes:
            self._options = {"num_workers": 1, "prefetch_factor": max(1, prefetch_batches)}

    def batches(self, plan: Plan, rank: int, skip: int, epoch: int, seed: int) -> Iterator[Batch]:
        """One batch after the other.

        Args:
            plan: who reads what.
            rank: of this worker.
            skip: steps of the plan that were taken already.
            epoch: told to the dataset's `set_epoch`, if it has one.
            seed: that the dataset runs under; the same on all workers, so that they see the same stream.
        """
        own = _OwnSamples(self._dataset, self._name, plan, rank, skip, epoch, seed)
        stacked = Stacked(self._dataset, self._name)
        options = self._options | {"pin_memory": self._pin_memory, "generator": torch.Generator()}
        return _clearly(iter(DataLoader(own, batch_size=None, collate_fn=stacked, **options)), self._name)


class _OwnSamples(IterableDataset[list[Any]]):
    """The samples that one worker reads of a stream, as one list per batch."""

    def __init__(self, dataset: Any, name: str, plan: Plan, rank: int, skip: int, epoch: int, seed: int) -> None:
        self.dataset, self.name = dataset, name
        self.plan, self.rank, self.skip = plan, rank, skip
        self.epoch, self.seed = epoch, seed

    def __iter__(self) -> Iterator[list[Any]]:
        sizes = self.plan.sizes(self.rank)
        waiting: list[Any] = []
        batches = iter(sizes)
        size, number = next(batches, 0), 0
        for sample in self._own():
            waiting.append(sample)
            if len(waiting) == size:
                if number >= self.skip:
                    yield waiting
                waiting, size, number = [], next(batches, 0), number + 1

    def _own(self) -> Iterator[Any]:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(self.epoch)
        randomness = _Randomness(self.seed)
        with randomness.used():
            samples = iter(self.dataset)
        place = before = 0
        for rank, count in self.plan.deal():
            if rank != self.rank:
                before += count
                continue
            with randomness.used():
                found = self._next(samples, place, before, count)
            place, before = place + before + len(found), 0
            yield from found

    def _next(self, samples: Iterator[Any], place: int, before: int, count: int) -> list[Any]:
        """The next samples of this worker, after some of others."""
        found: list[Any] = []
        try:
            others = sum(1 for _ in islice(samples, before))
            found.extend(islice(samples, count))
        except Exception as error:
            note(error, f"while reading samples {place} to {place + before + count - 1} of datasets.{self.name}")
            raise
        if len(found) < count:
            raise DatasetError(
                f"datasets.{self.name}: {type(self.dataset).__name__} ended after "
                f"{place + others + len(found)} samples, and its __len__ says {self.plan.rows}"
            )
        return found


class _Randomness:
    """Random state of its own: what runs inside `used()` neither sees nor changes that of the training loop."""

    def __init__(self, seed: int) -> None:
        if get_worker_info() is not None:
            seed_everything(seed)
        with seeded(seed):
            self._state = random_state()

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        if get_worker_info() is not None:
            yield  # nothing else is random in a reading process
            return
        before = random_state()
        set_random_state(self._state)
        try:
            yield
        finally:
            self._state = random_state()
            set_random_state(before)


def _clearly(batches: Iterator[Batch], name: str) -> Iterator[Batch]:
    """The same batches; what a reading process raised is told without the traceback that torch makes its message.

    Raises:
        DatasetError: a reading process raised.
    """
    try:
        yield from batches
    except Exception as error:
        text = str(error)
        if "Original Traceback" not in text:
            raise
        lines = text.rstrip().splitlines()
        frames = [index for index, line in enumerate(lines) if line.startswith("  ")]
        cause, *notes = lines[frames[-1] + 1 :]
        at = [line.strip() for line in lines if line.startswith("  File ") and "site-packages" not in line]
        told = cause + "".join(f" ({line})" for line in notes)
        raise DatasetError(f"datasets.{name} cannot be read: {told}\n  {at[-1] if at else ''}".rstrip()) from None


def note(error: BaseException, text: str) -> None:
    """What `error.add_note(text)` does, which Python 3.10 lacks."""
    vars(error).setdefault("__notes__", []).append(text)


def rows_of(dataset: Any, name: str) -> int:
    """How many rows a dataset has.

    Raises:
        DatasetError: it does not say.
    """
    try:
        return len(dataset)
    except (TypeError, NotImplementedError) as error:
        raise DatasetError(
            f"datasets.{name}: {type(dataset).__name__} does not say how many rows one pass has; give it __len__"
        ) from error


def dtype_name(column: torch.Tensor) -> str:
    """`float32` of a tensor of torch.float32."""
    return str(column.dtype).removeprefix("torch.")


def as_numpy(column: torch.Tensor) -> "np.ndarray[Any, Any]":
    """A tensor as it is stored: C order, and types that NumPy lacks as whole numbers of the same size."""
    column = column.detach().cpu().contiguous()
    try:
        return column.numpy()
    except TypeError:
        return column.view(_STAND_INS[column.element_size()]).numpy()
