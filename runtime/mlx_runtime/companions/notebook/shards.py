"""The datasets of a training function on one worker: its rows, as samples or batches, and its position in them."""

import contextlib
from collections.abc import Generator, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.data import Dataset, IterableDataset, default_collate, get_worker_info

from mlx_runtime.companions import part
from mlx_runtime.companions.notebook import inputs
from mlx_runtime.data.batches import AdoptedDataset, Batch
from mlx_runtime.data.loaders import DatasetShard, Loader, LoaderOptions, reading_processes
from mlx_runtime.data.sampling import Subset, WorkerPass
from mlx_runtime.errors import MlxError, UsageError

STRUCTURE, SAMPLE = "structure", "sample"
"""Keys of batches on their way through a loader, which expects dicts: of a structure of tensors, and of one sample."""


class Shards:
    """The shards of a run by name. Its state is the position in each dataset, which every worker has."""

    def __init__(self, files: Mapping[str, str], fold: tuple[int, ...]) -> None:
        self._files, self._fold = files, fold
        self._positions: dict[str, Any] = {}
        self._made: dict[str, FunctionShard] = {}
        self._datasets: dict[str, Any] = {}  # by their files

    def state_dict(self) -> dict[str, Any]:
        found = {name: shard.loader.state_dict() for name, shard in self._made.items() if shard.loader is not None}
        return self._positions | found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._positions = dict(state)

    def get(self, name: str | None, session: Any) -> "FunctionShard":
        """Return a shard, made when it is first asked for. Every worker must call this."""
        names = [*self._files, *(["val"] if self._fold else [])]
        if name is None and (len(names) == 1 or "train" in names):
            name = names[0] if len(names) == 1 else "train"
        if name not in names:
            given = "" if name is None else repr(name)
            raise MlxError(f"get_dataset_shard({given}): trainer.run was called with the datasets {', '.join(names)}")
        if name not in self._made:
            self._made[name] = FunctionShard(self._shard(name, session), self._positions.get(name), session)
        return self._made[name]

    def _shard(self, name: str, session: Any) -> DatasetShard:
        cfg, topology = session.context.cfg, session.context.topology
        options = LoaderOptions(
            seed=cfg.seed,
            prefetch=cfg.prefetch_batches,
            processes=reading_processes(cfg.loader),
            limit=cfg.debug.limit_batches,
        )
        root, file = session.context.folder.root, self._files["train" if self._fold else name]
        if file.startswith(inputs.STREAM):
            stored = f"{inputs.StoredStream.__module__}.{inputs.StoredStream.__name__}"
            nodes = {name: {"_target_": stored, "root": root, "file": file}}
            readers = part("ray.stream_reader").stream_readers(nodes, Path.cwd(), topology, cfg.seed)
            return DatasetShard(name, SimpleNamespace(**{name: None}), topology, options, stream=readers[name])
        if file not in self._datasets:
            self._datasets[file] = inputs.load_dataset(root, file)
        dataset = self._datasets[file]
        subsets: Mapping[str, Subset] = {}
        if self._fold:
            from mlx_runtime.data.folds import shuffled_folds

            number, folds = self._fold
            subsets = shuffled_folds(len(dataset), folds, cfg.seed)[number].subsets()
        group = SimpleNamespace(**{name: _Rows(dataset)})
        return DatasetShard(name, group, topology, options, subset=subsets.get(name))


