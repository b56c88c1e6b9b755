"""Rows that other processes of the cluster read: streams of Ray Data, and samples from spare CPUs.

A dataset with `to_ray()` gives a `ray.data.Dataset`, of any size. One dealer runs it, in order, and deals references to
its blocks; a worker fetches only the blocks that hold its own rows, from wherever they are.

`cfg.loader=ray` reads a map-style dataset in actors on spare CPUs of the cluster. They stack what they read, so that no
single sample travels, and hand over batches in the order they are asked for.
"""

import collections
import inspect
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.data
import ray.data.block
import torch

from mlx_runtime.errors import DatasetError, MlxError, WorkerLostError, first_line
from mlx_runtime.loading import build
from mlx_runtime.parallel import lost_peer, seeded
from mlx_runtime.reading import Batch, Rows, Samples, Stacked, as_numpy, dtype_name
from mlx_runtime.sampling import Plan, shuffled_turn

WINDOW_ROWS = 1024
"""Rows of a stream that a worker is dealt at once, and that are shuffled among each other for training."""

MAX_SEED = 2**31
"""Ray Data wants seeds of 32 bits and counts on from them."""

Share = list[tuple[Any, int, int]]
"""Rows for one worker: (reference to a block, first row, row after the last)."""


def make_dataset(node: Mapping[str, Any], name: str, seed: int, project: Path) -> Any:
    """The dataset that a node of conf.yaml describes, in any process of the cluster."""
    if project.is_dir() and str(project) not in sys.path:
        sys.path.insert(0, str(project))
    with seeded(seed):
        return build(node, f"datasets.{name}")


def stream_of(dataset: Any, name: str, seed: int | None = None) -> Any:
    """What `to_ray` gives, set to keep its order.

    Args:
        dataset: that has `to_ray`, with an argument `seed` if it can shuffle.
        name: in `Datasets`.
        seed: for it, None for the order that the data is stored in.

    Raises:
        DatasetError: it gives anything else.
    """
    keep_order()
    takes_seed = "seed" in inspect.signature(dataset.to_ray).parameters
    stream = dataset.to_ray(seed=seed) if takes_seed else dataset.to_ray()
    if isinstance(stream, ray.data.Dataset):
        keep_order(stream.context)  # one that was made before has settings of its own
    else:
        given = f"{type(dataset).__name__}.to_ray() gave {type(stream).__name__}"
        raise DatasetError(f"datasets.{name}: {given}; it must give a ray.data.Dataset")
    return stream


def keep_order(context: Any = None) -> None:
    """Have Ray Data keep the order of blocks and raise what user code raised: in this process, or for one dataset."""
    context = context or ray.data.DataContext.get_current()
    context.execution_options.preserve_order = True
    context.raise_original_map_exception = True


def rows_of_stream(dataset: Any, stream: Any) -> int:
    """Rows in one pass: what the dataset's `__len__` says, or else what Ray Data counts."""
    return len(dataset) if hasattr(dataset, "__len__") else int(stream.count())


def blocks_of(stream: Any, name: str) -> Iterator[tuple[Any, int, int]]:
    """References to the blocks of a stream in order, each with its first row and the row after its last.

    Raises:
        MlxError: reading or mapping failed.
    """
    try:
        for bundle in stream.iter_internal_ref_bundles():
            slices = bundle.slices or [None] * len(bundle.block_refs)
            for reference, metadata, part in zip(bundle.block_refs, bundle.metadata, slices, strict=True):
                yield reference, *((part.start_offset, part.end_offset) if part else (0, metadata.num_rows))
    except MlxError:
        raise
    except Exception as error:  # of Ray, or what user code raised
        raise told(error, f"datasets.{name} cannot be read") from error


def told(error: BaseException, what: str) -> MlxError:
    """What user code raised in another process, or that this process is gone, as an error of ours."""
    if lost_peer(error):
        return WorkerLostError(f"{what}: {first_line(error)}")
    cause = error
    while not isinstance(cause, MlxError):
        inner = getattr(cause, "cause", None) or cause.__cause__
        if not isinstance(inner, BaseException):
            break
        cause = inner
    if isinstance(cause, MlxError):
        return cause
    notes = "".join(f" ({text})" for text in getattr(cause, "__notes__", []))
    return DatasetError(f"{what}: {type(cause).__name__}: {first_line(cause)}{notes}")


