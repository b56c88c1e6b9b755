"""conf.yaml, written from the defaults of the code and verified to re-create them; edits of the user are kept.

The JSON Schema next to it lets editors complete and check it. It also stores the defaults of the last bind, so that the
next one can recognize edited values.
"""

import contextlib
import difflib
import inspect
import json
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mlx_runtime import companions
from mlx_runtime.config.binding.equality import unlike
from mlx_runtime.config.binding.expressions import record_default
from mlx_runtime.config.binding.merging import Changes, Merge, NodeOfClass, commented_map, read_text, yaml_text
from mlx_runtime.config.binding.nodes import Description, Node
from mlx_runtime.config.building import DUMMY_PARAMS, declare
from mlx_runtime.config.constructors.signatures import (
    MISSING,
    argument_texts,
    base_of,
    groups,
    is_factory,
    own_default,
    parameters,
    plain_defaults,
    schema_type,
    takes_any_keyword,
    try_convert,
)
from mlx_runtime.config.constructors.targets import names_repositories, object_at
from mlx_runtime.config.interpolation import parse_config
from mlx_runtime.config.projects import commands
from mlx_runtime.errors import BindError, ConfigError, short_message
from mlx_runtime.storage.local import read_regular, write_atomic

SCHEMA = "conf.schema.json"

Schema = dict[str, Any]

OPEN: Schema = {"type": "string", "pattern": r"\$\{.*\}|^\?\?\?$"}
"""Schema of texts that may replace any value: an interpolation, or `???`."""

ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""Addresses of objects, which dataclasses without a docstring show in the signature that is their description."""

FIRST_SETTINGS = {
    *("name", "restore_checkpoint_path", "start_epoch", "num_epochs", "start_workers", "prefetch_batches"),
    *("path", "overwrite"),  # of a data job
    "storage_path",  # read by commands that import no code
}
"""Settings that every conf.yaml lists."""


def header(path: Path) -> str:
    """Return the comment at the top of a new conf.yaml."""
    group = commands(path)
    is_job = group == "mlx data"
    return (
        f"# yaml-language-server: $schema={SCHEMA}\n"
        f"# The config of this {'data job' if is_job else 'experiment'}: the source of truth for `{group} run`.\n"
        f"# Written by `{group} bind` from the defaults in src/. Edit freely: binding again keeps your values and\n"
        "# comments, adds new arguments and drops removed ones. "
        f"??? must be filled in{'' if is_job else ' (except the `params` of optimizers)'}.\n"
        + ("" if is_job else "# cfg has more settings than it lists here: `mlx train show` prints all of them.\n")
    )


@dataclass
class Binding:
    """The conf.yaml that fits the code, with its schema and notices for the user; `before` is empty without a file."""

    path: Path
    before: str
    after: str
    changes: Changes
    schema: str = ""
    notices: list[str] = field(default_factory=list)

    @property
    def stale(self) -> bool:
        """True if the file does not match the code."""
        return self.before != self.after

    def lines(self) -> list[str]:
        """Return one line per changed or remarkable key."""
        return [*self.changes.lines(), *(f"notice   {text}" for text in self.notices)]

    def write(self) -> None:
        """Store both files, each atomically."""
        write_atomic(self.path, self.after)
        write_atomic(self.path.with_name(SCHEMA), self.schema)

    def diff(self) -> str:
        """Return the pending changes as a unified diff."""
        before, after = self.before.splitlines(keepends=True), self.after.splitlines(keepends=True)
        return "".join(difflib.unified_diff(before, after, str(self.path), f"{self.path} (bound)"))


def bind(experiment: type, path: Path) -> Binding:
    """Return the conf.yaml of an experiment. Nothing is stored yet.

    BindError if conf.yaml cannot re-create a default of the code, or an existing file is not YAML.
    """
    description = Description(experiment)
    _verify(experiment, description.tree, yaml_text(description.tree))
    before = read_text(path)
    present = commented_map(before, path) if before.strip() else {}
    notices: list[str] = []
    if names_repositories(description.tree):
        notices = companions.part("hub.pins").pin_defaults(description.tree, present)
    former = {}
    with contextlib.suppress(FileNotFoundError, ValueError):  # without it, bind knows no former defaults
        former = json.loads(read_regular(path.with_name(SCHEMA), BindError))
    tree = description.tree | {"cfg": _select_settings(experiment, description.tree["cfg"], present.get("cfg"))}
    binding = merge(path, tree, former_defaults(former), description.of_class, former.get("x-chosen", {}))
    binding.notices = description.notices + notices
    schema = schema_of(experiment, description.tree) | {"x-chosen": binding.changes.chosen}
    binding.schema = json.dumps(schema, indent=1) + "\n"
    return binding


def _select_settings(experiment: type, cfg: Node, present: Any) -> Node:
    """Return the settings to list in conf.yaml: common ones, those that user code declares, and those already listed.

    The others have the runtime's defaults. Settings that are not plain values are listed, too.
    """
    there = present if isinstance(present, dict) else {}
    declared, defaults = FIRST_SETTINGS | _declared_settings(experiment), plain_defaults(base_of(experiment))
    listed = {}
    for name, value in cfg.items():
        section = there.get(name)
        if name.startswith("_") or name in declared or name not in defaults or value != defaults[name]:
            listed[name] = value
        elif isinstance(value, dict) and isinstance(section, dict):
            listed[name] = {key: item for key, item in value.items() if key in section}
        elif name in there:
            listed[name] = value
    return listed


def _declared_settings(experiment: type) -> set[str]:
    """Return the names of the settings that user code declares: the fields of its class, without inherited ones."""
    base, cls = base_of(experiment), groups(experiment)["cfg"]
    own = [item for item in cls.__mro__ if item not in base.__mro__]
    names = {name for item in own for name in inspect.get_annotations(item)}
    return names | ({item.name for item in parameters(cls) or []} if not issubclass(cls, base) else set())


def merge(
    path: Path,
    tree: dict[str, Node],
    former: Mapping[str, Any] | None = None,
    node_of_class: NodeOfClass = lambda path, key: None,
    chosen: Mapping[str, str] = MappingProxyType({}),
) -> Binding:
    """Update conf.yaml to match the code, in memory.

    `former` contains the defaults at the last bind, and `chosen` the classes that the user had chosen, by full key.
    """
    before = read_text(path)
    changes = Changes()
    if not before.strip():
        return Binding(path, before, header(path) + yaml_text(dict(tree)), changes)
    merged = commented_map(before, path)
    Merge(former or {}, node_of_class, changes, chosen).into(merged, tree)
    return Binding(path, before, yaml_text(merged) if changes else before, changes)  # or keep the layout


def _verify(experiment: type, tree: Mapping[str, Node], text: str) -> None:
    """Build each default from the YAML text, and raise BindError if it differs from the declared one."""
    written = parse_config(text)
    problems = []
    for group, cls in groups(experiment).items():
        if (own := own_default(experiment, group, cls)) is not None:
            if difference := _difference(own.default, cls, written[group], group):
                problems.append(f"{group}: conf.yaml would not re-create this default: {difference}")
            continue
        for item in parameters(cls) or []:
            if item.default is not MISSING and item.name in tree[group]:
                default, key = item.default, f"{group}.{item.name}"
                if is_factory(default):
                    recorded = record_default(cls, item.name)
                    assert recorded is not None, "a factory without source is refused earlier"
                    default = recorded[0]
                if difference := _difference(default, item.annotation, written[group][item.name], key):
                    problems.append(f"{key}: conf.yaml would not re-create this default: {difference}")
    if problems:
        raise BindError("\n  ".join(problems))


def _difference(default: Any, hint: Any, node: Any, key: str) -> str | None:
    objects = {}
    if isinstance(node, dict) and node.get("params") == "???":
        node = {name: value for name, value in node.items() if name != "params"}
        objects["params"] = DUMMY_PARAMS
    if _is_open(node):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # issued when the default itself was constructed
            return unlike(default, lambda: try_convert(declare(node, key, **objects), hint))
    except ConfigError as error:
        return str(error)
    except Exception as error:
        return f"it cannot be built again: {type(error).__name__}: {short_message(error)}"


def _is_open(node: Any) -> bool:
    """Return True if the user must fill in a value in a node."""
    if isinstance(node, dict | list):
        return any(map(_is_open, node.values() if isinstance(node, dict) else node))
    return bool(node == "???")


def schema_of(experiment: type, tree: Mapping[str, Node]) -> Schema:
    """Return the schema of an experiment's conf.yaml, whose nodes are `tree`."""
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": f"conf.yaml of {experiment.__module__}.{experiment.__qualname__}",
        "type": "object",
        "required": list(groups(experiment)),
        "additionalProperties": False,
        "properties": {name: _node(node, "") for name, node in tree.items()},
    }


