"""Which rows each worker reads, step by step: arithmetic of (seed, epoch, world size) that no timing can change.

A pass over a dataset is an order of its rows (a permutation when shuffled) that is dealt to the workers:

    order   0 1 2 3 4 5 6 7 8 9        world size 2, batch size 2
    rank 0  0 1     4 5     8          step 1, step 2, step 3
    rank 1      2 3     6 7   9

All workers take the same number of steps, and each row is read exactly once, by one worker. So that nobody runs out
of rows early, the last two batches of a worker share what is left: they may be short, but never empty. With
`batch_size=1` the last batches take the surplus instead, and some have two rows. With `drop_last` all batches are full,
and up to `world_size * batch_size - 1` rows at the end of the order sit out the pass.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

Range = tuple[int, int]
"""Places in an order from the first up to, not including, the second."""


def mixed(*numbers: int) -> int:
    """One seed, 0 … 2**63 - 1, from several numbers; no two combinations are likely to give the same."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)


def epoch_order(rows: int, seed: int, epoch: int, *, shuffle: bool) -> torch.Tensor:
    """The row numbers of one epoch, (rows,) int64: a permutation when shuffled, else 0 … rows - 1."""
    if not shuffle:
        return torch.arange(rows)
    return torch.randperm(rows, generator=torch.Generator().manual_seed(mixed(seed, epoch)))