def columns_of(block: Any, start: int, stop: int, name: str) -> Batch:
    """Rows of a block of Ray Data as `{name: tensor (rows, ...)}`.

    Raises:
        DatasetError: a column is not numbers of one shape.
    """
    accessor = ray.data.block.BlockAccessor.for_block(block)
    arrays = ray.data.block.BlockAccessor.for_block(accessor.slice(start, stop)).to_numpy()
    columns = {}
    for key, array in arrays.items():
        try:
            columns[key] = torch.from_numpy(np.array(array))  # a copy: blocks are shared and read-only
        except TypeError as error:
            raise DatasetError(
                f"datasets.{name}: column {key!r} is {array.dtype}, not numbers of one shape; "
                "turn it into numbers, or drop it, in to_ray()"
            ) from error
    return columns


class Dealer:
    """Runs a stream and deals its rows to the workers, as their plans say. Used as an actor, or in one process.

    Args:
        node, name: of the dataset in conf.yaml.
        seed: `cfg.seed`.
        project: folder of the experiment.
    """

    def __init__(self, node: Mapping[str, Any], name: str, seed: int, project: Path) -> None:
        self._name = name
        self._place = (node, name, seed, project)  # made later: an actor whose constructor raises dies noisily
        self._passes: dict[int, _Pass] = {}
        self._ended = 0
        self._lock = threading.Lock()

    @cached_property
    def _dataset(self) -> Any:
        return make_dataset(*self._place)

    def rows(self) -> int:
        """Rows in one pass.

        Raises:
            DatasetError: the dataset cannot be made or counted.
        """
        with self._lock:
            return self._counted

    @cached_property
    def _counted(self) -> int:
        try:
            return rows_of_stream(self._dataset, stream_of(self._dataset, self._name))
        except MlxError:
            raise
        except Exception as error:  # of the user's code
            raise told(error, f"datasets.{self._name} cannot be read") from error

    def take(self, number: int, plan: Plan, rank: int, seed: int | None) -> Share | None:
        """The next rows of one worker in a pass, None after the last.

        Args:
            number: of the pass, rising.
            plan: of the pass; every worker gives the same.
            rank: of the worker.
            seed: for `to_ray`.
        """
        with self._lock:
            if number <= self._ended:
                return None  # asked ahead for a pass that all have left since
            if number not in self._passes:
                stream = stream_of(self._dataset, self._name, seed)
                self._passes[number] = _Pass(blocks_of(stream, self._name), plan, self._name)
            for earlier in [other for other in self._passes if other < number]:
                self._passes[earlier].left.add(rank)
                if len(self._passes[earlier].left) == plan.world_size:
                    self._passes.pop(earlier).close()
                    self._ended = max(self._ended, earlier)
            this = self._passes[number]
        return this.take(rank)

    def close(self) -> None:
        """Stop what still reads the stream, while Ray runs."""
        with self._lock:
            for number in list(self._passes):
                self._passes.pop(number).close()
                self._ended = max(self._ended, number)


