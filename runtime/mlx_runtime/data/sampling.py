"""The rows of each worker at each step: a function of seed, epoch and world size, independent of timing.

A pass over a dataset has an order of its rows, a permutation if shuffled, which is divided among the workers:

    order   0 1 2 3 4 5 6 7 8 9        world size 2, batch size 2
    rank 0  0 1     4 5     8          step 1, step 2, step 3
    rank 1      2 3     6 7   9

All workers take the same number of steps, and each row is read exactly once, by one worker. The last two batches of a
worker share the remaining rows, so that no worker runs out early: they may be short, but never empty. A single row,
which BatchNorm rejects, is not left alone if another can join it: 65 rows in batches of 32 are 32, 31 and 2. With
`batch_size=1`, some of the last batches have two rows instead. With `drop_last`, all batches are full, and up to
`world_size * batch_size - 1` rows at the end of the order are dropped.

A *position* is an index into the order, and a *share* is a run of positions that one worker reads.

Rows of different lengths may be ordered in *groups* of similar lengths. A group has as many rows as all workers read in
one step. The groups only change the order; everything else stays the same.
"""

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy as np
import torch

Range = tuple[int, int]
"""First position, and the one after the last."""

LOADER_ARGUMENTS = ("batch_size", "shuffle", "drop_last")
"""Arguments that do not affect the content of rows, so that changing them does not make a prepared dataset stale."""


def mix_seeds(*numbers: int) -> int:
    """Combine numbers into one seed, 0 … 2**63 - 1. Different combinations very likely give different seeds."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)


def epoch_order(rows: int, seed: int, epoch: int, *, shuffle: bool) -> torch.Tensor:
    """Return the row numbers of one epoch, (rows,) int64: a permutation if shuffled, else 0 … rows - 1."""
    if not shuffle:
        return torch.arange(rows)
    return torch.randperm(rows, generator=torch.Generator().manual_seed(mix_seeds(seed, epoch)))


GROUPS = 50
"""Number of groups formed from one window of rows: more mean more similar lengths, but less random batches."""


def group_by_length(order: torch.Tensor, lengths: torch.Tensor, group: int, seed: int | None) -> torch.Tensor:
    """Return an order in which each group of consecutive rows has similar lengths; int64.

    Rows are sorted within windows of `GROUPS` groups, and all groups are then shuffled. Rows that do not fill a group
    stay at the end of the order.

    Args:
        order: row numbers, (rows,) int64.
        lengths: length of each row, (rows,) int64, by row number.
        group: rows per group.
        seed: seed for the order of the groups; None keeps the order of their windows.
    """
    count = len(order) // group
    full, step = order[: count * group], group * GROUPS
    windows = [full[start : start + step] for start in range(0, len(full), step)]
    ordered = [window[lengths[window].argsort(stable=True)] for window in windows]
    groups = torch.cat(ordered or [order[:0]]).view(count, group)
    if seed is not None:
        groups = groups[torch.randperm(count, generator=torch.Generator().manual_seed(seed))]
    return torch.cat([groups.flatten(), order[count * group :]])


def shuffled_share(count: int, seed: int, rank: int, number: int) -> torch.Tensor:
    """Return the order of the rows in share `number` of a worker, (count,) int64."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(mix_seeds(seed, rank, number)))


def micro_batches(batch_size: int, wanted: int, workers: int) -> tuple[int, int]:
    """Return the rows per worker and step, and the steps per update, for the global batch of `wanted` workers.

    The rows are at most `batch_size`; if the global batch cannot be divided equally, the closest one is used.
    """
    total = batch_size * wanted
    fewest = math.ceil(wanted / workers)
    candidates = [
        (min(batch_size, max(1, round(total / (workers * steps)))), steps)
        for steps in range(max(1, fewest - 1), 2 * fewest + 1)
    ]
    return min(candidates, key=lambda item: (abs(item[0] * item[1] * workers - total), item[1]))


