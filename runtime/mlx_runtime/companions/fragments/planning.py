"""Plans: which machine holds which blocks of a model, in clusters of machines that each hold all of it."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from mlx_runtime.companions.fragments.costs import TRAITS, Block, Machine, Plan, stages_of
from mlx_runtime.companions.fragments.exact import Exact
from mlx_runtime.companions.fragments.search import Search
from mlx_runtime.errors import ConfigError
from mlx_runtime.runs.tables import plural

FILE = "fragments.json"

EXACT_MACHINES = 8
"""Maximum number of machines for which all clusters, orders and cuts are compared."""

SEARCH_STAGES = 100_000
"""Limit of the search for more machines: number of stages whose cuts are optimized. About 3 seconds."""


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
) -> Exact | Search:
    if len(machines) <= EXACT_MACHINES:
        return Exact(blocks, machines, microbatches, all_nodes)
    return Search(blocks, machines, microbatches, average_every, all_nodes, int(share * SEARCH_STAGES))


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
