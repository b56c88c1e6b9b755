"""The room of a cluster, now and after its autoscaler has added every node that it may.

Runs in drivers and in the probe, on nodes where every package other than Ray may be missing. Ray has no public API for
this: limits are in the file that `ray start --autoscaling-config` reads, and the state is what `ray status` shows.
"""

import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

READ_ONLY = "node_"
"""Beginning of the types that Ray gives to nodes without an autoscaler: `node_<id>`."""

HEAD = "node:__internal_head__"
"""Resource of the head node."""


@dataclass(frozen=True)
class NodeType:
    """A type of nodes, of which the autoscaler keeps at most `count`, with the resources of each."""

    name: str
    count: int
    resources: Mapping[str, float]


@dataclass(frozen=True)
class Room:
    """The resources of a cluster.

    Args:
        nodes: resources of each living node.
        head: resources of the head node, which is one of them.
        types: the nodes that the autoscaler may start; empty without an autoscaler, None if its limits are unknown.
        max_nodes: maximum number of nodes that the autoscaler keeps, of all types together.
    """

    nodes: Sequence[Mapping[str, float]]
    head: Mapping[str, float]
    types: Sequence[NodeType] | None = ()
    max_nodes: int = 0

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "Room":
        """Return the room that `dataclasses.asdict` has converted."""
        types = fields["types"]
        return cls(**{**fields, "types": types and [NodeType(**item) for item in types]})

    @property
    def grows(self) -> bool:
        """True if the cluster has an autoscaler."""
        return self.types is None or bool(self.types)

    @property
    def gpus(self) -> float:
        """The GPUs that a run may count on, if it uses them by default."""
        return self.now(GPU=1) if self.types is None else self.most(GPU=1)

    def now(self, **each: float) -> int:
        """Return how many workers, which need these resources each, fit on the nodes that exist. Others may run."""
        return sum(_count(node, each) for node in self.nodes)

    def most(self, **each: float) -> float:
        """Return how many of them fit once the autoscaler has added all nodes; infinity if its limits are unknown."""
        if self.types is None:
            return math.inf
        added, left = 0, self.max_nodes
        for fit, count in sorted(((_count(item.resources, each), item.count) for item in self.types), reverse=True):
            added += fit * min(count, left)
            left -= min(count, left)
        return max(self.now(**each), _count(self.head, each) + added)

    def limits(self) -> str:
        """Return the limits of the autoscaler, like `2 nodes of gpu (8 CPUs, 1 GPU each)`."""
        if self.types is None:
            return "an unknown number of nodes"
        parts = []
        for item in self.types:
            amounts = [_amount(name, item.resources.get(name, 0)) for name in ("CPU", "GPU")]
            shown = ", ".join(text for text in amounts if not text.startswith("0 "))
            parts.append(f"{_amount('node', item.count)} of {item.name} ({shown} each)")
        most = sum(item.count for item in self.types) > self.max_nodes
        return " and ".join(parts) + (f", at most {_amount('node', self.max_nodes)} in total" if most else "")


def _amount(noun: str, number: float) -> str:
    return f"{number:g} {noun}{'s' * (number != 1)}"


def _count(resources: Mapping[str, float], each: Mapping[str, float]) -> int:
    """Return how many workers with `each` of some resources fit on a node."""
    return min(int(resources.get(name, 0) / amount + 1e-9) for name, amount in each.items() if amount)


def room(*, embedded: bool = False) -> Room:
    """Return the room of the cluster that this process is connected to. An embedded Ray has no autoscaler."""
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    kept = [{name: node.get(name, 0) for name in ("CPU", "GPU")} for node in nodes]
    head = next((item for item, node in zip(kept, nodes, strict=True) if HEAD in node), {})
    if embedded:
        return Room(kept, head)
    if (config := _config()) is not None:
        most, types = int(config.get("max_workers", 0)), []
        for name, item in config.get("available_node_types", {}).items():
            count = int(item.get("max_workers", 0 if name == config.get("head_node_type") else most))
            if count and not item.get("resources"):
                return Room(kept, head, None)
            if count:
                types.append(NodeType(name, count, {key: item["resources"].get(key, 0) for key in ("CPU", "GPU")}))
        return Room(kept, head, types, most)
    return Room(kept, head, None if _is_reported() else ())


def _config() -> dict[str, Any] | None:
    """Return the config of the autoscaler if it runs on this node: the head node, on which jobs run, too."""
    import ray

    from mlx_runtime.storage.documents import from_yaml

    address = f"--gcs-address={ray.get_runtime_context().gcs_address}"
    prefix = "--autoscaling-config="
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError, ValueError):
            words = file.read_bytes().decode(errors="replace").split("\0")
            if address in words and (paths := [word for word in words if word.startswith(prefix)]):
                found: dict[str, Any] = from_yaml(Path(paths[0].removeprefix(prefix)).expanduser().read_bytes())
                return found
    return None


def _is_reported() -> bool:
    """Return True if an autoscaler that runs elsewhere, such as in a container of its own, reports to the cluster."""
    report, status = _report(), _status()
    names = report.get("node_type_mapping") or {}
    if status.stats.autoscaler_version != "0":
        nodes = [*status.active_nodes, *status.idle_nodes]
        names = {node.node_id: node.ray_node_type_name for node in nodes}
    return any(not name.startswith(READ_ONLY) for name in names.values())


def _report() -> dict[str, Any]:
    """Return the last report of an autoscaler v1, or of the monitor of a cluster without one."""
    from ray.experimental.internal_kv import _internal_kv_get

    status = _internal_kv_get(b"__autoscaling_status")  # of type `AutoscalerSummary`
    return (json.loads(status).get("autoscaler_report") or {}) if status else {}


def _status() -> Any:
    """Return the `ClusterStatus`, to which an autoscaler v2 reports."""
    import ray
    from ray.autoscaler.v2.sdk import get_cluster_status

    return get_cluster_status(ray.get_runtime_context().gcs_address)


def activity() -> str | None:
    """Return what the autoscaler does about requests, like `starts 2 nodes of gpu`, or None if it does nothing."""
    report = _report()
    return next(activities(report) if report else _v2_activities(_status()), None)


def activities(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield the activities in a report of autoscaler v1, problems first."""
    availabilities = (report.get("node_availability_summary") or {}).get("node_availabilities", {})
    for name, item in availabilities.items():
        if why := item.get("unavailable_node_information"):
            yield f"cannot start {name}: {why['category']}: {why['description']}"
    starting = dict(report.get("pending_launches") or {})
    for _, name, _ in report.get("pending_nodes") or ():
        starting[name] = starting.get(name, 0) + 1
    if starting:
        yield _starting(starting)


def _v2_activities(status: Any) -> Iterator[str]:
    for launch in status.failed_launches:
        yield f"cannot start {launch.ray_node_type_name}: {launch.details or 'no reason given'}"
    starting: dict[str, int] = {}
    for launch in status.pending_launches:
        starting[launch.ray_node_type_name] = starting.get(launch.ray_node_type_name, 0) + launch.count
    for node in status.pending_nodes:
        starting[node.ray_node_type_name] = starting.get(node.ray_node_type_name, 0) + 1
    if starting:
        yield _starting(starting)


def _starting(counts: Mapping[str, int]) -> str:
    return "starts " + " and ".join(f"{_amount('node', count)} of {name}" for name, count in counts.items())
