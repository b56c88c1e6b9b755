"""Exact plans of a few machines."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from mlx_runtime.companions.fragments.costs import Block, Costs, Floats, Machine, Plan


class Exact:
    """All clusters, orders and cuts of a few machines, by dynamic programming over subsets of them."""

    def __init__(
        self,
        blocks: Sequence[Block],
        machines: Sequence[Machine],
        microbatches: int,
        all_nodes: bool,
        collected: float = 0.0,
    ) -> None:
        self._costs = costs = Costs(blocks, machines, microbatches, collected)
        count = len(machines)
        self._slowest: dict[tuple[int, int], Floats] = {}  # by the set of machines and the first of them
        self._next: dict[tuple[int, int], tuple[Floats, Floats]] = {}  # following machine, and its first block
        self._best: list[tuple[float, int]] = [(float("inf"), 0)] * (1 << count)  # step, machines in use
        for used in range(1, 1 << count):
            members = [item for item in range(count) if used >> item & 1]
            for first in members:
                self._extend(used, first, [item for item in members if item != first])
            step = costs.step(min(self._slowest[used, first][0] for first in members), members)
            idle = [] if all_nodes else [item for item in members if item or not collected]  # never that of rank 0
            smaller = [self._best[used ^ 1 << item] for item in idle]
            self._best[used] = min([(step, used), *smaller], key=lambda item: item[0])

    def _extend(self, used: int, first: int, others: list[int]) -> None:
        if not others:
            self._slowest[used, first] = self._costs.compute(first)[:, -1]
            return
        found = [self._costs.before(first, item, self._slowest[used ^ 1 << first, item]) for item in others]
        all_slowest = np.stack([slowest for slowest, _ in found])
        choice = all_slowest.argmin(axis=0)
        rows = np.arange(all_slowest.shape[1])
        self._slowest[used, first] = all_slowest[choice, rows]
        self._next[used, first] = np.array(others)[choice], np.stack([cut for _, cut in found])[choice, rows]

    def plans(self, counts: Iterable[int]) -> Iterable[Plan]:
        """Yield the plan with the shortest step for each number of clusters that is possible."""
        everything = len(self._best) - 1
        tables: list[dict[int, tuple[float, float, int]]] = [{0: (0.0, 0.0, 0)}]  # slowest, sum, machines of the last
        for _ in range(max(counts)):
            tables.append(self._with_another(tables[-1]))
        for count in counts:
            slowest, _, _ = tables[count].get(everything, (float("inf"), 0, 0))
            if slowest < float("inf"):
                clusters, left = [], everything
                for table in reversed(tables[1 : count + 1]):
                    own = table[left][2]
                    clusters.append(self._pipeline(self._best[own][1]))
                    left ^= own
                yield self._costs.plan(sorted(clusters))

    def _with_another(self, table: Mapping[int, tuple[float, float, int]]) -> dict[int, tuple[float, float, int]]:
        """Return the best clusters of each set of machines, given those with one cluster less."""
        found: dict[int, tuple[float, float, int]] = {}
        for used in range(1, len(self._best)):
            lowest, own = used & -used, used
            while own:  # all subsets with the first machine, which belongs to some cluster
                before = table.get(used ^ own)
                if own & lowest and before is not None:
                    step = self._best[own][0]
                    candidate = max(before[0], step), before[1] + step, own
                    if candidate < found.get(used, (float("inf"), float("inf"), 0)):
                        found[used] = candidate
                own = (own - 1) & used
        return found

    def _pipeline(self, used: int) -> tuple[list[int], list[int]]:
        members = [item for item in range(len(self._costs.machines)) if used >> item & 1]
        first, block = min(members, key=lambda item: float(self._slowest[used, item][0])), 0
        order, starts = [first], [0]
        while used ^ 1 << first:
            following, cuts = self._next[used, first]
            used, first, block = used ^ 1 << first, int(following[block]), int(cuts[block])
            order.append(first)
            starts.append(block)
        return order, starts