def former_defaults(schema: Any, key: str = "") -> dict[str, Any]:
    """Return the defaults in a schema, by full key."""
    defaults: dict[str, Any] = {}
    properties = schema.get("properties") or schema.get("then", {}).get("properties", {})
    for name, part in properties.items():
        here = f"{key}.{name}".lstrip(".")
        if "default" in part:
            defaults[here] = part["default"]
        defaults |= former_defaults(part, here)
    return defaults


def _node(node: Node, description: str) -> Schema:
    """Return the schema of a node. It is valid only for the code's `_target_`; another class has other arguments."""
    target = object_at(node["_target_"])
    items = parameters(target) or []
    hints = {item.name: item.annotation for item in items}
    texts = argument_texts(target)
    properties: dict[str, Schema] = {
        "_target_": {"type": "string", "description": "class or function to call", "default": node["_target_"]},
        "_args_": {"type": "array"},
        "_partial_": {"type": "boolean"},
    }
    for name, value in node.items():
        text = texts.get(name, "")
        if name not in properties and isinstance(value, dict) and "_target_" in value:
            properties[name] = _node(value, text)
        elif name not in properties:
            kind = schema_type(hints.get(name, Any))
            described = ({"anyOf": [kind, OPEN]} if kind else {}) | ({"description": text} if text else {})
            properties[name] = described | ({} if value == "???" else {"default": value})
    return {
        "type": "object",
        "description": description or ADDRESS.sub("", (inspect.getdoc(target) or "").partition("\n")[0]),
        "if": {"properties": {"_target_": {"const": node["_target_"]}}},
        "then": {"properties": properties, "additionalProperties": takes_any_keyword(items) or not items},
    }
