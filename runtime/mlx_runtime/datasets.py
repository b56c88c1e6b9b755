"""torch Datasets → one loader per worker, in an order that only the seed, the epoch and the world size decide.

How rows reach workers: every worker holds the dataset and reads its own rows of a permutation that all workers
compute alike; `ray_map_batches` stacks them where they are read, so samples never travel.

Every worker takes the same number of steps, and every row is read exactly once per epoch: ranks differ by at most one
row, so all steps but the last two have `batch_size` rows, and the last ones share what is left without being empty.
(Only `batch_size=1` cannot share: there the surplus rows, fewer than there are workers, sit out the epoch.)
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from mlx_runtime import declarations  # noqa: F401 - from here on, defaults in src declare datasets and load none
from mlx_runtime.errors import ConfigError, DatasetError

Batch = dict[str, torch.Tensor]

EVALUATION = ("val", "test", "eval", "dev", "predict")
"""What the names of sets begin with that are read in order and not trained on."""


@dataclass(frozen=True)
class DatasetShard:
    """One dataset as one worker sees it.

    Attributes:
        name: of the argument in `Datasets`, like `train`.
        group: the object that holds the dataset under this name, and makes it when it is first read.
        rank: world rank of this worker.
        world_size: number of workers.
        seed: decides the order together with the epoch.
        device: where batches go.
        reader: `cfg.loader`.
        prefetch_batches: `cfg.prefetch_batches`.
    """

    name: str
    group: Any
    rank: int
    world_size: int
    seed: int
    device: torch.device
    reader: str = "auto"
    prefetch_batches: int = 2

    @property
    def dataset(self) -> Dataset[Any]:
        """The map-style torch Dataset, with `ray_map_batches`."""
        return cast(Dataset[Any], getattr(self.group, self.name))

    @property
    def training(self) -> bool:
        """Whether its steps count as training steps: all sets' do, but those named val…, test… and the like."""
        return not self.name.startswith(EVALUATION)

    @property
    def shuffle(self) -> bool:
        """Training sets are shuffled globally each epoch; a dataset's own `shuffle` attribute decides otherwise."""
        return bool(getattr(self.dataset, "shuffle", self.training))

    def iter_torch_batches(self, batch_size: int | None = None) -> "Loader":
        """A re-iterable loader of `{name: tensor (batch_size, ...)}` on this worker's device.

        The dataset is made when the loader is first read or asked for its length.

        Args:
            batch_size: rows per worker and step; the dataset's own `batch_size` by default.
        """
        return Loader(self, batch_size)


class DatasetShards:
    """The shards by the names of `Datasets`: `dataset_shards.train`, `dataset_shards.val`, …"""

    def __init__(self, shards: Mapping[str, DatasetShard]) -> None:
        self.__dict__.update(shards)

    def __getattr__(self, name: str) -> DatasetShard:
        raise AttributeError(f"no dataset {name!r} in Datasets; there is: {', '.join(self.__dict__)}")

    def __iter__(self) -> Iterator[DatasetShard]:
        return iter(self.__dict__.values())