class _Pass:
    """One pass over a stream: who gets what, and what waits to be taken.

    Attributes:
        left: ranks that will not come back.
    """

    def __init__(self, blocks: Iterator[tuple[Any, int, int]], plan: Plan, name: str) -> None:
        self.left: set[int] = set()
        self._blocks, self._plan, self._name = blocks, plan, name
        self._turns = plan.deal()
        self._waiting: dict[int, collections.deque[Share]] = {
            rank: collections.deque() for rank in range(plan.world_size)
        }
        self._block: tuple[Any, int, int] = (None, 0, 0)
        self._place = 0
        self._ended = False
        self._error: Exception | None = None
        self._lock = threading.Lock()

    def take(self, rank: int) -> Share | None:
        with self._lock:
            try:
                while not self._waiting[rank] and not self._ended and self._error is None:
                    self._deal()
            except Exception as error:
                self._error = error
            if self._error is not None:
                raise self._error  # to every worker, for the same reason
            return self._waiting[rank].popleft() if self._waiting[rank] else None

    def close(self) -> None:
        with self._lock:
            self._end()

    def _end(self) -> None:
        """Stop what reads the stream."""
        self._ended = True
        close = getattr(self._blocks, "close", None)
        if close is not None:
            close()

    def _deal(self) -> None:
        turn = next(self._turns, None)
        if turn is None:
            _, start, stop = self._block
            plan = self._plan
            to_the_end = plan.left and plan.dealt == plan.left and plan.unread[-1][1] == plan.rows
            more = to_the_end and (start < stop or next(self._blocks, None) is not None)
            self._end()
            if more:
                raise DatasetError(
                    f"datasets.{self._name}: to_ray() gives more rows than the {self._plan.rows} that __len__ says"
                )
            return
        rank, count = turn
        share: Share = []
        while count:
            reference, start, stop = self._block
            if start == stop:
                found = next(self._blocks, None)
                if found is None:
                    raise DatasetError(
                        f"datasets.{self._name}: to_ray() gave {self._place} rows, "
                        f"and is said to have {self._plan.rows}"
                    )
                self._block = found
                continue
            taken = min(count, stop - start)
            share.append((reference, start, start + taken))
            self._block = (reference, start + taken, stop)
            self._place, count = self._place + taken, count - taken
        if rank is not None:
            self._waiting[rank].append(share)


def start_dealer(node: Mapping[str, Any], name: str, seed: int, project: Path, world_size: int) -> Any:
    """A dealer in a process of its own on this node."""
    here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
        ray.get_runtime_context().get_node_id(), soft=True
    )
    options = {"num_cpus": 0, "max_concurrency": world_size + 1, "scheduling_strategy": here}
    return ray.remote(Dealer).options(**options).remote(node, name, seed, project)


class DealtReader:
    """Reads what a dealer deals to this worker. One for all loaders of a set, so that its passes have one count.

    Args:
        dealer: a `Dealer`, or an actor that is one.
        name: of the dataset.
    """

    def __init__(self, dealer: Any, name: str) -> None:
        self._dealer, self._name = dealer, name
        self._passes = 0

    def rows(self) -> int:
        if isinstance(self._dealer, Dealer):
            return self._dealer.rows()
        try:
            return int(ray.get(self._dealer.rows.remote()))
        except ray.exceptions.RayError as error:
            raise told(error, f"datasets.{self._name} cannot be read") from error

    def close(self) -> None:
        """Let go of a dealer in this process; one that is an actor ends with the workers."""
        if isinstance(self._dealer, Dealer):
            self._dealer.close()

    def batches(self, plan: Plan, rank: int, skip: int, *, seed: int, shuffle: bool) -> Iterator[Batch]:
        """One batch after the other.

        Args:
            plan: who reads what.
            rank: of this worker.
            skip: steps of the plan that were taken already.
            seed: of this pass.
            shuffle: rows of each share among each other.
        """
        self._passes += 1
        sizes = iter(plan.sizes(rank))
        number, waiting = 0, _Buffer()
        size = next(sizes, None)
        for turn, share in enumerate(self._shares(plan, rank, seed % MAX_SEED if shuffle else None)):
            columns = _joined([columns_of(ray.get(block), start, stop, self._name) for block, start, stop in share])
            if shuffle:
                order = shuffled_turn(len(next(iter(columns.values()))), seed, rank, turn)
                columns = {key: column[order] for key, column in columns.items()}
            waiting.add(columns)
            while size is not None and waiting.rows >= size:
                batch = waiting.take(size)
                if number >= skip:
                    yield batch
                size, number = next(sizes, None), number + 1
        if number < plan.steps:
            raise DatasetError(
                f"datasets.{self._name} was begun again before this pass was over; "
                "read a stream of Ray Data with one loader at a time"
            )

    def _shares(self, plan: Plan, rank: int, seed: int | None) -> Iterator[Share]:
        """The shares of this worker; the next is asked for while one is read."""
        arguments = (self._passes, plan, rank, seed)
        if isinstance(self._dealer, Dealer):
            while (share := self._dealer.take(*arguments)) is not None:
                yield share
            return
        coming = self._dealer.take.remote(*arguments)
        while True:
            try:
                share = ray.get(coming)
            except ray.exceptions.RayError as error:
                raise told(error, f"datasets.{self._name} cannot be read") from error
            if share is None:
                return
            coming = self._dealer.take.remote(*arguments)
            yield share


