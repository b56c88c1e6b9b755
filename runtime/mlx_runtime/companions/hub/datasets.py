"""Adapters between loaders and Hugging Face datasets, from `datasets.load_dataset` or a class with `to_hf()`.

One process of a machine loads and maps such a dataset while the others wait; they find the result in the cache of
Hugging Face.
"""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from mlx_runtime.config.constructors.declarations import is_hf_dataset
from mlx_runtime.data.batches import AdoptedDataset, owner_of
from mlx_runtime.data.sampling import LOADER_ARGUMENTS
from mlx_runtime.errors import DatasetError
from mlx_runtime.settings import Settings
from mlx_runtime.storage.local import one_at_a_time

SHUFFLE_BUFFER = 1000
"""Size of the shuffle buffer of a stream, in rows; the attribute `shuffle_buffer` overrides it."""

Collate = Callable[[list[dict[str, Any]]], Mapping[str, Any]]
"""Makes a batch of rows, like `transformers.DataCollatorWithPadding`."""


class Batched(Dataset[Any]):
    """A Hugging Face dataset with settings for its batches, for a plain `load_dataset(...)` in `Datasets`.

    Args:
        source: the rows.
        batch_size: rows per worker and step.
        collate: turns a list of rows into a batch; by default, numbers of one shape are stacked.
        shuffle: read the rows in a new order in each epoch; by default, if the name of the dataset is that of a
            training set.
        drop_last: drop the last rows if they do not fill a batch on every worker.
        group_by_length: column with the length of each row, or with lists of that length, so that each batch has rows
            of similar lengths.
        rows: number of rows of a stream; by default the number in the description of the dataset.
    """

    def __init__(
        self,
        source: Any,
        batch_size: int = 32,
        collate: Collate | None = None,
        shuffle: bool | None = None,
        drop_last: bool = False,
        group_by_length: str | None = None,
        rows: int | None = None,
    ) -> None:
        self.source, self.batch_size, self.drop_last = source, batch_size, drop_last
        if collate is not None:
            self.collate = collate
        if shuffle is not None:
            self.shuffle = shuffle
        self.group_by_length, self.rows = group_by_length, rows

    def to_hf(self) -> Any:
        """Return the rows."""
        return self.source


class _OwnedDataset(AdoptedDataset):
    """A Hugging Face dataset that has the attributes of its owner, the object that it comes from.

    Args:
        owner: object with attributes like `batch_size` and `collate`; the dataset itself if a function returned it.
        source: the dataset.
        arguments: the node in conf.yaml, whose arguments for loaders apply if the owner has no such attributes.
    """

    def __init__(self, owner: Any, source: Any, arguments: Mapping[str, Any]) -> None:
        self.owner, self.source = owner, source
        self._arguments = {name: arguments[name] for name in LOADER_ARGUMENTS if arguments.get(name) is not None}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("owner", "source", "_arguments"):  # called during unpickling
            raise AttributeError(name)
        if self.owner is self.source:  # only attributes set by a function: `shuffle` is a method
            values = vars(self.source)
            if name in values and not name.startswith("_"):
                return values[name]
        elif hasattr(self.owner, name):
            return getattr(self.owner, name)
        if name in self._arguments:
            return self._arguments[name]
        raise AttributeError(f"{type(self.owner).__name__} has no attribute {name!r}")


class HFRows(_OwnedDataset, Dataset[Any]):
    """The rows of a map-style Hugging Face dataset."""

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, row: int) -> Any:
        return self.source[row]

    def __getitems__(self, rows: Sequence[int]) -> list[Any]:
        return self.source.__getitems__(list(rows))  # type: ignore[no-any-return]

    def lengths_of(self, column: str, title: str) -> list[int]:
        """Return the numbers in a column, or the lengths of the lists in it, by row. `title` begins an error."""
        if column not in self.source.column_names:
            known = ", ".join(self.source.column_names)
            raise DatasetError(f"{title} is {column!r}, but the columns are {known}")
        tables = self.source.select_columns([column]).with_format("arrow").iter(batch_size=10_000)
        chunks = (chunk for table in tables for chunk in table.column(column).chunks)
        return [
            number
            for chunk in chunks
            for number in (chunk.value_lengths() if hasattr(chunk, "value_lengths") else chunk).to_pylist()
        ]


class HFStream(_OwnedDataset, IterableDataset[Any]):
    """The rows of a streaming Hugging Face dataset.

    Its number of rows is the `__len__` of its owner, or the number in the description of the dataset if the owner is
    `Batched`, which changes no rows.
    """

    def __len__(self) -> int:
        if self.owner is not self.source and hasattr(type(self.owner), "__len__"):
            return len(self.owner)
        if isinstance(self.owner, Batched):
            splits, split = self.source.info.splits or {}, str(self.source.split)
            described = splits[split].num_examples if split in splits else None
            if rows := self.owner.rows or described:
                return int(rows)
        raise TypeError("unknown")

    @property
    def length_cure(self) -> str:
        """Instruction for giving the number of rows, for errors."""
        if self.owner is self.source or isinstance(self.owner, Batched):
            return "give the number of rows in one pass: Batched(..., rows=N)"
        return "give it __len__, the number of rows in one pass"

    def __iter__(self) -> Iterator[Any]:
        return iter(self.source)

    def in_order(self, seed: int | None) -> Iterator[Any]:
        """Return the rows as stored or, with a seed, with files in random order and rows shuffled within a buffer."""
        if seed is None:
            return iter(self.source)
        size = getattr(self, "shuffle_buffer", SHUFFLE_BUFFER)
        return iter(self.source.shuffle(seed=seed % 2**32, buffer_size=size))


def adopt_dataset(dataset: Any, name: str, node: Mapping[str, Any] | None = None) -> Any:
    """Return the dataset in a form that loaders can read; see `definitions.adopt_dataset`."""
    source = dataset.to_hf() if hasattr(type(dataset), "to_hf") else dataset
    if is_hf_dataset(type(source)):
        kind = HFStream if isinstance(source, sys.modules["datasets"].IterableDataset) else HFRows
        return kind(dataset, source, node or {})
    if _has_splits(source):
        cure = f"choose one, like split={next(iter(source), 'train')!r}"
        raise DatasetError(f"datasets.{name} has the splits {', '.join(map(str, source))}; {cure}")
    if source is not dataset:
        returned = f"{type(dataset).__name__}.to_hf() returned {type(source).__name__}"
        raise DatasetError(f"datasets.{name}: {returned}; it must return a datasets.Dataset")
    return dataset


def batch_size_cure(dataset: Any) -> str:
    """Return an instruction for setting the batch size of a dataset, or of the class of a prepared one."""
    if isinstance(dataset, _OwnedDataset) and dataset.owner is dataset.source:
        wrap = "wrap it in mlx_runtime.datasets.Batched(..., batch_size=32)"
        return f"give the function that returns it an argument batch_size, or {wrap}"
    cls = "its class" if dataset is None else type(owner_of(dataset)).__name__
    return f"set self.batch_size to a number of rows, 1 or more, in {cls}"


def _has_splits(source: Any) -> bool:
    library = sys.modules.get("datasets")
    kinds = tuple(getattr(library, name, ()) for name in ("DatasetDict", "IterableDatasetDict"))
    return library is not None and isinstance(source, kinds)


@contextlib.contextmanager
def loading_lock(node: Mapping[str, Any]) -> Iterator[None]:
    """Let one process of this machine at a time load the dataset of a node in conf.yaml.

    The others find the downloaded and mapped files in the cache.
    """
    with one_at_a_time(Settings.read().cache / "locks", json.dumps(node, default=str)):
        yield