class Loader:
    """Batches of one shard; iterate it once per epoch. Every worker must take part in each pass.

    Attributes:
        shard: what it reads.
        epoch: number of the next pass, which decides the order; a restart sets it.
        on_batch: called before each batch with (loader, number of the batch in this pass from 1).
    """

    def __init__(self, shard: DatasetShard, batch_size: int | None = None) -> None:
        self.shard = shard
        self.epoch = 0
        self.on_batch: Callable[[Loader, int], None] = lambda loader, number: None
        self._batch_size = batch_size
        self._processes = reading_processes(shard.reader)

    @cached_property
    def batch_size(self) -> int:
        """Rows per worker and step.

        Raises:
            DatasetError: neither the call nor the dataset gives one.
        """
        dataset = self.shard.dataset
        size = self._batch_size if self._batch_size is not None else getattr(dataset, "batch_size", None)
        if type(size) is not int or size < 1:
            raise DatasetError(
                f"datasets.{self.shard.name} has batch_size {size!r}; "
                f"set self.batch_size to a number of rows from 1 in {type(dataset).__name__}"
            )
        return size

    @cached_property
    def rows(self) -> int:
        """Rows in all, over all workers.

        Raises:
            DatasetError: fewer than there are workers.
        """
        rows = len(cast(Sized, self.shard.dataset))
        if rows < self.shard.world_size:
            raise DatasetError(
                f"datasets.{self.shard.name} has {rows} rows for {self.shard.world_size} workers; "
                "every worker needs one. Give it more rows, or lower cfg.start_workers"
            )
        return rows

    def __len__(self) -> int:
        """Steps in one pass, the same on every worker."""
        return steps(self.rows, self.shard.world_size, self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        order = epoch_order(self.rows, self.shard.seed, self.epoch, shuffle=self.shard.shuffle)
        rows = rank_batches(order, self.shard.rank, self.shard.world_size, self.batch_size)
        self.epoch += 1
        options: dict[str, Any] = {}
        if self._processes:
            options = {"num_workers": self._processes, "prefetch_factor": max(1, self.shard.prefetch_batches)}
        on_cuda = self.shard.device.type == "cuda"
        batches = DataLoader(
            _Samples(self.shard), batch_sampler=rows, collate_fn=_Stacked(self.shard), pin_memory=on_cuda, **options
        )
        for number, batch in enumerate(batches, start=1):
            self.on_batch(self, number)
            yield {name: tensor.to(self.shard.device, non_blocking=on_cuda) for name, tensor in batch.items()}


def check(cls: type, key: str) -> None:
    """Refuse a dataset class that cannot be batched, before anything starts.

    Raises:
        DatasetError: it is iterable-style, or has no static `ray_map_batches`.
    """
    if issubclass(cls, IterableDataset):
        raise DatasetError(f"{key}: {cls.__name__} is an IterableDataset; give it __len__ and __getitem__ instead")
    if not callable(getattr(cls, "ray_map_batches", None)):
        raise DatasetError(
            f"{key}: {cls.__name__} has no ray_map_batches. Add a static method that stacks samples: "
            'ray_map_batches({"item": [sample, ...]}) -> {name: tensor (n, ...)}'
        )


def reading_processes(reader: str) -> int:
    """Processes that read one loader's samples: none for `auto`, N for `workers=N`.

    Raises:
        ConfigError: neither form.
    """
    if reader == "auto":
        return 0
    name, _, count = reader.partition("=")
    if name == "workers" and count.isdecimal():
        return int(count)
    raise ConfigError(f"cfg.loader is {reader!r}; write auto, or workers=N for N reading processes per worker")


def epoch_order(rows: int, seed: int, epoch: int, *, shuffle: bool) -> torch.Tensor:
    """The row numbers of one epoch, (rows,) int64: a permutation when shuffled, else 0 … rows - 1."""
    if not shuffle:
        return torch.arange(rows)
    mixed = int(
        np.random.SeedSequence([seed, epoch]).generate_state(1, np.uint64)[0] >> 1
    )  # no two (seed, epoch) alike
    return torch.randperm(rows, generator=torch.Generator().manual_seed(mixed))


def steps(rows: int, world_size: int, batch_size: int) -> int:
    """Steps per epoch that every rank takes."""
    if batch_size == 1:
        return rows // world_size
    return math.ceil(math.ceil(rows / world_size) / batch_size)


def rank_batches(order: torch.Tensor, rank: int, world_size: int, batch_size: int) -> list[list[int]]:
    """The row numbers of each step of one rank.

    Over all ranks every row comes once (see the module's first lines for `batch_size=1`), each rank has `steps(...)`
    batches, and no batch is empty or longer than `batch_size`.
    """
    count = steps(len(order), world_size, batch_size)
    mine = order[rank::world_size].tolist()
    batches = []
    start = 0
    for step in range(count):
        still_to_come = count - step - 1
        size = min(batch_size, len(mine) - start - still_to_come)  # leave one row for each later step
        batches.append(mine[start : start + size])
        start += size
    return batches


class _Samples(Dataset[Any]):
    """The user's dataset, with the index and the dataset named when a sample raises."""

    def __init__(self, shard: DatasetShard) -> None:
        self.dataset, self.name = shard.dataset, shard.name

    def __getitem__(self, index: int) -> Any:
        try:
            return self.dataset[index]
        except Exception as error:
            note = f"while reading sample {index} of datasets.{self.name}"
            vars(error).setdefault("__notes__", []).append(note)  # what add_note does, which Python 3.10 lacks
            raise


class _Stacked:
    """`ray_map_batches` as a collate function, its result checked. A class, since reading processes get it pickled."""

    def __init__(self, shard: DatasetShard) -> None:
        self.stack, self.name = cast(Any, shard.dataset).ray_map_batches, shard.name

    def __call__(self, samples: list[Any]) -> Batch:
        where = f"datasets.{self.name}: ray_map_batches gave"
        batch = self.stack({"item": samples})
        if not isinstance(batch, Mapping) or not batch:
            raise DatasetError(f"{where} {type(batch).__name__}; it must give {{name: tensor}}")
        tensors = {}
        for key, value in batch.items():
            try:
                tensors[key] = torch.as_tensor(value)
            except (TypeError, ValueError, RuntimeError) as error:
                raise DatasetError(f"{where} {key!r}, which is no tensor: {error}") from error
            if tensors[key].shape[:1] != (len(samples),):
                raise DatasetError(
                    f"{where} {key!r} of shape {tuple(tensors[key].shape)} for {len(samples)} samples; "
                    "its first dimension must be their number"
                )
        return tensors
