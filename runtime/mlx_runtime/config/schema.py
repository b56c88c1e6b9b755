"""A JSON Schema beside conf.yaml, with which editors complete and check it while it is typed.

It also stores the defaults of the last bind, so that the next one recognizes the values that the user edited.
"""

import enum
import inspect
import re
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from mlx_runtime.config.literals import Node
from mlx_runtime.config.signatures import groups, parameters
from mlx_runtime.config.targets import object_at

Schema = dict[str, Any]

OPEN: Schema = {"type": "string", "pattern": r"\$\{.*\}|^\?\?\?$"}
"""What may stand in place of any value: an interpolation, or `???`."""

PLAIN: dict[Any, Schema] = {
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    type(None): {"type": "null"},
}


def schema_of(experiment: type, tree: Mapping[str, Node]) -> Schema:
    """Return the schema of an experiment's conf.yaml.

    Args:
        experiment: its class.
        tree: its nodes, as in `nodes.Description.tree`.
    """
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": f"conf.yaml of {experiment.__module__}.{experiment.__qualname__}",
        "type": "object",
        "required": list(groups(experiment)),
        "additionalProperties": False,
        "properties": {name: _node(node, "") for name, node in tree.items()},
    }


def former_defaults(schema: Any, key: str = "") -> dict[str, Any]:
    """Return the defaults that a schema stores, by full key."""
    defaults: dict[str, Any] = {}
    properties = schema.get("properties") or schema.get("then", {}).get("properties", {})
    for name, part in properties.items():
        here = f"{key}.{name}".lstrip(".")
        if "default" in part:
            defaults[here] = part["default"]
        defaults |= former_defaults(part, here)
    return defaults


def _node(node: Node, description: str) -> Schema:
    """Return the schema of a node. It only holds while `_target_` is the code's; another class has other arguments."""
    target = object_at(node["_target_"])
    known = {item.name: item for item in parameters(target) or []}
    texts = _argument_texts(target)
    properties: dict[str, Schema] = {}
    for name, value in node.items():
        if name in ("_target_", "_args_", "_partial_"):
            continue
        hint = known[name].hint if name in known else Any
        properties[name] = _argument(value, hint, texts.get(name, ""))
    closed = not any(item.kind is inspect.Parameter.VAR_KEYWORD for item in known.values()) and bool(known)
    markers: dict[str, Schema] = {
        "_target_": {"type": "string", "description": "class or function to call", "default": node["_target_"]},
        "_args_": {"type": "array"},
        "_partial_": {"type": "boolean"},
    }
    return {
        "type": "object",
        "description": description or _summary(target),
        "if": {"properties": {"_target_": {"const": node["_target_"]}}},
        "then": {"properties": markers | properties, "additionalProperties": not closed},
    }


def _argument(value: Any, hint: Any, text: str) -> Schema:
    if isinstance(value, dict) and "_target_" in value:
        return _node(value, text)
    schema = _or_open(_type(hint))
    if text:
        schema["description"] = text
    return schema if value == "???" else schema | {"default": value}


def _or_open(schema: Schema) -> Schema:
    return {"anyOf": [schema, OPEN]} if schema else {}


def _type(hint: Any) -> Schema:
    """Return the schema of an annotation; {} accepts anything."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, type) and hint in PLAIN:
        return PLAIN[hint]
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (typing.Union, types.UnionType):
        choices = [_type(choice) for choice in arguments]
        return {"anyOf": choices} if all(choices) else {}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return {"enum": list(hint.__members__)}
    if isinstance(hint, type) and issubclass(hint, Path):
        return PLAIN[str]
    if origin in (list, Sequence) or (origin is tuple and arguments[1:] == (...,)):
        return {"type": "array", "items": _or_open(_type(arguments[0]))}
    if origin is tuple:
        return {"type": "array", "minItems": len(arguments), "maxItems": len(arguments)}
    return {"type": "object"} if hint is dict else {}


def _summary(target: Any) -> str:
    return (inspect.getdoc(target) or "").partition("\n")[0]


def _argument_texts(target: Any) -> dict[str, str]:
    """Return the first line about each argument in the Args or Attributes sections of a class and its bases."""
    texts: dict[str, str] = {}
    sources = reversed(target.__mro__[:-1]) if isinstance(target, type) else [target]
    for source in sources:
        for owner in (source, vars(source).get("__init__") if isinstance(source, type) else None):
            text = inspect.cleandoc(getattr(owner, "__doc__", None) or "")
            texts |= dict(re.findall(r"^ {4}(\w+)(?: \([^)]*\))?: (.+)$", text, re.MULTILINE))
    return texts
