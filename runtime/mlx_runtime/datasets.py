"""One loader type for every kind of dataset: batches on the device, in an order that only the seed, the epoch and the
world size decide, the same number of steps on every worker.

    a torch Dataset          read row by row in the worker, beside it, or on spare CPUs (`cfg.loader`), then stacked
    the same, prepared       columns mapped into memory, read a megabyte at a time
    an IterableDataset       every worker runs through it and stacks its own samples
    a class with to_ray()    a ray.data.Dataset, whose blocks are dealt to the workers

What is dealt to whom is in `sampling`.
"""

import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal, NoReturn

import torch
from torch.utils.data import IterableDataset

from mlx_runtime import declarations  # noqa: F401 - from here on, defaults in src declare datasets and load none
from mlx_runtime.errors import ConfigError, DatasetError
from mlx_runtime.parallel import Worker
from mlx_runtime.prepared import ColumnReader, PreparedSet, Store
from mlx_runtime.reading import Batch, MapReader, StreamReader, move_tensors, row_batches, rows_of
from mlx_runtime.sampling import Plan, epoch_order, micro_batches, mixed
from mlx_runtime.settings import Settings
from mlx_runtime.streaming import WINDOW_ROWS, DealtReader, RemoteReaders

EVALUATION = re.compile(r"(val|valid|validation|test|testing|eval|evaluation|dev|predict|prediction)s?(?![a-z])")
"""The first word in the names of sets that are read in order and not trained on: `val`, `val_large`, `test2`."""


def trains(name: str) -> bool:
    """Whether the name of a dataset or a stage says that it is trained on."""
    return EVALUATION.match(name) is None


@dataclass(frozen=True)
class Reading:
    """Who reads samples that are not prepared: `cfg.loader`.

    Attributes:
        by: this process, processes beside it, or actors of Ray.
        count: how many of them per worker.
    """

    by: Literal["worker", "processes", "ray"]
    count: int = 0

    @classmethod
    def parsed(cls, text: str, spare_cpus: float = 0) -> "Reading":
        """From `auto`, `workers=N`, `ray` or `ray=N`.

        Args:
            text: as in conf.yaml.
            spare_cpus: of the cluster, per worker; all of them read for a plain `ray`.

        Raises:
            ConfigError: none of these forms.
        """
        name, _, count = text.partition("=")
        if text == "auto":
            return cls("worker")
        if text == "ray":
            return cls("ray", int(spare_cpus))
        if name in ("workers", "ray") and count.isdecimal() and (int(count) or name == "workers"):
            return cls("ray" if name == "ray" else "processes" if int(count) else "worker", int(count))
        raise ConfigError(
            f"cfg.loader is {text!r}; write auto, workers=N for N reading processes per worker, "
            "or ray for processes on spare CPUs of the cluster"
        )


@dataclass(frozen=True)
class DatasetShard:
    """One dataset as one worker sees it.

    Attributes:
        name: of the argument in `Datasets`, like `train`.
        group: the object that holds the dataset under this name, and makes it when it is first read.
        worker: rank, world size and device.
        seed: decides the order together with the epoch.
        reading: who reads samples.
        prefetch_batches: `cfg.prefetch_batches`.
        prepared: to read instead of the dataset.
        dealt: reads a stream of Ray Data.
        remote: reads samples on spare CPUs.
        wanted_workers: of whom this group, when it is smaller or larger, keeps the global batch; None keeps that of
            each worker.
        accumulate: `cfg.accumulate_grad_batches`.
        limit: batches of a pass, of the wanted group; None means all.
        repeats: each pass reads the same rows in the same order, whatever the dataset says.
        watched: returns the loader to use for a new one: the run knows one per dataset, which counts its passes.
    """

    name: str
    group: Any
    worker: Worker
    seed: int
    reading: Reading = Reading("worker")
    prefetch_batches: int = 2
    prepared: PreparedSet | None = None
    dealt: DealtReader | None = None
    remote: RemoteReaders | None = None
    wanted_workers: int | None = None
    accumulate: int = 1
    limit: int | None = None
    repeats: bool = False
    watched: "Callable[[Loader], Loader]" = lambda loader: loader

    @property
    def dataset(self) -> Any:
        """The dataset object."""
        return getattr(self.group, self.name)

    @property
    def training(self) -> bool:
        """Whether its steps count as training steps: by its name, unless the dataset has an attribute `training`."""
        said = self.attribute("training")
        return said if isinstance(said, bool) else trains(self.name)

    @property
    def shuffle(self) -> bool:
        """Training sets are shuffled globally each epoch; a dataset's own `shuffle` attribute decides otherwise."""
        return not self.repeats and bool(self.attribute("shuffle", self.training))

    def attribute(self, name: str, default: Any = None) -> Any:
        """What the dataset says about its loading, without making a dataset that is prepared."""
        if self.prepared is not None:
            return self.prepared.attributes.get(name, default)
        return getattr(self.dataset, name, default)

    def iter_torch_batches(
        self, batch_size: int | None = None, *, drop_last: bool | None = None, **unsupported: Any
    ) -> "Loader":
        """Return the loader of this dataset: `{name: tensor (batch_size, ...)}` on this worker's device.

        Iterate it once per epoch. Calling this again with the same arguments returns the same loader, which
        `BaseModule.generate_loaders` also returns; other arguments apply from the next pass on.

        What is not a tensor, like a list of strings, stays on the host. The dataset is made when the loader is first
        read or asked for its length.

        Args:
            batch_size: rows per worker and step; the dataset's own `batch_size` by default.
            drop_last: leave out a last batch that is smaller than the others; by default what the dataset's attribute
                `drop_last` says, else False.
            unsupported: further arguments that Ray Data's method of this name takes.

        Raises:
            DatasetError: an argument that this loader does not support.
        """
        if unsupported:
            name = next(iter(unsupported))
            raise DatasetError(f"iter_torch_batches({name}=...) is not supported; {_INSTEAD.get(name, _SUPPORTED)}")
        return self.watched(Loader(self, batch_size, drop_last))


