"""The names of a cluster's nodes, by which plans place workers."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from mlx_runtime.errors import ClusterError

LABEL = "node"
"""Label of a node with its name: `ray start --labels node=node_2`."""

_ID = "ray.io/node-id"


def named_nodes() -> dict[str, Mapping[str, Any]]:
    """Return Ray's facts about the living nodes with CPUs, by name.

    The name is the label `node`, or the address if no other node has it, or Ray's id.
    """
    alive = [item for item in ray.nodes() if item["Alive"] and item["Resources"].get("CPU")]
    count = Counter(item["NodeManagerAddress"] for item in alive)

    def name(item: Mapping[str, Any]) -> str:
        address = item["NodeManagerAddress"]
        return str(item["Labels"].get(LABEL) or (address if count[address] == 1 else item["NodeID"]))

    return {name(item): item for item in alive}


def selectors(names: Sequence[str], *, patient: bool = False) -> list[dict[str, str]]:
    """Return Ray's label selectors for nodes by name; none if all names are those of other machines.

    Args:
        names: those in a plan, which may be for other machines.
        patient: wait for nodes that the cluster lacks, which must have labels.

    Raises:
        ClusterError: the cluster lacks some of the nodes.
    """
    known = named_nodes()
    missing = sorted({name for name in names if name not in known})
    if not patient and len(missing) == len({*names}):
        return []
    if missing and not patient:
        raise ClusterError(
            f"the plan has a stage on node {missing[0]}, but the nodes of the cluster are {', '.join(sorted(known))}; "
            "plan again with `mlx train clusterize --ray-address`"
        )
    return [{_ID: known[name]["NodeID"]} if name in known else {LABEL: name} for name in names]
