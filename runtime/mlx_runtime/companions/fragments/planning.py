"""Plans: which machine holds which blocks of a model, in clusters of machines that each hold all of it.

A cluster is a pipeline. Its machines, the stages, hold consecutive blocks and send activations forward and gradients
back. A batch passes in microbatches, so a cluster of S stages takes (M + S - 1) / M times as long for it as its
slowest stage, where M is the number of microbatches (GPipe, arXiv 1811.06965).
"""

import functools
import itertools
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mlx_runtime.errors import ConfigError
from mlx_runtime.runs.tables import plural

FILE = "fragments.json"

EXACT_MACHINES = 8
"""Maximum number of machines for which all clusters, orders and cuts are compared."""

SEARCHED_BLOCKS = 128
"""Number of blocks to which neighbors are merged while clusters of more machines are searched for."""

SEARCH_STAGES = 100_000
"""Limit of that search: number of stages whose cuts are optimized. About 3 seconds."""

STARTS_PER_COUNT, TRIED_STARTS = 2, 12
"""Number of clusterings that are improved in that search: with the same number of clusters, and in all."""

MOVES_WITHOUT_GAIN = 50
"""Number of random changes in a row that lead to nothing better, after which that search ends."""

REORDERED_MACHINES = 6
"""Maximum number of machines in a cluster for which all orders are compared after that search."""

TRAITS = ("memory", "bandwidth", "speed")

Clusters = tuple[tuple[int, ...], ...]
"""Machines by cluster, in the order of their stages. The first cluster has the idle machines."""

Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Block:
    """Part of a model that is not cut. Sizes are in bytes, and for one batch."""

    name: str  # path of its module
    parameters: int  # number
    weights: int  # with buffers
    gradients: int = 0
    states: int = 0  # of optimizers
    activations: int = 0  # kept until the backward pass
    sends: int = 0  # to the next block, in the forward pass
    returns: int = 0  # from the next block, in the backward pass
    seconds: float = 0  # of the forward and backward pass, at speed 1
    source: str = ""  # class of the module, and its line

    @property
    def memory(self) -> int:
        return self.weights + self.gradients + self.states + self.activations


@dataclass(frozen=True)
class Machine:
    """A node that can hold blocks."""

    name: str
    memory: float  # bytes
    bandwidth: float = float("inf")  # bytes per second, in each direction
    speed: float = 1.0  # relative to the one on which blocks were measured


@dataclass(frozen=True)
class Stage:
    """Consecutive blocks on a machine."""

    machine: Machine
    first: int  # block
    last: int  # block, inclusive
    memory: int  # bytes
    parameters: int
    weights: int  # bytes
    compute_s: float  # of a batch
    transfer_s: float  # to and from the next stage


@dataclass(frozen=True)
class Plan:
    """Clusters, each of which is a pipeline of stages that holds the whole model."""

    blocks: tuple[Block, ...]
    clusters: tuple[tuple[Stage, ...], ...]
    idle: tuple[Machine, ...]
    microbatches: int
    average_every: int

    def step_s(self, cluster: int) -> float:
        """Return the seconds that a cluster takes for a batch, without the averaging of clusters."""
        stages = self.clusters[cluster]
        slowest = max(stage.compute_s + stage.transfer_s for stage in stages)
        return slowest * (self.microbatches + len(stages) - 1) / self.microbatches

    @property
    def average_s(self) -> float:
        """Seconds per step for averaging the weights of clusters in rings, whose slowest machine determines them."""
        others = len(self.clusters) - 1
        slowest = max(stage.weights / stage.machine.bandwidth for stages in self.clusters for stage in stages)
        return 2 * others / (others + 1) * slowest / self.average_every

    @property
    def total_s(self) -> float:
        """Seconds between two steps, if clusters wait for each other."""
        return max(map(self.step_s, range(len(self.clusters)))) + self.average_s

    @property
    def batches_per_s(self) -> float:
        return len(self.clusters) / self.total_s if self.total_s else float("inf")