_SUPPORTED = "it takes batch_size and drop_last"

_INSTEAD = {
    "collate_fn": "write it as ray_map_batches of the dataset",
    "device": "batches come on the worker's device",
    "dtypes": "convert in ray_map_batches of the dataset",
    "local_shuffle_buffer_size": "each epoch shuffles all of a training set; its attribute `shuffle` decides otherwise",
    "local_shuffle_seed": "cfg.seed decides the order",
    "pin_memory": "batches for a GPU are pinned anyway",
    "prefetch_batches": "set cfg.prefetch_batches",
}
"""What to do instead of giving an argument of Ray Data's method."""


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
        asked: batch size and `drop_last`, None for what the dataset says.
        epoch: number of the next pass, which decides the order; a restart sets it.
        on_start: called with the loader when a pass begins, before its first batch is read.
        on_batch: called before each batch with (loader, number of the batch in this pass from 1, batches in it).
        on_step: called with the loader when the loop has finished with a batch and asks for the next.
        waited_s: seconds that this pass has waited for data.
        seconds: that this pass takes so far.
    """

    def __init__(self, shard: DatasetShard, batch_size: int | None = None, drop_last: bool | None = None) -> None:
        self.shard = shard
        self.asked = (batch_size, drop_last)
        self.epoch = 0
        self.on_start: Callable[[Loader], None] = lambda loader: None
        self.on_batch: Callable[[Loader, int, int], None] = lambda loader, number, steps: None
        self.on_step: Callable[[Loader], None] = lambda loader: None
        self.waited_s = 0.0
        self._started = 0.0
        self._plan: Plan | None = None
        self._taken = self._skipped = 0
        self._resumed: Mapping[str, Any] | None = None

    @property
    def batch_size(self) -> int:
        """Rows per worker and step.

        Raises:
            DatasetError: neither the call nor the dataset gives one.
        """
        return self._micro[0]

    @property
    def accumulate(self) -> int:
        """Steps whose gradients make one update: as the config says, and more in a group smaller than it should be."""
        return self._micro[1] * (self.shard.accumulate if self.shard.training else 1)

    @cached_property
    def _micro(self) -> tuple[int, int]:
        size = self.asked[0] if self.asked[0] is not None else self.shard.attribute("batch_size")
        if type(size) is not int or size < 1:
            cls = "its class" if self.shard.prepared else type(self.shard.dataset).__name__
            raise DatasetError(
                f"datasets.{self.shard.name} has batch_size {size!r}; "
                f"set self.batch_size to a number of rows from 1 in {cls}"
            )
        wanted, workers = self.shard.wanted_workers, self.shard.worker.world_size
        if wanted is None or wanted == workers or not self.shard.training:
            return size, 1
        return micro_batches(size, wanted, workers)

    @property
    def rows(self) -> int:
        """Rows that a pass has to read, over all workers.

        Raises:
            DatasetError: the dataset does not say.
        """
        return self._all_rows if self._most is None else min(self._all_rows, self._most)

    @property
    def _most(self) -> int | None:
        """Rows of a pass that is limited."""
        limit = self.shard.limit
        return None if limit is None else limit * self.accumulate * self.batch_size * self.shard.worker.world_size

    @cached_property
    def _all_rows(self) -> int:
        if self.shard.prepared is not None:
            return self.shard.prepared.manifest.rows
        if self.shard.dealt is not None:
            return self.shard.dealt.rows()
        return rows_of(self.shard.dataset, self.shard.name)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._started

    @property
    def rows_read(self) -> int:
        """Rows that all workers have read in this pass, once its last batch is given."""
        before = self._skipped * self.batch_size * self.shard.worker.world_size
        return self._plan.dealt - before if self._plan else 0

    @property
    def given(self) -> int:
        """Batches that this loader has given in this pass; those before an interruption do not count."""
        return self._taken - self._skipped

    @property
    def steps_left(self) -> int:
        """Of the pass under way; 0 between two passes."""
        return self._plan.steps - self._taken if self._plan else 0

    @property
    def advice(self) -> str | None:
        """How rows could be read faster, or None when there is no better way."""
        shard = self.shard
        if shard.prepared is not None:
            return None
        ahead = "raise cfg.prefetch_batches"
        if shard.dealt is not None:
            return "prepare it once with --prepare-batches"
        if isinstance(shard.dataset, IterableDataset):
            return "read it beside the worker with cfg.loader=workers=1" if not self._options["processes"] else ahead
        if getattr(shard.dataset, "prepare", True):
            return "prepare it once with --prepare-batches" + (f", or {ahead}" if shard.reading.count else "")
        return ahead if shard.reading.count else "spread it with cfg.loader=workers=2"

    def __len__(self) -> int:
        """Steps in a whole pass, the same on every worker."""
        return self._whole_pass().steps

    def __getitem__(self, name: Any) -> NoReturn:
        raise DatasetError(
            f"this is the loader of datasets.{self.shard.name} and not a batch, so it has no {name!r}. "
            "generate_loaders returns a list: write (loader,) = self.generate_loaders(dataset_shards), or "
            f"loader = self.generate_loaders(dataset_shards.{self.shard.name})"
        )

    def __iter__(self) -> Iterator[Batch]:
        plan, skip, epoch = self._begin()
        self._plan, self._taken, self._skipped, self.epoch = plan, skip, skip, epoch + 1
        self.waited_s, self._started = 0.0, time.perf_counter()
        self.on_start(self)
        on_cuda = self.shard.worker.device.type == "cuda"
        asked = time.perf_counter()
        try:
            for batch in self._batches(plan, skip, epoch):
                if on_cuda:
                    device = self.shard.worker.device
                    batch = move_tensors(batch, partial(torch.Tensor.to, device=device, non_blocking=True))
                self._taken += 1
                self.waited_s += time.perf_counter() - asked
                self.on_batch(self, self._taken, plan.steps)
                yield batch
                self.on_step(self)
                asked = time.perf_counter()
        except GeneratorExit:  # the loop was left with `break`: this pass is over
            self._taken = plan.steps

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands, also in the middle of a pass; plain values."""
        if self._resumed is not None:
            return dict(self._resumed)
        if self._plan is None or self._taken == self._plan.steps:
            return {"epoch": self.epoch, "steps": 0}
        names = ("rows", "world_size", "batch_size", "drop_last", "chunk", "most")
        plan = {name: getattr(self._plan, name) for name in names}
        return plan | {"epoch": self.epoch - 1, "steps": self._taken, "read": [list(part) for part in self._plan.read]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another loader stood: the next pass reads what that one had not read of its epoch.

        With as many workers and the same batch size, each worker goes on with the very batches it would have read;
        otherwise the rows that are left are dealt anew.
        """
        self.epoch = state["epoch"]
        self._resumed = state if state["steps"] else None
        self._plan = None

    def _begin(self) -> tuple[Plan, int, int]:
        """Of the next pass: its plan, steps of it that were taken already, and its epoch."""
        plan = self._whole_pass()
        state, self._resumed = self._resumed, None
        if state is None:
            return plan, 0, self.epoch
        if state["rows"] != plan.rows:
            raise DatasetError(
                f"datasets.{self.shard.name} has {plan.rows} rows, and had {state['rows']} when the run was "
                "interrupted in the middle of an epoch; restore a checkpoint from the end of one"
            )
        fields = {name: state[name] for name in ("rows", "world_size", "batch_size", "drop_last", "chunk")}
        most = state.get("most")  # the limit of this pass when it began
        before = Plan(**fields, read=tuple((start, stop) for start, stop in state["read"]), most=most)
        shuffles_turns = self.shard.prepared is None and self.shard.dealt is not None and self.shard.shuffle
        seed = mixed(self.shard.seed, self.epoch) if shuffles_turns else None
        same = (plan.world_size, plan.batch_size, plan.drop_last, plan.chunk)
        if (before.world_size, before.batch_size, before.drop_last, before.chunk) == same:
            return before, state["steps"], self.epoch
        return Plan(plan.rows, *same, read=before.read_after(state["steps"], seed), most=most), 0, self.epoch

    def _whole_pass(self) -> Plan:
        """How a pass is dealt.

        Raises:
            DatasetError: there are not enough rows for every worker, or for one batch of each.
        """
        shard, size = self.shard, self.batch_size
        chunk = max(1, WINDOW_ROWS // size) if shard.dealt is not None else 1
        drop_last = bool(shard.attribute("drop_last", False)) if self.asked[1] is None else self.asked[1]
        plan = Plan(self._all_rows, shard.worker.world_size, size, drop_last, chunk, most=self._most)
        if plan.rows == 0:
            raise DatasetError(f"datasets.{shard.name} has no rows")
        fewer = " or cfg.start_workers" if plan.world_size > 1 else ""
        if plan.rows < plan.world_size:
            raise DatasetError(
                f"datasets.{shard.name} has {plan.rows} rows for {plan.world_size} workers; "
                "every worker needs one. Give it more rows, or lower cfg.start_workers"
            )
        if (shard.training or drop_last) and plan.rows < plan.world_size * (size - 1) + 1:
            raise DatasetError(
                f"datasets.{shard.name} has batch_size {size}, and {plan.rows} rows for {plan.world_size} workers: "
                f"no worker has so many. Lower datasets.{shard.name}.batch_size{fewer}"
            )
        return plan

    def _batches(self, plan: Plan, skip: int, epoch: int) -> Iterator[Batch]:
        """What is left of a pass, from whatever reads it."""
        shard, rank = self.shard, self.shard.worker.rank
        epoch = 0 if shard.repeats else epoch
        seed = mixed(shard.seed, epoch)
        if shard.prepared is None and shard.dealt is not None:
            return shard.dealt.batches(plan, rank, skip, seed=seed, shuffle=shard.shuffle)
        if shard.prepared is None and isinstance(shard.dataset, IterableDataset):
            return self._stream.batches(plan, rank, skip, epoch, seed)
        order = epoch_order(plan.rows, shard.seed, epoch, shuffle=shard.shuffle)
        sizes = plan.sizes(rank)
        rows = order[plan.places(rank)[sum(sizes[:skip]) :]]
        if shard.prepared is not None:
            return self._columns.batches(rows, sizes[skip:])
        if shard.remote is not None:
            return shard.remote.batches(shard.name, row_batches(rows, sizes[skip:], seed))
        return self._map.batches(rows, sizes[skip:], seed)

    @cached_property
    def _columns(self) -> ColumnReader:
        prepared = self.shard.prepared
        assert prepared is not None
        cache = Settings.read().cache / "prepared"
        columns = Store(prepared.root).columns(prepared.manifest, cache, max_bytes=prepared.cache_bytes)
        return ColumnReader(columns, self.shard.worker.device)

    @cached_property
    def _stream(self) -> StreamReader:
        return StreamReader(self.shard.dataset, self.shard.name, **self._options)

    @cached_property
    def _map(self) -> MapReader:
        return MapReader(self.shard.dataset, self.shard.name, **self._options)

    @property
    def _options(self) -> dict[str, Any]:
        shard = self.shard
        processes = shard.reading.count if shard.reading.by == "processes" else 0
        on_cuda = shard.worker.device.type == "cuda"
        return {"processes": processes, "prefetch_batches": shard.prefetch_batches, "pin_memory": on_cuda}


def check(cls: type, key: str) -> None:
    """Refuse a dataset class that cannot be batched, before anything starts.

    Raises:
        DatasetError: it has neither `ray_map_batches` nor `to_ray`, or is a stream without a length.
    """
    if callable(getattr(cls, "to_ray", None)):
        return
    if not callable(getattr(cls, "ray_map_batches", None)):
        raise DatasetError(
            f"{key}: {cls.__name__} has no ray_map_batches. Add a static method that stacks samples: "
            'ray_map_batches({"item": [sample, ...]}) -> {name: tensor (n, ...)}'
        )
    if issubclass(cls, IterableDataset) and "__len__" not in dir(cls):
        raise DatasetError(
            f"{key}: {cls.__name__} is an IterableDataset without __len__; "
            "every worker must know how many samples one pass has"
        )
