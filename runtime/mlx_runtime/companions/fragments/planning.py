"""Plans: which machine holds which blocks of a model, in clusters of machines that each hold all of it."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter, itemgetter

import numpy as np

from mlx_runtime.companions.fragments.costs import Block, Costs, Floats, Machine, Plan
from mlx_runtime.errors import ConfigError
from mlx_runtime.runs.tables import plural

FILE = "fragments.json"

EXACT_MACHINES = 8
"""Maximum number of machines for which all clusters, orders and cuts are compared."""

EXACT_IN_CLUSTER = 6
"""Maximum number of machines of a cluster whose orders and cuts are all compared, if there are more in all."""

TRAITS = ("memory", "bandwidth", "speed")

Cluster = tuple[float, list[int], list[int]]
"""Seconds of a step, machines in order, and the first block of each."""


def plan(
    blocks: Sequence[Block],
    machines: Sequence[Machine],
    *,
    microbatches: int = 4,
    clusters: int | None = None,
    average_every: int = 1,
    all_nodes: bool = False,
    collects: bool = False,
) -> Plan:
    """Return the plan with the most batches per second, among the plans with the shortest step by number of clusters.

    For up to 8 machines, no other clusters, orders and cuts have a shorter step. For more, clusters are chosen
    greedily, and in those with more than 6 machines, orders, too. Machines that would slow down the others stay idle.

    Args:
        blocks: in the order of their execution.
        machines: all that may be used.
        microbatches: parts of a batch that follow each other through a cluster.
        clusters: number of clusters; None for the best.
        average_every: steps between two averages of the clusters.
        all_nodes: leave no machine idle.
        collects: rank 0, which is on the first of the machines that are used, needs memory for a copy of all weights
            and states of optimizers, of which it makes checkpoints.

    Raises:
        ConfigError: the model does not fit; the message has the numbers.
    """
    collected = float(sum(block.weights + block.states for block in blocks)) if collects else 0.0
    _refuse_too_large(blocks, machines, clusters, collected)
    if all_nodes and len(machines) > (most := len(blocks) * (clusters or len(machines))):
        each = f"{plural(len(blocks), 'block')} in {plural(clusters or 1, 'cluster')}"
        raise ConfigError(
            f"{len(machines)} nodes are too many for {each}; omit --all-nodes, or {len(machines) - most} of the nodes"
        )
    counts = range(1, len(machines) + 1) if clusters is None else [clusters]
    rate = attrgetter("batches_per_s")
    found: list[Plan] = []
    for first in range(1 if all_nodes else len(machines)):  # the machine of rank 0
        left = machines[first:]
        kind: type[Exact | Greedy] = Exact if len(left) <= EXACT_MACHINES else Greedy
        plans = [
            replace(item, average_every=average_every, idle=(*machines[:first], *item.idle))
            for item in kind(Costs(blocks, left, microbatches, collected), all_nodes).plans(counts)
        ]
        used = [item for item in plans if machines[first] not in item.idle]
        found += used
        if (kind is Greedy or not collects) and (not plans or max(plans, key=rate) in used):
            break  # an exact plan keeps the machine that collects, so others are compared
    if not found:
        raise ConfigError(_misfit(blocks, machines, clusters, collected))
    return max(found, key=rate)


def _refuse_too_large(
    blocks: Sequence[Block], machines: Sequence[Machine], clusters: int | None, collected: float
) -> None:
    largest, machine = max(blocks, key=lambda item: item.memory), max(machines, key=lambda item: item.memory)
    if largest.memory > machine.memory:
        title = largest.name or "the whole model"
        raise ConfigError(
            f"the model does not fit: {title}, which is not cut, needs {_gb(largest.memory)}, and {machine.name}, the "
            f"largest node, has {_gb(machine.memory)}; use larger nodes or smaller batches"
        )
    least = clusters or 1
    if len(machines) < least or sum(item.memory for item in machines) < least * sum(item.memory for item in blocks):
        raise ConfigError(_misfit(blocks, machines, clusters, collected))


def _misfit(blocks: Sequence[Block], machines: Sequence[Machine], clusters: int | None, collected: float) -> str:
    count, has = clusters or 1, sum(item.memory for item in machines)
    needed = count * sum(block.memory for block in blocks)
    facts = f"it needs {_gb(needed)} in {plural(count, 'cluster')}, and the nodes have {_gb(has)}"
    if needed <= has:
        facts += ", but no cut between blocks makes every stage fit"
    if collected:
        facts += f"; rank 0, on the first node, needs another {_gb(collected)} for checkpoints"
    return f"the model does not fit: {facts}; add nodes or memory, or use smaller batches or fewer clusters"


def _gb(size: float) -> str:
    return f"{size / 1e9:,.2f} GB" if size >= 1e7 else f"{size / 1e6:,.3f} MB"


class Exact:
    """All clusters, orders and cuts of a few machines, by dynamic programming over subsets of them."""

    def __init__(self, costs: Costs, all_nodes: bool) -> None:
        self._costs, count = costs, len(costs.machines)
        self._slowest: dict[tuple[int, int], Floats] = {}  # by the set of machines and the first of them
        self._next: dict[tuple[int, int], tuple[Floats, Floats]] = {}  # following machine, and its first block
        self._best: list[tuple[float, int]] = [(float("inf"), 0)] * (1 << count)  # step, machines in use
        for used in range(1, 1 << count):
            members = [item for item in range(count) if used >> item & 1]
            for first in members:
                self._extend(used, first, [item for item in members if item != first])
            step = costs.step(min(self._slowest[used, first][0] for first in members), members)
            idle = [] if all_nodes else [item for item in members if item or not costs.collected]  # not that of rank 0
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

    def fastest(self) -> Cluster:
        """Return the fastest cluster of all machines, without those that stay idle."""
        step, used = self._best[-1]
        return (step, *self._pipeline(used)) if step < float("inf") else (step, [], [])

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


class Greedy:
    """Deals machines out to clusters. Those of a large one are sorted, and cuts are optimal for their order.

    Of the traits by which machines can be sorted, the one with the fastest plan is used.
    """

    def __init__(self, costs: Costs, all_nodes: bool) -> None:
        self._costs, self._machines, self._all_nodes = costs, costs.machines, all_nodes
        smallest = min(block.memory for block in costs.blocks)
        self._usable = [index for index, item in enumerate(costs.machines) if all_nodes or item.memory >= smallest]
        self._needed = sum(block.memory for block in costs.blocks)

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

    def _pipeline(self, own: list[int]) -> Cluster:
        """Return the fastest pipeline of some machines, without those that are too small, or slow the others down."""
        if len(own) <= EXACT_IN_CLUSTER:
            costs, own = self._costs, sorted(own)
            machines, collected = [costs.machines[item] for item in own], 0.0 if own[0] else costs.collected
            exact = Exact(Costs(costs.blocks, machines, costs.microbatches, collected), self._all_nodes)
            step, order, starts = exact.fastest()
            return step, [own[item] for item in order], starts
        found = self._ordered(own)
        if self._all_nodes:
            return found
        kept = [item for item in own if item == 0 and self._costs.collected]  # the machine of rank 0
        by_memory = [item for item in self._sorted(own, "memory", 1) if item not in kept]
        while found[0] == float("inf") and len(kept) + len(by_memory) > 1:
            del by_memory[0]
            found = self._ordered([*kept, *by_memory])
        for machine in by_memory:
            if left := [item for item in found[1] if item != machine]:
                found = min(found, self._cut(left), key=itemgetter(0))
        return found

    def _ordered(self, own: Sequence[int]) -> Cluster:
        orders = (self._sorted(own, trait, sign) for trait, sign in itertools.product(TRAITS, (1, -1)))
        return min(map(self._cut, orders), key=itemgetter(0))

    def _cut(self, order: list[int]) -> Cluster:
        slowest, starts = self._costs.cut(order)
        return self._costs.step(slowest, order), order, starts
