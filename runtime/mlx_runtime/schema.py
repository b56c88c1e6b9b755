"""A JSON Schema beside conf.yaml, so that editors complete and check it while it is typed.

It also remembers the defaults of the last bind, which tells a value that the user edited from one that only was
the default at that time.
"""

import enum
import inspect
import re
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from mlx_runtime.nodes import Node
from mlx_runtime.signatures import MISSING, groups, object_at, parameters

Schema = dict[str, Any]

OPEN: Schema = {"type": "string", "pattern": r"\$\{.*\}|^\?\?\?$"}
"""What may stand for any value: an interpolation, or `???`."""

PLAIN: dict[Any, Schema] = {
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    type(None): {"type": "null"},
}


def schema_of(experiment: type, tree: Mapping[str, Node]) -> Schema:
    """The schema of an experiment's conf.yaml.

    Args:
        experiment: its class.
        tree: its nodes, as `nodes.Description` gives them.
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
    """The defaults that a schema remembers, by full key."""
    found: dict[str, Any] = {}
    properties = schema.get("properties") or schema.get("then", {}).get("properties", {})
    for name, part in properties.items():
        here = f"{key}.{name}".lstrip(".")
        if "default" in part:
            found[here] = part["default"]
        found |= former_defaults(part, here)
    return found


def _node(node: Node, description: str) -> Schema:
    """A node: its arguments are known while `_target_` is what the code says, and free when the user chose another."""
    target = object_at(node["_target_"])
    known = {item.name: item for item in parameters(target) or []}
    texts = _described(target)
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
    found: Schema = {"anyOf": [_type(hint), OPEN]} if _type(hint) else {}
    if text:
        found["description"] = text
    return found if value == "???" else found | {"default": value}


def _type(hint: Any) -> Schema:
    """The schema of an annotation; {} where anything goes."""
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
    if origin in (list, Sequence):
        return {"type": "array", "items": {"anyOf": [_type(arguments[0]), OPEN]} if _type(arguments[0]) else {}}
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return {"type": "array", "items": {"anyOf": [_type(arguments[0]), OPEN]} if _type(arguments[0]) else {}}
    if origin is tuple:
        return {"type": "array", "minItems": len(arguments), "maxItems": len(arguments)}
    return {} if hint is MISSING or hint is not dict else {"type": "object"}


def _summary(target: Any) -> str:
    return (inspect.getdoc(target) or "").partition("\n")[0]


def _described(target: Any) -> dict[str, str]:
    """What a docstring says of each argument, in its Args or Attributes section, of base classes too."""
    found: dict[str, str] = {}
    sources = reversed(target.__mro__[:-1]) if isinstance(target, type) else [target]
    for source in sources:
        for owner in (source, vars(source).get("__init__") if isinstance(source, type) else None):
            text = inspect.cleandoc(getattr(owner, "__doc__", None) or "")
            found |= dict(re.findall(r"^ {4}(\w+)(?: \([^)]*\))?: (.+)$", text, re.MULTILINE))
    return found
