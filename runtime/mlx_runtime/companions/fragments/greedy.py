"""Plans of many machines, made greedily."""

import itertools
from collections.abc import Iterable, Sequence
from operator import itemgetter

from mlx_runtime.companions.fragments.costs import TRAITS, Block, Costs, Machine, Plan

Pipeline = tuple[float, list[int], list[int]]
"""Seconds of a step, machines in order, and the first block of each."""


class Greedy:
    """Deals machines out to clusters, and sorts those of each; cuts are optimal for the order.

    Of the traits by which machines can be sorted, the one with the fastest plan is used.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        machines: Sequence[Machine],
        microbatches: int,
        all_nodes: bool,
        collected: float = 0.0,
    ) -> None:
        self._costs = Costs(blocks, machines, microbatches, collected)
        self._machines, self._all_nodes, self._collects = machines, all_nodes, collected > 0
        smallest = min(block.memory for block in blocks)
        self._usable = [index for index, item in enumerate(machines) if all_nodes or item.memory >= smallest]
        self._needed = sum(block.memory for block in blocks)

    def plans(self, counts: Iterable[int]) -> Iterable[Plan]:
        """Yield a plan for each number of clusters for which one is found."""
        memory = sum(self._machines[item].memory for item in self._usable)
        for count in counts:
            if count > len(self._usable) or count * self._needed > memory:
                continue
            found = [[self._pipeline(own) for own in self._divided(count, trait)] for trait in TRAITS]
            best = min(found, key=lambda pipelines: max(step for step, _, _ in pipelines))
            if max(step for step, _, _ in best) < float("inf"):
                yield self._costs.plan([(order, starts) for _, order, starts in best])

    def _sorted(self, machines: Iterable[int], trait: str, sign: int = -1) -> list[int]:
        return sorted(machines, key=lambda item: (sign * getattr(self._machines[item], trait), item))

    def _divided(self, count: int, trait: str) -> list[list[int]]:
        """Give each machine to the cluster that lacks most memory, or else is slowest."""
        clusters: list[list[int]] = [[] for _ in range(count)]

        def has(own: Sequence[int]) -> tuple[float, float]:
            memory = sum(self._machines[item].memory for item in own)
            return min(memory / self._needed, 1.1), sum(self._machines[item].speed for item in own)

        for item in self._sorted(self._usable, trait):
            min(clusters, key=has).append(item)
        return clusters

    def _pipeline(self, own: list[int]) -> Pipeline:
        """Return the fastest pipeline of some machines, without those that are too small, or slow the others down."""
        found = self._ordered(own)
        if self._all_nodes:
            return found
        kept = [item for item in own if item == 0 and self._collects]  # the machine of rank 0
        by_memory = [item for item in self._sorted(own, "memory", 1) if item not in kept]
        while found[0] == float("inf") and len(kept) + len(by_memory) > 1:
            del by_memory[0]
            found = self._ordered([*kept, *by_memory])
        for machine in by_memory:
            if left := [item for item in found[1] if item != machine]:
                found = min(found, self._cut(left), key=itemgetter(0))
        return found

    def _ordered(self, own: Sequence[int]) -> Pipeline:
        orders = (self._sorted(own, trait, sign) for trait, sign in itertools.product(TRAITS, (1, -1)))
        return min(map(self._cut, orders), key=itemgetter(0))

    def _cut(self, order: list[int]) -> Pipeline:
        slowest, starts = self._costs.cut(order)
        return self._costs.step(slowest, order), order, starts
