"""Streams of Ray Data, shared by the workers.

One `StreamAssigner` executes the stream, in order, and assigns references to its blocks. The `StreamReader` of each
worker fetches only the blocks with its own rows, from the nodes that store them.
"""

import collections
import contextlib
import threading
import uuid
from collections.abc import Generator, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import ray
import ray.exceptions
import ray.util.scheduling_strategies
import torch

from mlx_runtime.companions.ray.streams import (
    Part,
    columns_of,
    make_dataset,
    rows_of_stream,
    stream_blocks,
    stream_of,
)
from mlx_runtime.data.batches import Batch, dataset_error
from mlx_runtime.data.sampling import ShardPlan, WorkerPass, shuffled_share
from mlx_runtime.distributed.collectives import broadcast
from mlx_runtime.distributed.topology import Topology
from mlx_runtime.errors import DatasetError, MlxError

WINDOW_ROWS = 1024
"""Rows per share of a stream. Training shuffles the rows within each share."""

MAX_SEED = 2**31
"""Ray Data's seeds have 32 bits, and it counts up from them."""

Share = list[Part]
"""Consecutive rows that one worker reads."""


class StreamAssigner:
    """Executes the stream of a node in conf.yaml, and assigns its rows to the workers by their plans.

    Used as a Ray actor, or directly within one process.
    """

    def __init__(
        self, node: Mapping[str, Any], name: str, seed: int, project: Path, copies: Sequence[int] = ()
    ) -> None:
        self._name, self._copies = name, copies
        self._arguments = (node, name, seed, project)
        self._passes: dict[int, _Pass] = {}
        self._ended = 0
        self._lock = threading.Lock()

    @cached_property
    def _dataset(self) -> Any:  # constructed on first use: an actor whose constructor raises prints a traceback
        return make_dataset(*self._arguments)

    def rows(self) -> int:
        """Return the number of rows in one pass. Raises DatasetError if the stream cannot be constructed or counted."""
        with self._lock:
            return self._rows

    @cached_property
    def _rows(self) -> int:
        try:
            return rows_of_stream(self._dataset, stream_of(self._dataset, self._name))
        except MlxError:
            raise
        except Exception as error:  # of user code
            raise dataset_error(error, f"datasets.{self._name} cannot be read") from error

    def take(self, number: int, plan: ShardPlan, rank: int, epoch: int, seed: int | None, copy: int) -> Share | None:
        """Return the next rows of one worker in a pass, or None after the last.

        Passes are numbered in ascending order, and all workers have the same plan, epoch and seed for `to_ray`. The
        copies with the same rank, which share one replica of the models, receive the same rows.
        """
        copies = self._copies or [1] * plan.world_size
        with self._lock:
            if number <= self._ended:
                return None  # requested ahead in a pass that all workers have left in the meantime
            if number not in self._passes:
                if hasattr(self._dataset, "set_epoch"):
                    self._dataset.set_epoch(epoch)
                stream = stream_of(self._dataset, self._name, seed)
                self._passes[number] = _Pass(stream_blocks(stream, self._name), plan, self._name, copies)
            for earlier in [other for other in self._passes if other < number]:
                self._passes[earlier].left.add((rank, copy))
                if len(self._passes[earlier].left) == sum(copies):
                    self._end(earlier)
            current = self._passes[number]
        return current.take((rank, copy))

    def close(self) -> None:
        """Stop reading. Ray must still be running."""
        with self._lock:
            for number in list(self._passes):
                self._end(number)

    def _end(self, number: int) -> None:
        self._passes.pop(number).close()
        self._ended = max(self._ended, number)


class _Pass:
    """One pass over a stream: assigns its blocks, and stores the shares that were not taken yet.

    Workers in `left` have left the pass.
    """

    def __init__(self, blocks: Generator[Part], plan: ShardPlan, name: str, copies: Sequence[int]) -> None:
        self.left: set[tuple[int, int]] = set()  # by rank and copy, as below
        self._copies = copies  # by rank
        self._shares = _assign(blocks, plan, name)
        self._waiting: dict[tuple[int, int], collections.deque[Share]] = collections.defaultdict(collections.deque)
        self._error: Exception | None = None
        self._lock = threading.Lock()

    def take(self, reader: tuple[int, int]) -> Share | None:
        with self._lock:
            try:
                while not self._waiting[reader] and self._error is None:
                    owner, share = next(self._shares)
                    for copy in range(self._copies[owner]):
                        self._waiting[owner, copy].append(share)
            except StopIteration:
                return None
            except Exception as error:
                self._error = error
            if self._error is not None:
                raise self._error  # the same for every worker
            return self._waiting[reader].popleft()

    def close(self) -> None:
        """Stop the execution of the stream."""
        with self._lock:
            self._shares.close()


