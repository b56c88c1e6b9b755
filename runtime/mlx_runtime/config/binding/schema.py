"""The JSON Schema next to conf.yaml, by which editors complete and check it.

It also stores the defaults of the last bind, so that the next one can recognize edited values.
"""

import enum
import inspect
import re
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from mlx_runtime.config.binding.nodes import Node
from mlx_runtime.config.constructors.signatures import groups, parameters, takes_any_keyword
from mlx_runtime.config.constructors.targets import object_at

Schema = dict[str, Any]

OPEN: Schema = {"type": "string", "pattern": r"\$\{.*\}|^\?\?\?$"}
"""Schema of texts that may replace any value: an interpolation, or `???`."""

ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""Addresses of objects, which dataclasses without a docstring show in the signature that is their description."""

PLAIN = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}


def schema_of(experiment: type, tree: Mapping[str, Node], variants: Mapping[str, Mapping[str, Node]]) -> Schema:
    """Return the schema of an experiment's conf.yaml, whose nodes are `tree`.

    `variants` are alternative nodes, by key and name; the schema accepts their names.
    """
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": f"conf.yaml of {experiment.__module__}.{experiment.__qualname__}",
        "type": "object",
        "required": list(groups(experiment)),
        "additionalProperties": False,
        "properties": {name: _node(node, "", name, variants) for name, node in tree.items()},
    }
    nodes = {f"{key}/{name}": (node, key) for key, named in variants.items() for name, node in named.items() if node}
    definitions = {title: _node(node, "", key, {}) for title, (node, key) in nodes.items()}
    return schema | ({"definitions": definitions} if definitions else {})


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


def _node(node: Node, description: str, key: str, variants: Mapping[str, Mapping[str, Node]]) -> Schema:
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
        if name in properties:
            continue
        text, here = texts.get(name, ""), f"{key}.{name}"
        if isinstance(value, dict) and "_target_" in value:
            properties[name] = _node(value, text, here, variants)
        else:
            kind = _or_named(_or_open(_type(hints.get(name, Any))), variants.get(here))
            described = kind | ({"description": text} if text else {})
            properties[name] = described | ({} if value == "???" else {"default": value})
    return {
        **_or_named({"type": "object"}, variants.get(key)),
        "description": description or ADDRESS.sub("", (inspect.getdoc(target) or "").partition("\n")[0]),
        "if": {"properties": {"_target_": {"const": node["_target_"]}}},
        "then": {"properties": properties, "additionalProperties": takes_any_keyword(items) or not items},
    }


def _or_open(schema: Schema) -> Schema:
    return {"anyOf": [schema, OPEN]} if schema else {}


def _or_named(schema: Schema, variants: Mapping[str, Node] | None) -> Schema:
    return {"anyOf": [schema, {"enum": list(variants)}]} if variants else schema


def _type(hint: Any) -> Schema:
    """Return the schema of an annotation; {} accepts anything."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (typing.Union, types.UnionType):
        choices = [_type(choice) for choice in arguments]
        return {"anyOf": choices} if all(choices) else {}
    if origin in (list, Sequence) or (origin is tuple and arguments[1:] == (...,)):
        return {"type": "array", "items": _or_open(_type(arguments[0]))}
    if origin is tuple:
        return {"type": "array", "minItems": len(arguments), "maxItems": len(arguments)}
    if not isinstance(hint, type):
        return {}
    if issubclass(hint, enum.Enum):
        return {"enum": list(hint.__members__)}
    kind = str if issubclass(hint, Path) else hint
    return {"type": PLAIN[kind]} if kind in PLAIN else {"type": "object"} if hint is dict else {}


def argument_texts(target: Any) -> dict[str, str]:
    """Return the texts on arguments in the Args or Attributes sections of a class and its bases."""
    texts: dict[str, str] = {}
    sources = reversed(target.__mro__[:-1]) if isinstance(target, type) else [target]
    for source in sources:
        for owner in (source, vars(source).get("__init__") if isinstance(source, type) else None):
            text = inspect.cleandoc(getattr(owner, "__doc__", None) or "")
            found = re.findall(r"^ {4}(\w+)(?: \([^)]*\))?: (.+(?:\n {8}.+)*)$", text, re.MULTILINE)
            texts |= {name: " ".join(lines.split()) for name, lines in found}
    return texts
