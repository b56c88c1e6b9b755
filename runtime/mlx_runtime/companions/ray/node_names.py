"""The names of a cluster's nodes, by which plans place workers."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from mlx_runtime.errors import ClusterError

LABEL = "node"
"""Label of a node with its name: `ray start --labels node=node_2`."""

_ID = "ray.io/node-id"

Facts = Mapping[str, Any]
"""An item of `ray.nodes()`."""


def nodes_with_names(nodes: Sequence[Facts]) -> list[tuple[str, Facts]]:
    """Return the living nodes with CPUs, each with its name.

    The name is the label `node`, or the address if no other node has it, or Ray's id.
    """
    alive = [item for item in nodes if item["Alive"] and item["Resources"].get("CPU")]
    count = Counter(item["NodeManagerAddress"] for item in alive)

    def name(item: Facts) -> str:
        address = item["NodeManagerAddress"]
        return str(item["Labels"].get(LABEL) or (address if count[address] == 1 else item["NodeID"]))

    return [(name(item), item) for item in alive]


def selectors(names: Sequence[str], nodes: Sequence[Facts], *, least: int, patient: bool) -> list[dict[str, str]]:
    """Return Ray's label selectors for the nodes of a plan.

    Returns none if the cluster has none of the nodes, because the plan is for other machines.

    Args:
        names: those in the plan.
        nodes: the answer of `ray.nodes()`.
        least: how many of them a run needs at once.
        patient: wait for nodes that the cluster lacks.

    Raises:
        ClusterError: the cluster lacks nodes, or several have the same name.
    """
    found = nodes_with_names(nodes)
    known, equal = dict(found), [name for name, count in Counter(name for name, _ in found).items() if count > 1]
    if equal and not patient:  # later, a node that has just been restarted may be listed twice
        raise ClusterError(f"several nodes have the label {LABEL}={equal[0]}; start each with another one")
    missing = sorted({*names} - known.keys())
    if len(missing) == len({*names}):
        return []
    if not patient and sum(name in known for name in names) < least:
        raise ClusterError(
            f"the plan has a stage on node {missing[0]}, but the nodes of the cluster are {', '.join(sorted(known))}; "
            "plan for those, with `mlx train clusterize --nodes`"
        )

    def selector(name: str) -> dict[str, str]:
        # Ray may still list a lost node; the one that replaces it has the same label, but another id.
        return {LABEL: name} if name not in known or LABEL in known[name]["Labels"] else {_ID: known[name]["NodeID"]}

    return [selector(name) for name in names]