def roles(stages: int) -> list[str]:
    """Return the role of each stage: the first one reads the rows, and the last one computes the loss."""
    return ["Root", *["Stem"] * (stages - 2), *["Leaf"] * (stages > 1)]


def plan(
    blocks: Sequence[Block],
    machines: Sequence[Machine],
    *,
    microbatches: int = 4,
    clusters: int | None = None,
    average_every: int = 1,
    all_nodes: bool = False,
    same_cuts: bool = False,
) -> Plan:
    """Return the plan with the most batches per second, among the plans with the shortest step by number of clusters.

    For up to 8 machines, no other clusters, orders and cuts have a shorter step; for more, they are searched for.
    Machines that would slow down the others stay idle.

    Args:
        blocks: in the order of their execution.
        machines: all that may be used.
        microbatches: parts of a batch that follow each other through a cluster.
        clusters: number of clusters; None for the best.
        average_every: steps between two averages of the clusters.
        all_nodes: leave no machine idle.
        same_cuts: cut all clusters at the same blocks. Machines are then grouped by stage, and a group counts as its
            slowest and smallest machine, so that a step may be faster than planned, but not the fastest of all.

    Raises:
        ConfigError: the model does not fit; the message has the numbers.
    """
    _refuse_too_large(blocks, machines, clusters)
    if all_nodes and len(machines) > (most := len(blocks) * (clusters or len(machines))):
        each = f"{plural(len(blocks), 'block')} in {plural(clusters or 1, 'cluster')}"
        raise ConfigError(
            f"{len(machines)} nodes are too many for {each}; omit --all-nodes, or {len(machines) - most} of the nodes"
        )
    counts = range(1, len(machines) + 1) if clusters is None else [clusters]
    if same_cuts:
        plans = [item for count in counts for item in _alike(blocks, machines, microbatches, count, all_nodes)]
    else:
        plans = [*_planner(blocks, machines, microbatches, average_every, all_nodes).plans(counts)]
    if not plans:
        raise ConfigError(_misfit(blocks, machines, clusters))
    return max((replace(item, average_every=average_every) for item in plans), key=lambda item: item.batches_per_s)


def _planner(
    blocks: Sequence[Block],
    machines: Sequence[Machine],
    microbatches: int,
    average_every: int,
    all_nodes: bool,
    share: float = 1.0,
) -> "_Exact | _Search":
    if len(machines) <= EXACT_MACHINES:
        return _Exact(blocks, machines, microbatches, all_nodes)
    return _Search(blocks, machines, microbatches, average_every, all_nodes, int(share * SEARCH_STAGES))


def _alike(
    blocks: Sequence[Block], machines: Sequence[Machine], microbatches: int, count: int, all_nodes: bool
) -> Iterator[Plan]:
    """Yield plans of a number of clusters with the same cuts."""
    for groups in _groupings(machines, count) if not (all_nodes and len(machines) % count) else ():
        weakest = [
            Machine(str(index), *(min(getattr(item, trait) for item in group) for trait in TRAITS))
            for index, group in enumerate(groups)
        ]
        for found in _planner(blocks, weakest, microbatches, 1, all_nodes, 1 if count == 1 else 0.05).plans([1]):
            [stages] = found.clusters
            order = [groups[int(stage.machine.name)] for stage in stages]
            starts = [stage.first for stage in stages]
            clusters = tuple(stages_of(blocks, own, starts) for own in zip(*order, strict=True))
            used = {machine.name for group in order for machine in group}
            idle = tuple(machine for machine in machines if machine.name not in used)
            yield Plan(tuple(blocks), clusters, idle, microbatches, 1)