class _Buffer:
    """Rows that wait to become batches."""

    def __init__(self) -> None:
        self.rows = 0
        self._columns: Batch = {}

    def add(self, columns: Batch) -> None:
        self._columns = _joined([self._columns, columns]) if self.rows else columns
        self.rows = len(next(iter(self._columns.values())))

    def take(self, size: int) -> Batch:
        batch = {key: column[:size] for key, column in self._columns.items()}
        self._columns = {key: column[size:] for key, column in self._columns.items()}
        self.rows -= size
        return batch


def _joined(parts: Sequence[Batch]) -> Batch:
    if len(parts) == 1:
        return parts[0]
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}


class SampleActor:
    """Reads samples of any of an experiment's datasets in a process of its own.

    Args:
        nodes: of the datasets in conf.yaml, by name.
        seed: `cfg.seed`.
        project: folder of the experiment.
    """

    def __init__(self, nodes: Mapping[str, Any], seed: int, project: Path) -> None:
        self._nodes, self._seed, self._project = nodes, seed, project
        self._readers: dict[str, tuple[Samples, Stacked]] = {}

    def read(self, name: str, rows: Rows) -> dict[str, tuple[str | None, Any]]:
        """One batch as (type, array) by name: other processes of this machine read arrays without a copy.

        What is not a tensor has no type.
        """
        if name not in self._readers:
            dataset = make_dataset(self._nodes[name], name, self._seed, self._project)
            self._readers[name] = Samples(dataset, name), Stacked(dataset, name)
        samples, stacked = self._readers[name]
        rows.seed_reader()
        made = stacked(samples.__getitems__(rows))
        return {
            key: (dtype_name(column), as_numpy(column)) if isinstance(column, torch.Tensor) else (None, column)
            for key, column in made.items()
        }


class RemoteReaders:
    """Actors on spare CPUs of the cluster that read map-style datasets for one worker, all of its sets.

    Args:
        nodes: of the datasets in conf.yaml, by name.
        seed: `cfg.seed`.
        project: folder of the experiment.
        processes: actors of this worker; they start when the first batch is asked for.
        prefetch_batches: that each of them reads ahead.
    """

    def __init__(
        self, nodes: Mapping[str, Any], seed: int, project: Path, *, processes: int, prefetch_batches: int
    ) -> None:
        self._arguments = (nodes, seed, project)
        self._processes, self._ahead = processes, processes * max(1, prefetch_batches)

    @cached_property
    def _actors(self) -> list[Any]:
        # A process that was lost is replaced, but not for ever: a sample may be what kills it.
        options = {"num_cpus": 1, "scheduling_strategy": "SPREAD", "max_restarts": 3, "max_task_retries": 3}
        actor = ray.remote(SampleActor).options(**options)
        return [actor.remote(*self._arguments) for _ in range(self._processes)]

    def batches(self, name: str, batches: Iterator[Rows]) -> Iterator[Batch]:
        """One batch of a dataset after the other, for the rows of each."""
        coming: collections.deque[Any] = collections.deque()
        for number, rows in enumerate(batches):
            coming.append(self._actors[number % self._processes].read.remote(name, rows))
            if len(coming) > self._ahead:
                yield self._received(name, coming.popleft())
        while coming:
            yield self._received(name, coming.popleft())

    @staticmethod
    def _received(name: str, reference: Any) -> Batch:
        try:
            return batch_of(ray.get(reference))
        except ray.exceptions.RayError as error:
            raise told(error, f"datasets.{name} cannot be read") from error


def batch_of(arrays: Mapping[str, tuple[str | None, Any]]) -> Batch:
    """The batch that a `SampleActor` has read."""
    return {
        key: torch.from_numpy(np.array(array)).view(getattr(torch, dtype)) if dtype else array
        for key, (dtype, array) in arrays.items()
    }
