"""One loader type for every kind of dataset. Batches are on the device, their order depends only on seed, epoch and
world size, and every worker takes the same number of steps.

    a torch Dataset          read sample by sample, in the worker or in separate processes (`cfg.loader`), then stacked
    a prepared Dataset       memory-mapped columns, read a megabyte at a time
    an IterableDataset       every worker iterates over all of it and stacks its own samples
    a class with to_ray()    a ray.data.Dataset, whose blocks are assigned to the workers

`sampling` assigns rows to workers.
"""

import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Real
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.utils.data import IterableDataset

from mlx_runtime import companions
from mlx_runtime.data.batches import Batch, device_copies, row_lengths
from mlx_runtime.data.definitions import adopt_dataset, construction
from mlx_runtime.data.readers import IterableReader, MapReader, Reader, ReadingProcesses
from mlx_runtime.data.sampling import ShardPlan, Subset, WorkerPass, micro_batches, mix_seeds
from mlx_runtime.distributed.collectives import gather
from mlx_runtime.distributed.topology import Topology
from mlx_runtime.errors import ConfigError, DatasetError

if TYPE_CHECKING:
    from mlx_runtime.companions.prepared.store import PreparedSet
    from mlx_runtime.companions.ray.stream_reader import StreamReader

_EVALUATION = re.compile(r"(val|valid|validation|test|testing|eval|evaluation|dev|predict|prediction)s?(?![a-z])")


def trains(name: str) -> bool:
    """Return True if a dataset or pass of this name is for training.

    It is for evaluation if the first word of the name is `val`, `valid`, `validation`, `test`, `testing`, `eval`,
    `evaluation`, `dev`, `predict` or `prediction`, or its plural: `val_large` and `test2`, but not `values`.
    """
    return _EVALUATION.match(name) is None


def reading_processes(loader: str) -> int:
    """Return the number of reading processes per worker in `cfg.loader`: 0 for `auto`, or N for `workers=N`."""
    name, _, count = loader.partition("=")
    if loader == "auto":
        return 0
    if name == "workers" and count.isdecimal():
        return int(count)
    raise ConfigError(f"cfg.loader is {loader!r}; write auto, or workers=N for N reading processes per worker")


def unused_prefetch(loader: str, prefetch: int | None) -> str | None:
    """Return a line for the user if `cfg.prefetch_batches` has no effect."""
    if not prefetch or reading_processes(loader):
        return None
    return "cfg.prefetch_batches has no effect without reading processes; start them with cfg.loader=workers=N"


@dataclass(frozen=True)
class LoaderOptions:
    """Settings of all loaders of a run."""

    seed: int = 0  # determines the order, together with the epoch
    prefetch: int | None = None  # batches that each reading process reads ahead; None means 2
    processes: int = 0  # reading processes per worker; 0 reads in the worker itself
    accumulate: int = 1  # steps per update of a training dataset
    wanted_workers: int | None = None  # keep the global batch of this many workers; None keeps each worker's batch
    limit: int | None = None  # batches in a pass of `wanted_workers`; None means all
    repeats: bool = False  # the same rows in the same order in each pass


