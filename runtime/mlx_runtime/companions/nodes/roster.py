"""The machines of a run, as `cfg.nodes` lists them."""

import ipaddress
import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mlx_runtime.errors import ConfigError, suggest
from mlx_runtime.storage.documents import NUMBER, TEXT, Kind, from_json, is_name, mapping_of, misfit
from mlx_runtime.storage.local import open_regular

KEY_BYTES = 16
"""Minimum length of the key of a run."""

FILE_BYTES = 1 << 20

_COUNT = Kind("a whole number above 0", lambda value: type(value) is int and 0 < value < 1 << 16)
_SIZE = Kind("a number above 0", lambda value: NUMBER.fits(value) and 0 < value < 1e9)
_SIZES = {"ram": _SIZE, "bandwidth": _SIZE, "speed": _SIZE}
_FIELDS: dict[str, Kind] = {
    "IP": TEXT,
    "name": Kind("the name of a node", is_name),
    "benchmarks": mapping_of(NUMBER),
    "slots": _COUNT,
    "ssh": TEXT,
    "folder": TEXT,
    "command": TEXT,
    **_SIZES,
}
_ALIASES: dict[str, str] = {"ip": "IP", "address": "IP"}


@dataclass(frozen=True)
class Node:
    """One machine of a run."""

    name: str  # like `node_0`
    host: str | None = None  # address in the network of the run; None if it is not known in advance
    port: int = 0  # at which others join, if it is the first; 0 for any
    ram: float | None = None  # GB of memory, of GPUs or of the machine
    bandwidth: float | None = None  # Mbps
    speed: float | None = None  # relative to other nodes
    slots: int | None = None  # number of workers; None for an equal share
    ssh: str | None = None  # destination at which the first machine starts this one
    folder: str | None = None  # in which SSH starts it
    command: str = "mlx"  # there


def nodes_of(cfg: Any) -> list[Node]:
    """Return the machines of a run with the slots of each, the first one first; raise ConfigError for wrong ones."""
    if isinstance(cfg.nodes, int) and not isinstance(cfg.nodes, bool):
        if cfg.nodes < 1:
            raise ConfigError(f"cfg.nodes is {cfg.nodes}; the minimum is 1, this machine alone")
        nodes, title = [Node(f"node_{number}") for number in range(cfg.nodes)], f"cfg.nodes={cfg.nodes}"
    else:
        if not cfg.nodes:
            raise ConfigError(
                "cfg.engine=nodes needs the machines: cfg.nodes=nodes.json, or their number, including this one"
            )
        nodes, title = read(Path(str(cfg.nodes))), str(cfg.nodes)
    return _with_slots(nodes, cfg.start_workers, title)


def _with_slots(nodes: list[Node], workers: int, title: str) -> list[Node]:
    given = sum(node.slots or 0 for node in nodes)
    open_ = [node for node in nodes if node.slots is None]
    if workers < given + len(open_):
        raise ConfigError(
            f"cfg.start_workers={workers} is too few for {title}: its {len(nodes)} machines need {given + len(open_)}"
        )
    if not open_ and workers > given:
        raise ConfigError(f"cfg.start_workers={workers} is not the number of slots in {title}, {given}")
    share, more = divmod(workers - given, len(open_) or 1)
    shares = {node.name: share + (number < more) for number, node in enumerate(open_)}
    return [replace(node, slots=node.slots or shares[node.name]) for node in nodes]


def read(file: Path) -> list[Node]:
    """Read nodes.json; raise ConfigError with the file, the node and the field of the first problem."""
    try:
        with open_regular(str(file)) as stream:
            content = stream.read(FILE_BYTES + 1)
        content = content if len(content) <= FILE_BYTES else b""
        entries = from_json(content, {})
        json.loads(content, object_pairs_hook=_without_duplicates)
        if not entries:
            raise ValueError("it lists no machines" if content else f"it has more than {FILE_BYTES} bytes")
    except OSError as error:
        raise ConfigError(f"cannot read {file}, the list of machines: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"{file}: {error}") from error
    return parse(entries, str(file))


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"{twice!r:.40} is given twice")
    return fields


def parse(entries: Mapping[str, Any], title: str) -> list[Node]:
    """Return the machines of the content of nodes.json; raise ConfigError like `read`."""
    nodes: dict[str, Node] = {}
    for key, entry in entries.items():
        try:
            node = _node(str(key), entry)
            if node.name in nodes:
                raise ValueError(f"name {node.name} is that of another node, too")
            if same := [other.name for other in nodes.values() if (other.host, other.port) == (node.host, node.port)]:
                raise ValueError(f"IP is that of {same[0]}, too")
        except ValueError as error:
            raise ConfigError(f"{title}, node {key!r:.40}: {error}") from error
        nodes[node.name] = node
    if not nodes:
        raise ConfigError(f"{title}: it lists no machines")
    return [*nodes.values()]


def _node(key: str, entry: Any) -> Node:
    if not isinstance(entry, dict):
        raise ValueError(misfit(entry, {}))
    fields: dict[str, Any] = {_ALIASES.get(str(name), str(name)): value for name, value in entry.items()}
    if len(fields) < len(entry):
        raise ValueError("IP is given twice")
    if unknown := [name for name in fields if name not in _FIELDS]:
        raise ValueError(f"there is no field {unknown[0]!r:.40}.{suggest(unknown[0], _FIELDS)}")
    sizes: Mapping[str, Any] = fields.pop("benchmarks", {})
    if problem := misfit(fields, _FIELDS, ("IP",)):
        raise ValueError(problem)
    if problem := misfit(sizes, _SIZES):
        raise ValueError(f"benchmarks: {problem}")
    destination = fields.get("ssh", "host")
    if not isinstance(destination, str) or not re.fullmatch(r"\w[\w.@:%-]*", destination):
        raise ValueError(f"ssh is {destination!r:.40}, not a destination like user@host")
    known = {name: sizes[name] for name in _SIZES if name in sizes} | {
        name: value for name, value in fields.items() if name not in ("IP", "name")
    }
    host, port = parse_address(fields["IP"], "IP", port=0)
    name = fields.get("name") or (f"node_{key}" if key.isdecimal() else key)
    if not is_name(name):
        raise ValueError(f"{name!r:.40} is not a valid name")
    return Node(name, host, port, **known)


def parse_address(text: str, title: str, port: int | None = None) -> tuple[str, int]:
    """Return the host and the port of `HOST:PORT`; with a default `port`, that may be left out. Raises ValueError."""
    host, mark, digits = text.rpartition(":")
    if not mark and port is not None:
        host, digits = text, str(port)
    if ":" in host:
        raise ValueError(f"{title} is {text!r:.60}; IPv6 addresses are not supported, so use a host name or IPv4")
    valid = re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,252}[A-Za-z0-9])?", host)
    if valid and re.fullmatch(r"[\d.]+", host):
        try:
            ipaddress.IPv4Address(host)
        except ValueError:
            valid = None
    if not valid or not re.fullmatch(r"\d{1,5}", digits) or int(digits) > 65535 or (port is None and int(digits) == 0):
        raise ValueError(f"{title} is {text!r:.60}, not an address like 10.0.0.1:29500")
    return host, int(digits)
