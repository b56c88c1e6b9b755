"""Plans of many machines, which are searched for."""

import functools
import itertools
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from mlx_runtime.companions.fragments.costs import TRAITS, Block, Costs, Machine, Plan, joined
from mlx_runtime.companions.fragments.exact import Exact

SEARCHED_BLOCKS = 128
"""Number of blocks to which neighbors are merged while clusters of more machines are searched for."""

STARTS_PER_COUNT, TRIED_STARTS = 2, 12
"""Number of clusterings that are improved: with the same number of clusters, and in all."""

MOVES_WITHOUT_GAIN = 50
"""Number of random changes in a row that lead to nothing better, after which the search ends."""

REORDERED_MACHINES = 6
"""Maximum number of machines in a cluster for which all orders are compared after the search."""

Clusters = tuple[tuple[int, ...], ...]
"""Machines by cluster, in the order of their stages. The first cluster has the idle machines."""


class Search:
    """A search for clusters of many machines: several starts, then exchanges with the slowest cluster.

    Cuts are optimal for each order of machines that is tried, except that neighboring blocks are merged meanwhile.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        machines: Sequence[Machine],
        microbatches: int,
        average_every: int,
        all_nodes: bool,
        stages: int,
    ) -> None:
        self._average_every, self._all_nodes, self._stages = average_every, all_nodes, stages
        self._whole = Costs(blocks, machines, microbatches)
        self._costs = Costs(_merged(blocks, SEARCHED_BLOCKS), machines, microbatches)
        self._step = functools.cache(self._step_of)
        self._left = stages
        self._needed = sum(block.memory for block in blocks)

    def plans(self, counts: Iterable[int]) -> Iterable[Plan]:
        """Yield plans for the most promising numbers of clusters."""
        starts: list[Clusters] = []
        for count in filter(self._may_fit, counts):
            if starts and 8 < count < 1.2 * (len(starts[-1]) - 1):
                continue  # much like the number before
            found = sorted(dict.fromkeys(self._starts(count)), key=self._promise)
            starts += found[:STARTS_PER_COUNT]
        ranked, left = sorted(starts, key=self._promise)[:TRIED_STARTS], self._stages
        for index, start in enumerate(ranked):
            self._left = left // (len(ranked) - index)
            left -= self._left
            improved = [self._reordered(order) for order in self._improved(start)[1:]]
            if (plan := self._plan(improved, self._whole)) is not None:
                yield plan

    def _promise(self, clusters: Clusters) -> tuple[float, int]:
        """Return a key by which numbers of clusters are sorted: the seconds per batch, at first of those that fit."""
        found, count = self._plan(clusters[1:], self._costs), len(clusters) - 1
        if found is None:
            return self._rank(clusters)[0] / count, count
        return replace(found, average_every=self._average_every).total_s / count, count

    def _reordered(self, order: tuple[int, ...]) -> tuple[int, ...]:
        """Return the best order of the machines of a cluster, without those that slow it down, if they are few."""
        if len(order) > REORDERED_MACHINES:
            return order
        machines = self._whole.machines
        own = [machines[item] for item in order]
        exact = Exact(self._costs.blocks, own, self._costs.microbatches, self._all_nodes)
        names = {machines[item].name: item for item in order}
        return next(
            (tuple(names[item.machine.name] for item in found.clusters[0]) for found in exact.plans([1])), order
        )

    def _may_fit(self, count: int) -> bool:
        return self._needed * count <= sum(item.memory for item in self._whole.machines)

    def _starts(self, count: int) -> Iterable[Clusters]:
        """Yield clusters to start from; the first one has the idle machines."""
        machines = self._whole.machines
        for trait in TRAITS:
            ordered = sorted(range(len(machines)), key=lambda item: (-getattr(machines[item], trait), item))
            clusters: list[list[int]] = [[] for _ in range(count)]
            for item in ordered:  # to the cluster that lacks most memory, or else is slowest
                sums = [
                    (
                        min(sum(machines[one].memory for one in own) / self._needed, 1.1),
                        sum(machines[one].speed for one in own),
                    )
                    for own in clusters
                ]
                clusters[sums.index(min(sums))].append(item)
            yield self._ordered(clusters)
            yield self._ordered([list(part) for part in np.array_split(ordered, count)])

    def _ordered(self, clusters: Sequence[Sequence[int]]) -> Clusters:
        """Sort the machines of each cluster by the trait that makes it fastest."""
        machines = self._whole.machines
        found = []
        for own in clusters:
            keys = itertools.product(TRAITS, (1, -1))
            orders = [
                tuple(sorted(map(int, own), key=lambda item: (sign * getattr(machines[item], trait), item)))
                for trait, sign in keys
            ]
            found.append(min(orders, key=self._step))
        return ((), *found)

    def _rank(self, clusters: Clusters) -> tuple[float, float]:
        steps = [self._step(order) for order in clusters[1:]]
        return max(steps), sum(steps)

    def _improved(self, clusters: Clusters) -> Clusters:
        """Improve clusters by single exchanges, and by several at once where none helps, until the limit is reached."""
        draw = random.Random(0)
        best, moves = clusters, 0
        while True:
            clusters = self._descended(clusters)
            best = min(best, clusters, key=self._rank)
            if self._left <= 0 or moves >= MOVES_WITHOUT_GAIN:
                return best
            moves = 0 if clusters is best else moves + 1
            clusters = best
            for _ in range(3):
                clusters = draw.choice([*self._neighbors(clusters)] or [clusters])

    def _descended(self, clusters: Clusters) -> Clusters:
        """Repeat the first exchange that helps, until none does."""
        best, improved = self._rank(clusters), True
        while improved and self._left > 0:
            improved = False
            for candidate in self._neighbors(clusters):
                if (rank := self._rank(candidate)) < best:
                    clusters, best, improved = candidate, rank, True
                    break
                if self._left <= 0:
                    break
        return clusters

    def _neighbors(self, clusters: Clusters) -> Iterable[Clusters]:
        """Yield clusters that differ in one or two machines of the slowest cluster, or in their order."""
        slowest = max(range(1, len(clusters)), key=lambda index: self._step(clusters[index]))
        own = clusters[slowest]

        def changed(changes: Mapping[int, tuple[int, ...]]) -> Clusters:
            return tuple(changes.get(index, order) for index, order in enumerate(clusters))

        for place in range(len(own) if len(own) > 1 and not self._all_nodes else 0):
            yield changed({slowest: own[:place] + own[place + 1 :], 0: (*clusters[0], own[place])})
        for other in sorted(range(len(clusters)), key=lambda index: self._step(clusters[index]) if index else -1):
            if other == slowest:
                continue
            theirs = clusters[other]
            for i, place in itertools.product(range(len(theirs)), range(len(own) + 1)):
                taken = (*own[:place], theirs[i], *own[place:])
                if len(theirs) > 1 or not other:
                    yield changed({slowest: taken, other: theirs[:i] + theirs[i + 1 :]})
                if place < len(own):
                    swapped = (*own[:place], theirs[i], *own[place + 1 :])
                    yield changed({slowest: swapped, other: (*theirs[:i], own[place], *theirs[i + 1 :])})
        for i, j in itertools.permutations(range(len(own)), 2):
            rest = own[:i] + own[i + 1 :]
            yield changed({slowest: (*rest[:j], own[i], *rest[j:])})

    def _step_of(self, order: tuple[int, ...]) -> float:
        """Return the seconds of a cluster for a batch; many more if it lacks memory, depending on how much."""
        if not order:
            return float("inf")
        self._left -= len(order)
        rest = self._costs.compute(order[-1])[:, -1]
        for machine, following in reversed([*itertools.pairwise(order)]):
            rest, _ = self._costs.before(machine, following, rest)
        step = self._costs.step(rest[0], order)
        return step if step < float("inf") else 1e9 * (1 + self._lacks(order))

    def _lacks(self, order: tuple[int, ...]) -> float:
        """Return the share of blocks for which a cluster has no memory, and a little for each useless machine."""
        first, useless, count = 0, 0, len(self._costs.blocks)
        for machine in order:
            fits = np.isfinite(self._costs.compute(machine)[first]) if first < count else np.zeros(1, dtype=bool)
            useless += not fits.any()
            first = int(fits.nonzero()[0][-1]) if fits.any() else first
        return 1 - first / count + useless / 1000

    @staticmethod
    def _plan(orders: Iterable[tuple[int, ...]], costs: Costs) -> Plan | None:
        """Return the plan of clusters, cut at the best blocks; None if they do not fit."""
        built = []
        for order in orders:
            rest, cuts = costs.compute(order[-1])[:, -1], []
            for machine, following in reversed([*itertools.pairwise(order)]):
                rest, cut = costs.before(machine, following, rest)
                cuts.append(cut)
            if not rest[0] < float("inf"):
                return None
            starts = [0]
            for cut in reversed(cuts):
                starts.append(int(cut[starts[-1]]))
            built.append((order, starts))
        return costs.plan(built)


def _merged(blocks: Sequence[Block], count: int) -> list[Block]:
    """Merge neighboring blocks, always the two smallest, until `count` are left."""
    left = list(blocks)
    seconds = sum(block.seconds for block in blocks) or 1.0
    memory = sum(block.memory for block in blocks) or 1

    def share(index: int) -> float:
        pair = left[index : index + 2]
        return max(sum(item.seconds for item in pair) / seconds, sum(item.memory for item in pair) / memory)

    while len(left) > count:
        index = min(range(len(left) - 1), key=share)
        left[index : index + 2] = [joined(left[index : index + 2])]
    return left