@dataclass(frozen=True)
class DatasetShard:
    """The shard of a dataset for one worker.

    Attributes:
        name: Name of the argument in `Datasets`, like `train`.
        group: The object that has the dataset as an attribute of this name, and constructs it on first use.
        topology: Topology of this worker.
        options: Settings of the run.
        prepared: Prepared dataset to read instead; None reads the dataset.
        stream: Reader of a stream of Ray Data; None for other datasets.
        subset: Part of the dataset to read; None reads all of it.
        node: Node of the dataset in conf.yaml; None if there is none.
        follow: Called with each new loader; returns the one to use. A session uses one per dataset, to count passes.
    """

    name: str
    group: Any
    topology: Topology
    options: LoaderOptions = LoaderOptions()
    prepared: "PreparedSet | None" = None
    stream: "StreamReader | None" = None
    subset: Subset | None = None
    node: Mapping[str, Any] | None = None
    follow: "Callable[[Loader], Loader]" = lambda loader: loader

    @cached_property
    def dataset(self) -> Any:
        """The dataset object, or the Hugging Face dataset that it returns."""
        dataset = getattr(self.group, self.name)
        with construction(self.node, self.options.seed):
            return adopt_dataset(dataset, self.name, self.node)

    @property
    def training(self) -> bool:
        """True if its steps are training steps, according to its boolean attribute `training`, by default its name."""
        value = self.attribute("training")
        return value if isinstance(value, bool) else trains(self.name)

    @property
    def shuffle(self) -> bool:
        """True if each epoch has a different order: the attribute `shuffle`, by default True for training datasets."""
        return not self.options.repeats and bool(self.attribute("shuffle", self.training))

    def attribute(self, name: str, default: Any = None) -> Any:
        """Return an attribute of the dataset, without constructing it if it is prepared."""
        if self.subset is not None and name in self.subset.attributes:
            return self.subset.attributes[name]
        if self.prepared is not None:
            return self.prepared.attributes.get(name, default)
        return getattr(self.dataset, name, default)

    @cached_property
    def lengths(self) -> torch.Tensor | None:
        """Length of each row, (rows,) int64, according to the attribute `group_by_length`; None without it."""
        lengths = self.attribute("group_by_length")
        if lengths is None:
            return None
        made = row_lengths(self.dataset, lengths, self.name)
        return made if self.subset is None else made[self.subset.rows]

    @property
    def row_counts(self) -> dict[str, float]:
        """Units per row, like `{"tokens": 64}`, from the attribute `row_counts`."""
        counts = self.attribute("row_counts") or {}
        if not isinstance(counts, Mapping) or not all(
            isinstance(unit, str) and isinstance(count, Real) for unit, count in counts.items()
        ):
            raise DatasetError(
                f"datasets.{self.name}: its attribute row_counts is {counts!r:.80}; write units per row, "
                'like {"tokens": 64}'
            )
        return {unit: float(count) for unit, count in counts.items()}

    def micro_batches(self, batch_size: int | None) -> tuple[int, int]:
        """Return the rows per worker and step, by default those of the dataset, and the steps per update."""
        size = batch_size if batch_size is not None else self.attribute("batch_size")
        if type(size) is not int or size < 1:
            cure = companions.part("hub.datasets").batch_size_cure(None if self.prepared else self.dataset)
            raise DatasetError(f"datasets.{self.name} has batch_size {size!r}; {cure}")
        wanted, workers = self.options.wanted_workers, self.topology.data_parallel_size
        if not self.training:
            return size, 1
        size, factor = (size, 1) if wanted in (None, workers) else micro_batches(size, wanted, workers)
        return size, factor * self.options.accumulate

    def reader(self) -> Reader:
        """Return the reader of the rows."""
        if self.prepared is not None:
            columns: Reader = companions.part("prepared.columns").PreparedReader(self.prepared, self.topology.device)
            return columns
        if self.stream is not None:
            return self.stream
        if hasattr(self.dataset, "to_reader"):
            own: Reader = self.dataset.to_reader()
            return own
        processes = ReadingProcesses(self.options.processes, pin_memory=self.topology.device.type == "cuda")
        reader = IterableReader if isinstance(self.dataset, IterableDataset) else MapReader
        return reader(self.dataset, self.name, processes)

    def iter_torch_batches(
        self,
        batch_size: int | None = None,
        *,
        drop_last: bool | None = None,
        prefetch_batches: int | None = None,
    ) -> "Loader":
        """Return the loader of this dataset: `{name: tensor (batch_size, ...)}` on this worker's device.

        Iterate over it once per epoch. Calling this again with the same arguments returns the same loader, as does
        `BaseModule.generate_loaders`; other arguments apply from the next pass.

        Values that are not tensors, like strings, stay on the host. The dataset is constructed at the first iteration
        or call of `len()`.

        Args:
            batch_size: Rows per worker and step; by default the dataset's attribute `batch_size`.
            drop_last: Drop a last batch that is smaller than the others; by default the dataset's attribute
                `drop_last`, or False.
            prefetch_batches: Batches that each reading process reads ahead; by default `cfg.prefetch_batches`.
        """
        return self.follow(Loader(self, batch_size, drop_last, prefetch_batches))


class DatasetShards:
    """The shards, by name in `Datasets`: `dataset_shards.train`, `dataset_shards.val`, …"""

    def __init__(self, shards: Mapping[str, DatasetShard]) -> None:
        self.__dict__.update(shards)

    def __getattr__(self, name: str) -> DatasetShard:
        raise AttributeError(f"no dataset {name!r} in Datasets; it has: {', '.join(self.__dict__)}")

    def __iter__(self) -> Iterator[DatasetShard]:
        return iter(self.__dict__.values())


