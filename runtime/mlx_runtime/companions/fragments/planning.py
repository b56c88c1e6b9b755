"""Plans: which machine holds which blocks of a model, in clusters of machines that each hold all of it."""

from collections.abc import Sequence
from dataclasses import replace

from mlx_runtime.companions.fragments.costs import Block, Machine, Plan
from mlx_runtime.companions.fragments.exact import Exact
from mlx_runtime.companions.fragments.greedy import Greedy
from mlx_runtime.errors import ConfigError
from mlx_runtime.runs.tables import plural

FILE = "fragments.json"

EXACT_MACHINES = 8
"""Maximum number of machines for which all clusters, orders and cuts are compared."""


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

    For up to 8 machines, no other clusters, orders and cuts have a shorter step; for more, they are chosen greedily.
    Machines that would slow down the others stay idle.

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
    found: list[Plan] = []
    for first in range(1 if all_nodes else len(machines)):  # the machine of rank 0
        left = machines[first:]
        kind: type[Exact | Greedy] = Exact if len(left) <= EXACT_MACHINES else Greedy
        plans = [
            replace(item, average_every=average_every, idle=(*machines[:first], *item.idle))
            for item in kind(blocks, left, microbatches, all_nodes, collected).plans(counts)
        ]
        used = [item for item in plans if machines[first] not in item.idle]
        found += used
        if (kind is Greedy or not collects) and (not plans or max(plans, key=_rate) in used):
            break  # an exact plan keeps the machine that collects, so others are compared
    if not found:
        raise ConfigError(_misfit(blocks, machines, clusters, collected))
    return max(found, key=_rate)


def _rate(plan: Plan) -> float:
    return plan.batches_per_s


def _refuse_too_large(
    blocks: Sequence[Block], machines: Sequence[Machine], clusters: int | None, collected: float
) -> None:
    largest, machine = max(blocks, key=lambda item: item.memory), max(machines, key=lambda item: item.memory)
    if largest.memory > machine.memory:
        raise ConfigError(
            f"the model does not fit: {_title(largest)}, which is not cut, needs {_gb(largest.memory)}, and "
            f"{machine.name}, the largest node, has {_gb(machine.memory)}; use larger nodes or smaller batches"
        )
    least = clusters or 1
    if len(machines) < least or sum(item.memory for item in machines) < least * sum(item.memory for item in blocks):
        raise ConfigError(_misfit(blocks, machines, clusters, collected))


def _title(block: Block) -> str:
    name = block.name or "the whole model"
    return f"{name} ({block.source})" if block.source else name


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
