"""The JSON Schema next to conf.yaml, by which editors complete and check it.

It also stores the defaults of the last bind, so that the next one can recognize edited values.
"""

import inspect
import re
from collections.abc import Mapping
from typing import Any

from mlx_runtime.config.binding.nodes import Node
from mlx_runtime.config.constructors.signatures import (
    argument_texts,
    groups,
    parameters,
    schema_type,
    takes_any_keyword,
)
from mlx_runtime.config.constructors.targets import object_at

Schema = dict[str, Any]

OPEN: Schema = {"type": "string", "pattern": r"\$\{.*\}|^\?\?\?$"}
"""Schema of texts that may replace any value: an interpolation, or `???`."""

ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""Addresses of objects, which dataclasses without a docstring show in the signature that is their description."""


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