def _groupings(machines: Sequence[Machine], size: int) -> Iterator[list[list[Machine]]]:
    """Yield ways to group machines: all if they are few, otherwise groups of similar ones.

    Machines of a group are in the order of their bandwidth, so that the first cluster has the fastest links.
    """
    if len(machines) > EXACT_MACHINES and size > 1:
        for trait in TRAITS:
            ordered = sorted(machines, key=lambda item: getattr(item, trait), reverse=True)
            yield [ordered[first : first + size] for first in range(0, len(ordered) - size + 1, size)]
    elif len(machines) < size:
        yield []
    else:
        first, *others = sorted(machines, key=lambda item: item.bandwidth, reverse=True)
        for chosen in itertools.combinations(others, size - 1):
            for found in _groupings([item for item in others if item not in chosen], size):
                yield [[first, *chosen], *found]
        if len(machines) % size:
            yield from _groupings(others, size)


def stages_of(blocks: Sequence[Block], machines: Sequence[Machine], starts: Sequence[int]) -> tuple[Stage, ...]:
    """Return the stages of machines that begin with the given blocks."""
    stages = []
    for index, (machine, first) in enumerate(zip(machines, starts, strict=True)):
        after = starts[index + 1] if index + 1 < len(starts) else len(blocks)
        own, link = blocks[first:after], machine.bandwidth
        crossing = 0
        if after < len(blocks):
            link, crossing = min(link, machines[index + 1].bandwidth), own[-1].sends + own[-1].returns
        stages.append(
            Stage(
                machine,
                first,
                after - 1,
                sum(block.memory for block in own) + (blocks[first - 1].sends if first else 0),
                sum(block.parameters for block in own),
                sum(block.weights for block in own),
                sum(block.seconds for block in own) / machine.speed,
                crossing / link,
            )
        )
    return tuple(stages)


class _Costs:
    """Seconds of stages: arrays over the first block and the block after the last one; infinite if it does not fit."""

    def __init__(self, blocks: Sequence[Block], machines: Sequence[Machine], microbatches: int) -> None:
        self.blocks, self.machines, self.microbatches = blocks, machines, microbatches
        self._memory = np.cumsum([0.0, *(block.memory for block in blocks)])
        self._seconds = np.cumsum([0.0, *(block.seconds for block in blocks)])
        self._sends = np.array([0.0, *(block.sends for block in blocks)])
        self._crossing = np.array([0.0, *(block.sends + block.returns for block in blocks)])
        self._of_kind: dict[tuple[float, float], Floats] = {}

    def compute(self, machine: int) -> Floats:
        """Return the seconds of `[first, after)` on a machine, (blocks, blocks + 1)."""
        kind = self.machines[machine]
        key = (kind.memory, kind.speed)
        if key not in self._of_kind:
            total = self._memory[None, :] - self._memory[:-1, None] + self._sends[:-1, None]
            seconds = (self._seconds[None, :] - self._seconds[:-1, None]) / kind.speed
            fits = (total <= kind.memory) & np.triu(np.ones_like(seconds, dtype=bool), 1)
            self._of_kind[key] = np.where(fits, seconds, np.inf)
        return self._of_kind[key]

    def transfer(self, machine: int, following: int) -> Floats:
        """Return the seconds of a cut after each block, (blocks + 1,)."""
        link = min(self.machines[machine].bandwidth, self.machines[following].bandwidth)
        transfer: Floats = self._crossing / link
        return transfer

    def before(self, machine: int, following: int, rest: Floats) -> tuple[Floats, np.ndarray[Any, Any]]:
        """Put a machine before others, whose slowest stage takes `rest` from each block on.

        Return the same for all of them, and the block at which the others begin.
        """
        inner = slice(1, len(self.blocks))
        own = self.compute(machine)[:, inner] + self.transfer(machine, following)[inner]
        slowest = np.maximum(own, rest[inner])
        if not slowest.shape[1]:
            return np.full(len(self.blocks), np.inf), np.zeros(len(self.blocks), dtype=int)
        cut = slowest.argmin(axis=1)
        return np.take_along_axis(slowest, cut[:, None], axis=1)[:, 0], cut + 1

    def factor(self, stages: int) -> float:
        return (self.microbatches + stages - 1) / self.microbatches

    def plan(self, clusters: Iterable[tuple[Sequence[int], Sequence[int]]]) -> Plan:
        """Return the plan of clusters, given as machines in order and the first block of each."""
        stages = [stages_of(self.blocks, [self.machines[item] for item in order], starts) for order, starts in clusters]
        used = {stage.machine.name for item in stages for stage in item}
        idle = tuple(item for item in self.machines if item.name not in used)
        return Plan(tuple(self.blocks), tuple(stages), idle, self.microbatches, 1)