def _assign(blocks: Generator[Part], plan: ShardPlan, name: str) -> Generator[tuple[int, Share]]:
    """Yield the shares of a plan in order, each with its rank."""
    block: Part = (None, 0, 0)
    position = 0
    with contextlib.closing(blocks):
        for rank, count in plan.assignments():
            share: Share = []
            while count:
                reference, start, stop = block
                if start == stop:
                    following = next(blocks, None)
                    if following is None:
                        given = f"to_ray() returned {position} rows, but __len__() is {plan.rows}"
                        raise DatasetError(f"datasets.{name}: {given}")
                    block = following
                    continue
                taken = min(count, stop - start)
                share.append((reference, start, start + taken))
                block = (reference, start + taken, stop)
                position, count = position + taken, count - taken
            if rank is not None:
                yield rank, share
        to_the_end = plan.left and plan.assigned == plan.left and plan.unread[-1][1] == plan.rows
        if to_the_end and (block[1] < block[2] or any(start < stop for _, start, stop in blocks)):
            raise DatasetError(f"datasets.{name}: to_ray() returned more rows than its __len__, {plan.rows}")


def start_assigner(node: Mapping[str, Any], name: str, seed: int, project: Path, topology: Topology, actor: str) -> Any:
    """Start a `StreamAssigner` in a separate process on this node, as a Ray actor of this name."""
    node_id = ray.get_runtime_context().get_node_id()
    here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node_id, soft=True)
    options = {"num_cpus": 0, "max_concurrency": topology.world_size + 1, "scheduling_strategy": here, "name": actor}
    copies = [*map(len, topology.replicas)]
    return ray.remote(StreamAssigner).options(**options).remote(node, name, seed, project, copies)


class StreamReader:
    """Reads the rows that a `StreamAssigner`, local or an actor, assigns to this worker.

    All loaders of a dataset share one reader, which counts its passes. `copy` is the number of this worker among those
    that read the same rows.
    """

    window_rows = WINDOW_ROWS

    def __init__(self, assigner: Any, name: str, copy: int = 0) -> None:
        self._assigner, self._name, self._copy = assigner, name, copy
        self._passes = 0

    def rows(self) -> int:
        if isinstance(self._assigner, StreamAssigner):
            return self._assigner.rows()
        return int(self._get(self._assigner.rows.remote()))

    def close(self) -> None:
        """Stop an assigner in this process; an actor ends with the workers."""
        if isinstance(self._assigner, StreamAssigner):
            self._assigner.close()

    def batches(self, part: WorkerPass, prefetch: int | None = None) -> Iterator[Batch]:
        self._passes += 1
        plan, rank, seed = part.plan, part.rank, part.epoch_seed
        arguments = (self._passes, plan, rank, part.epoch, seed % MAX_SEED if part.shuffle else None, self._copy)
        sizes = plan.sizes(rank)
        number, waiting = 0, 0
        columns: Batch = {}
        for index, share in enumerate(self._shares(*arguments)):
            blocks = [columns_of(ray.get(block), start, stop, self._name) for block, start, stop in share]
            new = _concatenate(blocks)
            if part.shuffle:
                order = shuffled_share(_rows(new), seed, rank, index)
                new = {key: column[order] for key, column in new.items()}
            columns = _concatenate([columns, new]) if waiting else new
            waiting = _rows(columns)
            while number < len(sizes) and waiting >= sizes[number]:
                if number >= part.skip:
                    yield {key: column[: sizes[number]] for key, column in columns.items()}
                columns = {key: column[sizes[number] :] for key, column in columns.items()}
                waiting, number = waiting - sizes[number], number + 1
        if number < plan.steps:
            raise DatasetError(
                f"datasets.{self._name} was iterated again before this pass had ended; "
                "read a stream of Ray Data with one loader at a time"
            )

    def _shares(self, *arguments: Any) -> Iterator[Share]:
        """Yield the shares that `StreamAssigner.take` gives this worker, requesting the next one while one is read."""
        if isinstance(self._assigner, StreamAssigner):
            while (share := self._assigner.take(*arguments)) is not None:
                yield share
            return
        coming = self._assigner.take.remote(*arguments)
        while (share := self._get(coming)) is not None:
            coming = self._assigner.take.remote(*arguments)
            yield share

    def _get(self, reference: Any) -> Any:
        """Return a result of the actor. Raises MlxError if the call raised an exception, or the actor was lost."""
        try:
            return ray.get(reference)
        except ray.exceptions.RayError as error:
            raise dataset_error(error, f"datasets.{self._name} cannot be read") from error


def _rows(columns: Batch) -> int:
    return len(next(iter(columns.values())))


def _concatenate(parts: Sequence[Batch]) -> Batch:
    if len(parts) == 1:
        return parts[0]
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}


def stream_readers(
    nodes: Mapping[str, Any], project: Path, topology: Topology, seed: int, in_driver: bool = False
) -> dict[str, StreamReader]:
    """Return the readers of streams by name. Rank 0 starts their assigners. Every worker must call this."""
    if in_driver:
        return {name: StreamReader(StreamAssigner(node, name, seed, project), name) for name, node in nodes.items()}
    actors = broadcast({name: uuid.uuid4().hex for name in nodes})
    assigners = {}
    if topology.writes:
        for name, node in nodes.items():
            assigners[name] = start_assigner(node, name, seed, project, topology, actors[name])
    broadcast(None)  # all have started
    copy = topology.model_parallel_rank
    return {name: StreamReader(assigners.get(name) or ray.get_actor(actors[name]), name, copy) for name in nodes}
