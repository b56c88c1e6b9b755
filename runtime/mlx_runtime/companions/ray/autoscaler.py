"""The room of a cluster, and whether an autoscaler adds nodes to it.

Runs in drivers and in the probe, on nodes where every package other than Ray may be missing. Ray has no public API for
the latter: this reads the state that `ray status` shows.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

READ_ONLY = "node_"
"""Beginning of the types that Ray gives to nodes without an autoscaler: `node_<id>`."""


@dataclass(frozen=True)
class Room:
    """The resources of a cluster.

    Args:
        nodes: resources of each living node.
        grows: an autoscaler starts nodes for what does not fit; which and how many is unknown.
    """

    nodes: Sequence[Mapping[str, float]]
    grows: bool = False

    def now(self, **each: float) -> int:
        """Return how many workers, which need these resources each, fit on the nodes that exist. Others may run."""
        return sum(_count(node, each) for node in self.nodes)

    def most(self, **each: float) -> float:
        """Return how many of them fit once an autoscaler has added nodes: infinity if there is one."""
        return math.inf if self.grows else self.now(**each)


def _count(resources: Mapping[str, float], each: Mapping[str, float]) -> int:
    """Return how many workers with `each` of some resources fit on a node."""
    return min(int(resources.get(name, 0) / amount + 1e-9) for name, amount in each.items() if amount)


def room(*, embedded: bool = False) -> Room:
    """Return the room of the cluster that this process is connected to. An embedded Ray has no autoscaler."""
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    kept = [{name: node.get(name, 0) for name in ("CPU", "GPU")} for node in nodes]
    return Room(kept, not embedded and _grows())


def _grows() -> bool:
    """Return True if an autoscaler reports to the cluster."""
    import ray
    from ray.autoscaler.v2.sdk import get_cluster_status
    from ray.experimental.internal_kv import _internal_kv_get

    stored = _internal_kv_get(b"__autoscaling_status")  # of v1, or of the monitor of a cluster without one
    report: dict[str, Any] = (json.loads(stored).get("autoscaler_report") or {}) if stored else {}
    names = report.get("node_type_mapping") or {}
    status = get_cluster_status(ray.get_runtime_context().gcs_address)
    if status.stats.autoscaler_version != "0":
        nodes = [*status.active_nodes, *status.idle_nodes]
        names = {node.node_id: node.ray_node_type_name for node in nodes}
    return any(not name.startswith(READ_ONLY) for name in names.values())
