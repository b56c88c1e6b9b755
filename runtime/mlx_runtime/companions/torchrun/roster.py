"""The machines of a run: nodes.json, as Ravnest has it."""

import ipaddress
import json
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_runtime.errors import ConfigError, suggest
from mlx_runtime.storage.documents import NUMBER, TEXT, Kind, from_json, is_name, mapping_of, misfit
from mlx_runtime.storage.local import open_regular

FILE_BYTES = 1 << 20

_COUNT = Kind("a whole number above 0", lambda value: type(value) is int and 0 < value < 1 << 16)
_SIZE = Kind("a number above 0", lambda value: NUMBER.fits(value) and 0 < value < 1e9)
_SIZES = {"ram": _SIZE, "bandwidth": _SIZE, "speed": _SIZE}
_FIELDS: dict[str, Kind] = {
    "IP": TEXT,
    "name": Kind("the name of a node", is_name),
    "slots": _COUNT,
    "benchmarks": mapping_of(NUMBER),
    **_SIZES,
}


@dataclass(frozen=True)
class Node:
    """One machine of a run."""

    name: str  # like `node_0`
    host: str  # address in the network of the run
    port: int = 0  # at which all meet, if it is the first; 0 if it has none
    slots: int = 1  # number of its workers
    ram: float | None = None  # GB of memory, of GPUs or of the machine
    bandwidth: float | None = None  # Mbps
    speed: float | None = None  # relative to other nodes


def read(file: Path) -> list[Node]:
    """Read nodes.json; raise ConfigError with the file, the node and the field of the first problem."""
    try:
        with open_regular(str(file)) as stream:
            content = stream.read(FILE_BYTES + 1)
        if len(content) > FILE_BYTES:
            raise ValueError(f"it has more than {FILE_BYTES} bytes")
        entries = from_json(content, {})
        json.loads(content, object_pairs_hook=_without_duplicates)
    except OSError as error:
        raise ConfigError(f"cannot read {file}, the list of machines: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"{file}: {error}") from error
    return parse(entries, str(file))


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r:.40} occurs twice")
    return fields


def parse(entries: Mapping[str, Any], title: str) -> list[Node]:
    """Return the machines of the content of nodes.json; raise ConfigError like `read`."""
    nodes: dict[str, Node] = {}
    for key, entry in entries.items():
        try:
            node = _node(str(key), entry)
            if node.name in nodes:
                raise ValueError(f"the name {node.name} is already used by another node")
            if same := [other.name for other in nodes.values() if (other.host, other.port) == (node.host, node.port)]:
                raise ValueError(f"IP is the same as that of {same[0]}")
        except ValueError as error:
            raise ConfigError(f"{title}, node {key!r:.40}: {error}") from error
        nodes[node.name] = node
    if not nodes:
        raise ConfigError(f"{title}: it lists no machines")
    return [*nodes.values()]


def _node(key: str, entry: Any) -> Node:
    if problem := misfit(entry, {}):
        raise ValueError(problem)
    entry = dict(entry)
    if unknown := [name for name in entry if name not in _FIELDS]:
        raise ValueError(f"unknown field {unknown[0]!r:.40}.{suggest(unknown[0], _FIELDS)}")
    sizes: Mapping[str, Any] = entry.pop("benchmarks", {})
    if problem := misfit(entry, _FIELDS, ("IP",)):
        raise ValueError(problem)
    if problem := misfit(sizes, _SIZES):
        raise ValueError(f"benchmarks: {problem}")
    name = entry.get("name") or (f"node_{key}" if key.isdecimal() else key)
    if not is_name(name):
        raise ValueError(f"{name!r:.40} is not a valid name")
    host, port = _address(entry["IP"])
    known = {field: entry[field] for field in ("slots", *_SIZES) if field in entry}
    return Node(name, host, port, **{**sizes, **known})


def _address(text: str) -> tuple[str, int]:
    """Return the host and the port of `HOST:PORT` or `HOST`. Raises ValueError."""
    host, mark, digits = text.rpartition(":")
    if not mark:
        host, digits = text, "0"
    valid = re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,252}[A-Za-z0-9])?", host)
    if valid and re.fullmatch(r"[\d.]+", host):
        try:
            ipaddress.IPv4Address(host)
        except ValueError:
            valid = None
    if not valid or not re.fullmatch(r"\d{1,5}", digits) or int(digits) > 65535:
        raise ValueError(f"IP is {text!r:.60}, not an address like 10.0.0.1:29500")
    return host, int(digits)


def check_port(port: int, cure: str) -> None:
    """Raise ConfigError, with the cure, if this process cannot listen at a port."""
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        raise ConfigError(
            f"cannot listen at port {port} of this machine: {os.strerror(error.errno or 0)}; {cure}"
        ) from error