class Loader:
    """Iterable of the batches of one shard, for one pass per epoch. Every worker must take part in each pass.

    Attributes:
        shard: Shard to read.
        asked: Arguments for batch size, `drop_last` and batches to read ahead; None for defaults.
        epoch: Number of the next pass, which determines the order; restored on restart.
        observer: The `Session` that acts at each step, called in the order of `_read`; None reads only.
        current: The pass that last advanced this loader, whose position is checkpointed; None before the first.
    """

    def __init__(
        self,
        shard: DatasetShard,
        batch_size: int | None = None,
        drop_last: bool | None = None,
        prefetch: int | None = None,
    ) -> None:
        self.shard = shard
        self.asked = (batch_size, drop_last, prefetch)
        self.epoch = 0
        self.observer: Any = None
        self.current: WorkerPass | None = None
        self._resumed: dict[str, Any] | None = None
        self.compared = False  # the rows of all workers

    @cached_property
    def batch_size(self) -> int:
        """Rows per worker and step.

        Raises:
            DatasetError: Neither the call nor the dataset specifies it.
        """
        return self.shard.micro_batches(self.asked[0])[0]

    @cached_property
    def accumulate(self) -> int:
        """Steps per update: as configured, and more with fewer workers, to keep the global batch."""
        return self.shard.micro_batches(self.asked[0])[1]

    @property
    def updates(self) -> int:
        """Number of updates in a whole pass: its steps, unless gradients are accumulated over several of them."""
        return -(-len(self) // self.accumulate)

    @property
    def prefetch(self) -> int | None:
        """Batches that each reading process reads ahead; None means 2."""
        return self.shard.options.prefetch if self.asked[2] is None else self.asked[2]

    @cached_property
    def reader(self) -> Reader:
        """Reader of the rows."""
        return self.shard.reader()

    @cached_property
    def _whole_pass(self) -> ShardPlan:
        """The plan of a pass from its first row.

        Raises:
            DatasetError: There are too few rows for all workers, or for one full batch per worker.
        """
        shard, size, drop_last = self.shard, self.batch_size, self.asked[1]
        if drop_last is None:
            drop_last = bool(shard.attribute("drop_last", False))
        workers, limit = shard.topology.data_parallel_size, shard.options.limit
        if limit is not None:  # each remaining worker reads the batches of lost ones, too
            limit *= max(1, self.accumulate // shard.options.accumulate) * size * workers
        chunk = max(1, self.reader.window_rows // size)
        total = self.reader.rows() if shard.subset is None else len(shard.subset.rows)
        group = workers * size if shard.lengths is not None else 0
        plan = ShardPlan(total, workers, size, drop_last, chunk, limit=limit, group=group)
        rows = f"datasets.{shard.name} has {plan.rows} rows"
        if plan.rows == 0:
            raise DatasetError(f"datasets.{shard.name} has no rows")
        if plan.rows < workers:
            raise DatasetError(f"{rows}, fewer than the {workers} workers. Give it more, or lower cfg.start_workers")
        if (shard.training or drop_last) and plan.rows < workers * (size - 1) + 1:
            fewer = " or cfg.start_workers" if workers > 1 else ""
            raise DatasetError(
                f"{rows}, too few for one full batch per worker: {workers} worker{'s' * (workers > 1)} with "
                f"batch_size {size}. Lower datasets.{shard.name}.batch_size{fewer}"
            )
        return plan

    @property
    def largest(self) -> int:
        """Number of rows in the largest batch of any worker."""
        return max(self._whole_pass.sizes(0))

    @property
    def rows(self) -> int:
        """Number of rows that a whole pass reads, over all workers."""
        return self._whole_pass.assigned

    def __len__(self) -> int:
        """Return the number of steps in a whole pass, the same on every worker."""
        return self._whole_pass.steps

    def __getitem__(self, name: Any) -> NoReturn:
        raise DatasetError(
            f"this is the loader of datasets.{self.shard.name} and not a batch, so it has no {name!r}. "
            "generate_loaders returns a list: write (loader,) = self.generate_loaders(dataset_shards), or "
            f"loader = self.generate_loaders(dataset_shards.{self.shard.name})"
        )

    def __iter__(self) -> Iterator[Batch]:
        if self.observer is not None:
            self.observer.loader_iterated(self)
        return self._read()

    def _read(self) -> Iterator[Batch]:
        observer = self.observer
        part = self._begin() if observer is None or observer.advances(self) else self._part(self._whole_pass)
        item = observer.pass_begins(self, part) if observer is not None else None
        device = self.shard.topology.device
        copies = device_copies(device) if device.type == "cuda" else None
        asked = time.perf_counter()
        try:
            for batch in self.reader.batches(part, self.prefetch):
                if copies is not None:
                    batch = copies(batch)
                part.given += 1
                part.waited_s += time.perf_counter() - asked
                if observer is not None:
                    observer.batch_given(item, batch)
                yield batch
                if observer is not None:
                    observer.step_finished(item, batch)
                asked = time.perf_counter()
        except GeneratorExit:  # left by `break`
            part.left = True
            if observer is not None:
                observer.pass_left(item)

    def compare_rows(self) -> None:
        """Check that all workers count the same rows, or they would deadlock. Every worker must call this.

        Raises:
            DatasetError: On rank 0, if the numbers differ.
        """
        self.compared = True
        counted = gather(self._whole_pass.rows) or []
        for rank, rows in enumerate(counted):
            if rows != counted[0]:
                raise DatasetError(
                    f"datasets.{self.shard.name} has {counted[0]} rows on rank 0, but {rows} on rank {rank}; "
                    "its __len__ must be the same on every worker"
                )

    def _begin(self) -> WorkerPass:
        """Advance to the next pass, or to the rest of an interrupted one."""
        shard, plan, skip = self.shard, self._whole_pass, 0
        state, self._resumed = self._resumed, None
        if state is not None and state["steps"]:
            before = ShardPlan.from_state(state)
            changed = None
            if state["rows"] != plan.rows:
                changed = f"has {plan.rows} rows, but had {state['rows']}"
            elif before.group and shard.lengths is None:
                changed = "has no group_by_length any more, but had it"
            elif shard.shuffle and state.get("streamed", self._streamed) != self._streamed:
                now, then = ("a stream", "prepared") if self._streamed else ("prepared (see --no-prepared)", "a stream")
                changed = f"is now {now} and has another order, but was {then}"
            if changed is not None:
                raise DatasetError(
                    f"datasets.{shard.name} {changed} when the run was interrupted in the middle of an epoch; "
                    "restore a checkpoint from the end of an epoch"
                )
            plan = replace(plan, read=before.read, limit=before.limit, group=before.group)
            if plan == before:
                skip = state["steps"]
            else:
                shuffles_shares = self.reader.window_rows > 1 and shard.shuffle
                seed = mix_seeds(shard.options.seed, self.epoch) if shuffles_shares else None
                plan = replace(plan, read=before.read_after(state["steps"], seed))
        self.current = self._part(plan, skip)
        self.epoch += 1
        return self.current

    def _part(self, plan: ShardPlan, skip: int = 0) -> WorkerPass:
        """Return this worker's part of a pass, in the order of the next epoch."""
        shard = self.shard
        epoch = 0 if shard.options.repeats else self.epoch
        subset = None if shard.subset is None else shard.subset.rows
        rank, seed = shard.topology.data_parallel_rank, shard.options.seed
        part = WorkerPass(plan, rank, skip, epoch, seed, shard.shuffle, subset=subset, lengths=shard.lengths)
        part.row_counts = shard.row_counts
        return part

    @property
    def _streamed(self) -> bool:
        """True if the dataset determines its order, which a prepared one does not know."""
        return self.shard.prepared is None and not isinstance(self.reader, MapReader)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the loader, even in the middle of a pass, as plain values."""
        if self._resumed is not None:
            return self._resumed | {"epoch": self.epoch}
        if self.current is None or not self.current.steps_left:
            return {"epoch": self.epoch, "steps": 0}
        state = self.current.plan.state_dict() | {"epoch": self.epoch - 1, "steps": self.current.taken}
        return state | {"streamed": self._streamed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a position: in the middle of a pass from its step, otherwise from the next epoch.

        With the same number of workers and batch size, each worker continues with the same batches; otherwise the
        remaining rows are reassigned.
        """
        self.epoch, self._resumed = state["epoch"], dict(state)