class FunctionShard(IterableDataset[Any]):
    """The rows of a dataset that this worker reads: other workers read the other rows.

        for x, y in shard.iter_torch_batches(batch_size=32):     # tensors on the device of this worker
        for x, y in DataLoader(shard, batch_size=32):            # samples, as the dataset returns them

    Each pass is an epoch: a training dataset is shuffled differently in each, while one named `val` or `test` keeps its
    order. Every worker must take part in each pass, and takes the same number of steps. `save_checkpoint` saves the
    position, so that a resumed function reads the remaining rows of an interrupted pass, in the same order.

    Iterating over the shard yields samples, of which each worker reads the same number; `len()` is that number. So in
    each epoch, other rows, fewer than the number of workers, may be left out; batches contain all rows.
    """

    def __init__(self, shard: DatasetShard, position: Mapping[str, Any] | None, session: Any) -> None:
        self._shard, self._position, self.session = shard, position, session
        self._loaders: dict[tuple[Any, ...], ShardLoader] = {}  # by their arguments
        self.loader: ShardLoader | None = None  # whose pass has begun last

    def __len__(self) -> int:
        return len(self._samples())

    def __iter__(self) -> Iterator[Any]:
        if get_worker_info() is not None:
            raise ReadElsewhereError
        return iter(self._samples())

    def iter_torch_batches(
        self, batch_size: int, *, drop_last: bool = False, prefetch_batches: int | None = None
    ) -> "ShardLoader":
        """Return an iterable of batches on the device of this worker, for one pass per epoch; `len()` is in steps.

        Samples are stacked by the dataset's method `collate`, if it has one, or as a `DataLoader` does. The last
        batches may be smaller, but no row is left out.

        Args:
            batch_size: rows per worker and step.
            drop_last: leave out the last rows if they do not fill a batch of every worker.
            prefetch_batches: batches that each reading process reads ahead; by default those of
                `Trainer(prefetch_batches=...)`.

        Raises:
            UsageError: `batch_size` is not a number of rows.
        """
        if type(batch_size) is not int or batch_size < 1:
            raise UsageError(f"iter_torch_batches(batch_size={batch_size!r:.40}) needs a number of rows, 1 or more")
        return self._loader(self._shard, (batch_size, drop_last, prefetch_batches))

    def begin(self, loader: "ShardLoader") -> None:
        """Note that a pass of a loader begins: the next one of this dataset, or the rest of an interrupted one."""
        if self.loader is not None:
            loader.epoch = self.loader.epoch
        elif self._position is not None:
            loader.load_state_dict(self._position)
        self.loader = loader

    def _samples(self) -> "ShardLoader":
        shard = self._shard
        if shard.stream is None:
            group = SimpleNamespace(**{shard.name: _Rows(shard.dataset.source, as_samples=True)})
            shard = replace(shard, group=group)
        return self._loader(shard, (1, True, None), samples=True)

    def _loader(self, shard: DatasetShard, asked: tuple[Any, ...], *, samples: bool = False) -> "ShardLoader":
        key = *asked, samples
        if key not in self._loaders:
            self._loaders[key] = ShardLoader(self, shard, asked, samples=samples)
        return self._loaders[key]


class ReadElsewhereError(UsageError):
    """A `DataLoader` reads a shard in its own processes, which would all read the same rows."""

    def __init__(self, _: str = "") -> None:  # a DataLoader would add the traceback of its process
        super().__init__(
            "a shard is read in the process of its worker, so leave out num_workers of the DataLoader, or use "
            'Trainer(loader="workers=2") and get_dataset_shard().iter_torch_batches(batch_size=32)'
        )


class ShardLoader(Loader):
    """A loader whose batches are like the samples of the dataset: tensors, tuples or dicts of tensors."""

    def __init__(self, owner: FunctionShard, shard: DatasetShard, asked: tuple[Any, ...], *, samples: bool) -> None:
        super().__init__(shard, *asked)
        self._owner, self._samples = owner, samples

    def _begin(self) -> WorkerPass:
        self._owner.begin(self)
        part = super()._begin()
        self._owner.session.checkpoints.resume(self.shard.name)  # restores random numbers before the first pass
        return part

    def _read(self) -> Iterator[Any]:
        with contextlib.closing(cast("Generator[Batch]", super()._read())) as batches:
            for batch in batches:
                self._owner.session.beat()
                yield self._decode(batch)
                self._owner.session.beat()

    def _decode(self, batch: Batch) -> Any:
        if self.shard.stream is not None:
            return {name: column[0] for name, column in batch.items()} if self._samples else batch
        if self._samples:
            return batch[SAMPLE][0][0]
        return tree_map(lambda number: batch[str(number)], batch[STRUCTURE]["numbers"])


class _Rows(AdoptedDataset, Dataset[Any]):
    """A dataset whose samples may be anything, for loaders of batches that are dicts."""

    def __init__(self, source: Any, *, as_samples: bool = False) -> None:
        self.owner = self.source = source
        self._as_samples = as_samples

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, row: int) -> Any:
        return self.source[row]

    def __getitems__(self, rows: list[int]) -> list[Any]:
        together = getattr(self.source, "__getitems__", None)
        return together(rows) if together is not None else [self.source[row] for row in rows]

    def __getattr__(self, name: str) -> Any:
        if name in ("shuffle", "training", "set_epoch"):
            return getattr(self.source, name)
        raise AttributeError(name)

    def collate(self, samples: list[Any]) -> Batch:
        if self._as_samples:
            return {SAMPLE: [(sample,) for sample in samples]}
        batch = getattr(self.source, "collate", default_collate)(samples)
        leaves, structure = tree_flatten(batch, is_leaf=_is_text)
        numbers = tree_unflatten(range(len(leaves)), structure)  # plain, for processes that read
        return {str(number): leaf for number, leaf in enumerate(leaves)} | {STRUCTURE: {"numbers": numbers}}


def _is_text(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)