@dataclass(frozen=True)
class ShardPlan:
    """Assignment of the remaining rows of a pass to the workers."""

    rows: int  # in the order of the whole pass
    world_size: int
    batch_size: int  # rows per worker and step
    drop_last: bool = False  # drop the rows at the end that do not fill a batch of every worker
    chunk: int = 1  # consecutive batches per share; more than 1 keeps neighbors in a stream together
    read: tuple[Range, ...] = ()  # positions already read, by any number of workers; disjoint and ascending
    limit: int | None = None  # rows in the whole pass, including those already read; None means all
    group: int = 0  # consecutive rows of similar lengths; 0 ignores lengths

    @cached_property
    def unread(self) -> tuple[Range, ...]:
        """Remaining positions."""
        edges = [0, *(edge for part in self.read for edge in part), self.rows]
        return tuple((start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop)

    @property
    def left(self) -> int:
        return sum(stop - start for start, stop in self.unread)

    @property
    def assigned(self) -> int:
        """Number of rows that this plan assigns; 0 if there are fewer rows than workers."""
        before = self.rows - self.left
        rows = self.left if self.limit is None else max(0, min(self.left, self.limit - before))
        if self.drop_last:
            step = self.world_size * self.batch_size
            return rows // step * step
        return rows if rows >= self.world_size else 0

    @property
    def steps(self) -> int:
        """Number of steps that every worker takes."""
        if self.batch_size == 1:
            return self.assigned // self.world_size
        return math.ceil(math.ceil(self.assigned / self.world_size) / self.batch_size)

    @property
    def _share(self) -> int:
        """Rows in a full share."""
        return self.chunk * self.batch_size

    @property
    def _rounds(self) -> int:
        """Number of full shares per worker."""
        return self.assigned // (self.world_size * self._share)

    def _last_shares(self) -> tuple[int, int]:
        """Return the rows in the last share of every worker, and the number of workers that have one more."""
        return divmod(self.assigned - self._rounds * self.world_size * self._share, self.world_size)

    def _tail(self, rank: int) -> Range:
        """Return the last share of a worker, counted from the first row after all full shares."""
        share, surplus = self._last_shares()
        start = rank * share + min(rank, surplus)
        return start, start + share + (rank < surplus)

    def assignments(self) -> Iterator[tuple[int | None, int]]:
        """Yield the worker for each part of the order, up to the last position to read, as (rank, number of rows).

        The rank is None for positions already read.
        """
        gaps = iter(self.unread)
        position = stop = 0
        for rank, share in self._shares():
            while share:
                if position == stop:
                    start, stop = next(gaps)
                    if start > position:
                        yield None, start - position
                    position = start
                count = min(share, stop - position)
                yield rank, count
                position, share = position + count, share - count

    def _shares(self) -> Iterator[tuple[int, int]]:
        for _ in range(self._rounds):
            for rank in range(self.world_size):
                yield rank, self._share
        for rank in range(self.world_size):
            start, stop = self._tail(rank)
            if start < stop:
                yield rank, stop - start

    def positions(self, rank: int) -> torch.Tensor:
        """Return the positions of one worker, in reading order; int64."""
        rounds, share = self._rounds, self._share
        full = rounds * self.world_size * share
        own = torch.arange(full).view(rounds, self.world_size, share)[:, rank].reshape(-1)
        start, stop = self._tail(rank)
        if stop > start:
            own = torch.cat([own, torch.arange(start, stop) + full])
        if len(self.unread) == 1:
            return own + self.unread[0][0]
        return torch.cat([torch.arange(start, stop) for start, stop in self.unread])[own] if len(own) else own

    def sizes(self, rank: int) -> list[int]:
        """Return the number of rows in each batch of one worker."""
        start, stop = self._tail(rank)
        total = self._rounds * self._share + stop - start
        sizes: list[int] = []
        for later in range(self.steps - 1, -1, -1):
            sizes.append(min(self.batch_size, total - later) if later or self.batch_size > 1 else total)
            total -= sizes[-1]  # leaves at least one row for each later step
        if len(sizes) > 1 and sizes[-1] == 1 and sizes[-2] > 2:
            sizes[-2:] = [sizes[-2] - 1, 2]
        return sizes

    def step_sizes(self) -> list[int]:
        """Return the number of rows that all workers read together in each step."""
        _, surplus = self._last_shares()
        pairs = zip(self.sizes(0), self.sizes(self.world_size - 1), strict=True)
        return [surplus * more + (self.world_size - surplus) * fewer for more, fewer in pairs]

    def _shuffled_positions(self, seed: int) -> list[torch.Tensor]:
        """Return the positions of every worker, if workers shuffle each of their shares."""
        shares: list[list[torch.Tensor]] = [[] for _ in range(self.world_size)]
        position = 0
        for rank, count in self.assignments():
            if rank is not None:
                shares[rank].append(position + shuffled_share(count, seed, rank, len(shares[rank])))
            position += count
        return [torch.cat(items) if items else torch.arange(0) for items in shares]

    def read_after(self, steps: int, seed: int | None = None) -> tuple[Range, ...]:
        """Return the positions already read after `steps` steps of every worker.

        `seed` is the seed with which workers shuffle their shares, or None if they do not.
        """
        if steps == 0:
            return self.read
        ranks = range(self.world_size)
        orders = [self.positions(rank) for rank in ranks] if seed is None else self._shuffled_positions(seed)
        taken = [orders[rank][: sum(self.sizes(rank)[:steps])] for rank in ranks]
        seen = torch.cat([*taken, *(torch.arange(start, stop) for start, stop in self.read)]).sort().values
        if not len(seen):
            return ()
        breaks = ((torch.diff(seen) != 1).nonzero().flatten() + 1).tolist()
        starts, stops = [0, *breaks], [*breaks, len(seen)]
        return tuple((int(seen[a]), int(seen[b - 1]) + 1) for a, b in zip(starts, stops, strict=True))

    def state_dict(self) -> dict[str, Any]:
        """Return the plan as plain values."""
        return asdict(self) | {"read": [list(part) for part in self.read]}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "ShardPlan":
        """Return the plan of a state, ignoring other values."""
        values = {item.name: state[item.name] for item in fields(cls)}
        return cls(**values | {"read": tuple((start, stop) for start, stop in state["read"])})


@dataclass(frozen=True)
class Subset:
    """The part of a dataset that a run reads."""

    rows: torch.Tensor  # row numbers, int64
    attributes: Mapping[str, Any] = field(default_factory=dict)  # override those of the dataset


@dataclass
class WorkerPass:
    """One worker's part of a pass, and its progress."""

    plan: ShardPlan
    rank: int  # data-parallel rank
    skip: int  # steps of the plan taken before an interruption
    epoch: int
    seed: int  # of the run; determines the order together with the epoch
    shuffle: bool
    given: int = 0  # batches given to the loop since the interruption
    left: bool = False  # the loop has left the pass before its end
    subset: torch.Tensor | None = None  # row numbers in the pass, int64; None means all rows
    lengths: torch.Tensor | None = None  # of the rows in the pass, int64; needed if the plan has groups
    row_counts: Mapping[str, float] = field(default_factory=dict)  # units per row, like {"tokens": 64}
    waited_s: float = 0.0  # for data
    began: float = field(default_factory=time.perf_counter)

    @property
    def taken(self) -> int:
        """Steps of the plan that this worker has taken, even before an interruption."""
        return self.skip + self.given

    @property
    def seconds(self) -> float:
        """Duration so far."""
        return time.perf_counter() - self.began

    @property
    def steps_left(self) -> int:
        return 0 if self.left else self.plan.steps - self.taken

    @property
    def rows_read(self) -> int:
        """Rows that all workers have read so far; those before an interruption do not count."""
        return sum(self._step_sizes[: self.given])

    @property
    def rates(self) -> dict[str, float]:
        """Rows that all workers read per second, and their other units."""
        counts = {"samples": 1.0, **self.row_counts}
        return {f"{unit}_per_s": count * self.rows_read / self.seconds for unit, count in counts.items()}

    @property
    def epoch_seed(self) -> int:
        """Seed of this pass, the same on all workers."""
        return mix_seeds(self.seed, self.epoch)

    @cached_property
    def sizes(self) -> list[int]:
        """Rows in each remaining batch."""
        return self.plan.sizes(self.rank)[self.skip :]

    @cached_property
    def _step_sizes(self) -> list[int]:
        return self.plan.step_sizes()[self.skip :]

    def loss_divisor(self, accumulate: int) -> float:
        """Return the divisor for the mean loss of the current batch that gives all rows of an update the same weight.

        An update has `accumulate` steps, or fewer at the end of the pass. Its gradient is the sum over these steps of
        the mean over the workers. If all batches have the same size, the divisor is the number of steps.
        """
        first = (self.given - 1) // accumulate * accumulate
        return sum(self._step_sizes[first : first + accumulate]) / (self.sizes[self.given - 1] * self.plan.world_size)

    def rows(self) -> torch.Tensor:
        """Return the remaining row numbers, in order; int64."""
        order = epoch_order(self.plan.rows, self.seed, self.epoch, shuffle=self.shuffle)
        if self.plan.group and self.lengths is not None:
            seed = mix_seeds(self.epoch_seed, self.plan.group) if self.shuffle else None
            order = group_by_length(order, self.lengths, self.plan.group, seed)
        skipped = sum(self.plan.sizes(self.rank)[: self.skip])
        rows = order[self.plan.positions(self.rank)[skipped:]]
        return rows if self.subset is None else self.subset[rows]

    def batch_rows(self) -> Iterator[list[int]]:
        """Yield the row numbers of each remaining batch, in order."""
        numbers, start = self.rows(), 0
        for size in self.sizes:
            yield numbers[start : start + size].tolist()
            start += size