class _Exact:
    """All clusters, orders and cuts of a few machines, by dynamic programming over subsets of them."""

    def __init__(
        self, blocks: Sequence[Block], machines: Sequence[Machine], microbatches: int, all_nodes: bool
    ) -> None:
        self._costs = costs = _Costs(blocks, machines, microbatches)
        count = len(machines)
        self._slowest: dict[tuple[int, int], Floats] = {}  # by the set of machines and the first of them
        self._next: dict[tuple[int, int], tuple[Floats, Floats]] = {}  # following machine, and its first block
        self._best: list[tuple[float, int]] = [(float("inf"), 0)] * (1 << count)  # step, machines in use
        for used in range(1, 1 << count):
            members = [item for item in range(count) if used >> item & 1]
            for first in members:
                self._extend(used, first, [item for item in members if item != first])
            step = min(self._slowest[used, first][0] for first in members) * costs.factor(len(members))
            smaller = [] if all_nodes else [self._best[used ^ 1 << item] for item in members]
            self._best[used] = min([(float(step), used), *smaller], key=lambda item: item[0])

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


class _Search:
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
        self._whole = _Costs(blocks, machines, microbatches)
        self._costs = _Costs(_merged(blocks, SEARCHED_BLOCKS), machines, microbatches)
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
        exact = _Exact(self._costs.blocks, own, self._costs.microbatches, self._all_nodes)
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
        step = float(rest[0]) * self._costs.factor(len(order))
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
    def _plan(orders: Iterable[tuple[int, ...]], costs: _Costs) -> Plan | None:
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


def joined(blocks: Sequence[Block]) -> Block:
    """Return consecutive blocks as one, with the name of the first."""
    added = ("parameters", "weights", "gradients", "states", "activations", "seconds")
    sums = {name: sum(getattr(block, name) for block in blocks) for name in added}
    return replace(blocks[-1], name=blocks[0].name, **sums)


def _refuse_too_large(blocks: Sequence[Block], machines: Sequence[Machine], clusters: int | None) -> None:
    largest, machine = max(blocks, key=lambda item: item.memory), max(machines, key=lambda item: item.memory)
    if largest.memory > machine.memory:
        raise ConfigError(
            f"the model does not fit: {_title(largest)}, which is not cut, needs {_gb(largest.memory)}, and "
            f"{machine.name}, the largest node, has {_gb(machine.memory)}; use larger nodes or smaller batches"
        )
    least = clusters or 1
    if len(machines) < least or sum(item.memory for item in machines) < least * sum(item.memory for item in blocks):
        raise ConfigError(_misfit(blocks, machines, clusters))


def _title(block: Block) -> str:
    name = block.name or "the whole model"
    return f"{name} ({block.source})" if block.source else name


def _misfit(blocks: Sequence[Block], machines: Sequence[Machine], clusters: int | None) -> str:
    needed, has = sum(block.memory for block in blocks), sum(item.memory for item in machines)
    title, several = "the model does not fit", clusters is not None and clusters > 1
    if several:
        title = f"{clusters} clusters, each with the whole model, do not fit"
        needed *= clusters or 1
    rounded = "" if needed > has else ", but no cut between blocks makes every stage fit"
    count = f"{len(machines)} nodes have" if len(machines) > 1 else "the node has"
    return (
        f"{title}: {'they need' if several else 'it needs'} {_gb(needed)}, and {count} {_gb(has)}{rounded}; "
        f"add nodes or memory, use smaller batches{', or fewer clusters' if several else ''}"
    )


def _gb(size: float) -> str:
    return f"{size / 1e9:,.2f} GB" if size >= 1e7 else f"{size / 1e6:,.3f} MB"
