"""Assigns the blocks of a stream to the workers.

One `BlockAssigner` runs the stream, in order, and assigns references to its blocks. A worker fetches only the blocks
that hold its own rows, from the node that has them.
"""

import collections
import threading
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import ray
import ray.util.scheduling_strategies

from mlx_runtime.data.sampling import ShardPlan
from mlx_runtime.data.streams import Part, blocks_of, dataset_error, make_dataset, rows_of_stream, stream_of
from mlx_runtime.errors import DatasetError, MlxError

Share = list[Part]
"""Consecutive rows that one worker reads."""


class BlockAssigner:
    """Runs a stream and assigns its rows to the workers by their plans. Used as an actor, or within one process.

    Args:
        node: Node of the dataset in conf.yaml.
        name: Name of the dataset.
        seed: `cfg.seed`.
        project: Folder of the experiment.
    """

    def __init__(self, node: Mapping[str, Any], name: str, seed: int, project: Path) -> None:
        self._name = name
        self._arguments = (node, name, seed, project)
        self._passes: dict[int, _Pass] = {}
        self._ended = 0
        self._lock = threading.Lock()

    @cached_property
    def _dataset(self) -> Any:  # made on first use: an actor whose constructor raises prints a traceback
        return make_dataset(*self._arguments)

    def rows(self) -> int:
        """Return the number of rows in one pass.

        Raises:
            DatasetError: The dataset cannot be made or counted.
        """
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

    def take(self, number: int, plan: ShardPlan, rank: int, seed: int | None) -> Share | None:
        """Return the next rows of one worker in a pass, or None after the last.

        Args:
            number: Number of the pass, ascending.
            plan: Plan of the pass; the same from every worker.
            rank: Rank of the worker.
            seed: Seed for `to_ray`.
        """
        with self._lock:
            if number <= self._ended:
                return None  # requested ahead, in a pass that all workers have left since
            if number not in self._passes:
                stream = stream_of(self._dataset, self._name, seed)
                self._passes[number] = _Pass(blocks_of(stream, self._name), plan, self._name)
            for earlier in [other for other in self._passes if other < number]:
                self._passes[earlier].left.add(rank)
                if len(self._passes[earlier].left) == plan.world_size:
                    self._end(earlier)
            current = self._passes[number]
        return current.take(rank)

    def close(self) -> None:
        """Stop reading, while Ray still runs."""
        with self._lock:
            for number in list(self._passes):
                self._end(number)

    def _end(self, number: int) -> None:
        self._passes.pop(number).close()
        self._ended = max(self._ended, number)


class _Pass:
    """One pass over a stream: assigns its blocks, and holds the shares that have not been taken yet.

    Attributes:
        left: Ranks that will not come back.
    """

    def __init__(self, blocks: Iterator[Part], plan: ShardPlan, name: str) -> None:
        self.left: set[int] = set()
        self._blocks, self._plan, self._name = blocks, plan, name
        self._assignments = plan.assignments()
        self._waiting: dict[int, collections.deque[Share]] = collections.defaultdict(collections.deque)
        self._block: Part = (None, 0, 0)
        self._position = 0
        self._ended = False
        self._error: Exception | None = None
        self._lock = threading.Lock()

    def take(self, rank: int) -> Share | None:
        with self._lock:
            try:
                while not self._waiting[rank] and not self._ended and self._error is None:
                    self._assign()
            except Exception as error:
                self._error = error
            if self._error is not None:
                raise self._error  # the same for every worker
            return self._waiting[rank].popleft() if self._waiting[rank] else None

    def close(self) -> None:
        with self._lock:
            self._end()

    def _end(self) -> None:
        """Stop the execution of the stream."""
        self._ended = True
        close = getattr(self._blocks, "close", None)
        if close is not None:
            close()

    def _assign(self) -> None:
        """Read the next share of the plan."""
        assignment = next(self._assignments, None)
        if assignment is None:
            surplus = self._reads_to_the_end() and self._next_block()
            self._end()
            if surplus:
                raise DatasetError(
                    f"datasets.{self._name}: to_ray() gives more rows than its __len__, {self._plan.rows}"
                )
            return
        rank, count = assignment
        share: Share = []
        while count:
            if not self._next_block():
                raise DatasetError(
                    f"datasets.{self._name}: to_ray() gave {self._position} rows, but its __len__ is {self._plan.rows}"
                )
            reference, start, stop = self._block
            taken = min(count, stop - start)
            share.append((reference, start, start + taken))
            self._block = (reference, start + taken, stop)
            self._position, count = self._position + taken, count - taken
        if rank is not None:
            self._waiting[rank].append(share)

    def _next_block(self) -> bool:
        """Make sure that the current block has unassigned rows. Return False at the end of the stream."""
        while self._block[1] == self._block[2]:
            block = next(self._blocks, None)
            if block is None:
                return False
            self._block = block
        return True

    def _reads_to_the_end(self) -> bool:
        plan = self._plan
        return bool(plan.left) and plan.assigned == plan.left and plan.unread[-1][1] == plan.rows


def start_assigner(node: Mapping[str, Any], name: str, seed: int, project: Path, workers: int) -> Any:
    """Start a `BlockAssigner` in a process of its own on this node."""
    node_id = ray.get_runtime_context().get_node_id()
    here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node_id, soft=True)
    options = {"num_cpus": 0, "max_concurrency": workers + 1, "scheduling_strategy": here}
    return ray.remote(BlockAssigner).options(**options).remote(node, name, seed, project)