def shuffled_turn(count: int, seed: int, rank: int, number: int) -> torch.Tensor:
    """The order in which a worker reads the rows of one of its turns, (count,) int64."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(mixed(seed, rank, number)))


def micro_batches(batch_size: int, wanted: int, workers: int) -> tuple[int, int]:
    """How another number of workers comes to the same global batch.

    Args:
        batch_size: rows per worker and step of the wanted group.
        wanted, workers: numbers of workers, as it should be and as it is.

    Returns:
        Rows per worker and step, at most `batch_size`, and how many steps make one update. Where the rows cannot be
        shared out equally, their number is as near as it can be.
    """
    total = batch_size * wanted
    least = math.ceil(wanted / workers)
    ways = [
        (min(batch_size, max(1, round(total / (workers * steps)))), steps)
        for steps in range(max(1, least - 1), 2 * least + 1)
    ]
    return min(ways, key=lambda way: (abs(way[0] * way[1] * workers - total), way[1]))


@dataclass(frozen=True)
class Plan:
    """How what is left of a pass is dealt to the workers.

    Attributes:
        rows: in the order of the whole pass.
        world_size: number of workers.
        batch_size: rows per worker and step.
        drop_last: leave out rows at the end that do not fill a batch of every worker.
        chunk: batches in a row that a worker is dealt at once; more than one keeps neighbours in a stream together.
        read: places in the order that were read before, disjoint and rising; by any number of workers.
        most: rows that the whole pass reads at the most, those read before included; None means all.
    """

    rows: int
    world_size: int
    batch_size: int
    drop_last: bool = False
    chunk: int = 1
    read: tuple[Range, ...] = field(default=())
    most: int | None = None

    @cached_property
    def unread(self) -> tuple[Range, ...]:
        """Places that are left."""
        edges = [0, *(edge for place in self.read for edge in place), self.rows]
        return tuple((start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop)

    @property
    def left(self) -> int:
        """Rows that are left."""
        return sum(stop - start for start, stop in self.unread)

    @property
    def dealt(self) -> int:
        """Rows of these that this plan reads; fewer rows than workers cannot be shared out, and none of them is."""
        before = self.rows - self.left
        rows = self.left if self.most is None else max(0, min(self.left, self.most - before))
        if self.drop_last:
            step = self.world_size * self.batch_size
            return rows // step * step
        return rows if rows >= self.world_size else 0

    @property
    def steps(self) -> int:
        """Steps that every worker takes."""
        if self.batch_size == 1:
            return self.dealt // self.world_size
        return math.ceil(math.ceil(self.dealt / self.world_size) / self.batch_size)

    @property
    def _group(self) -> int:
        """Rows in one round of dealing."""
        return self.world_size * self.chunk * self.batch_size

    @property
    def _rounds(self) -> int:
        return self.dealt // self._group

    def _tail(self, rank: int) -> Range:
        """Of the rows after all full rounds, counted from the first of them, the share of one worker."""
        share, surplus = divmod(self.dealt - self._rounds * self._group, self.world_size)
        start = rank * share + min(rank, surplus)
        return start, start + share + (rank < surplus)

    def deal(self) -> Iterator[tuple[int | None, int]]:
        """Who reads the places of the order, from the first to the last that is read: (rank, how many).

        The rank is None for places that nobody reads, since they were read before.
        """
        gaps = iter(self.unread)
        place = stop = 0
        for rank, share in self._turns():
            while share:
                if place == stop:
                    start, stop = next(gaps)
                    if start > place:
                        yield None, start - place
                    place = start
                count = min(share, stop - place)
                yield rank, count
                place, share = place + count, share - count

    def _turns(self) -> Iterator[tuple[int, int]]:
        for _ in range(self._rounds):
            for rank in range(self.world_size):
                yield rank, self.chunk * self.batch_size
        for rank in range(self.world_size):
            start, stop = self._tail(rank)
            if start < stop:
                yield rank, stop - start

    def places(self, rank: int) -> torch.Tensor:
        """Where in the order the rows of one worker stand, as it reads them; int64."""
        rounds, share = self._rounds, self.chunk * self.batch_size
        mine = torch.arange(rounds * self._group).view(rounds, self.world_size, share)[:, rank].reshape(-1)
        start, stop = self._tail(rank)
        if stop > start:
            mine = torch.cat([mine, torch.arange(start, stop) + rounds * self._group])
        if len(self.unread) == 1:
            return mine + self.unread[0][0]
        return torch.cat([torch.arange(start, stop) for start, stop in self.unread])[mine] if len(mine) else mine

    def sizes(self, rank: int) -> list[int]:
        """Rows in each batch of one worker."""
        start, stop = self._tail(rank)
        total = self._rounds * self.chunk * self.batch_size + stop - start
        sizes: list[int] = []
        for later in range(self.steps - 1, -1, -1):
            sizes.append(min(self.batch_size, total - later) if later or self.batch_size > 1 else total)
            total -= sizes[-1]  # what is left for each later step is one row at least
        return sizes

    def shuffled_places(self, seed: int) -> list[torch.Tensor]:
        """Like `places`, for all workers, where each of them shuffles what it is dealt in one turn."""
        found: list[list[torch.Tensor]] = [[] for _ in range(self.world_size)]
        place = 0
        for rank, count in self.deal():
            if rank is not None:
                found[rank].append(place + shuffled_turn(count, seed, rank, len(found[rank])))
            place += count
        return [torch.cat(turns) if turns else torch.arange(0) for turns in found]

    def read_after(self, steps: int, seed: int | None = None) -> tuple[Range, ...]:
        """Places that have been read once every worker has taken so many steps of this plan.

        Args:
            steps: taken.
            seed: with which each worker shuffled its turns, if it did.
        """
        if steps == 0:
            return self.read
        workers = range(self.world_size)
        orders = [self.places(rank) for rank in workers] if seed is None else self.shuffled_places(seed)
        places = [orders[rank][: sum(self.sizes(rank)[:steps])] for rank in workers]
        seen = torch.cat([*places, *(torch.arange(start, stop) for start, stop in self.read)]).sort().values
        if not len(seen):
            return ()
        breaks = (torch.diff(seen) != 1).nonzero().flatten() + 1
        starts, stops = [0, *breaks.tolist()], [*breaks.tolist(), len(seen)]
        return tuple((int(seen[a]), int(seen[b - 1]) + 1) for a, b in zip(starts, stops, strict=True))
