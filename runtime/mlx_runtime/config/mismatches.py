"""Messages about keys and values that do not match the code, composed when one is found."""

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mlx_runtime.config.constructors.signatures import choices, parameters, type_name
from mlx_runtime.config.constructors.suggestions import describe_move
from mlx_runtime.errors import short_message, suggest
from mlx_runtime.storage.documents import ESCAPE


def mismatch(value: Any, hint: Any, key: str, owner: str, variants: Iterable[str], *, objects: bool) -> str:
    """Return the line about a value of a wrong type, with variants or choices that may have been meant."""
    given, choice = f"is {value!r}", ""
    if isinstance(value, dict) and objects:
        given = "has no _target_"
    elif isinstance(value, str):
        names = ", ".join(variants)
        if names:
            choice = f", or one of the variants: {names}"
        elif value.isidentifier() and objects:
            choice = f", and there is no src/variants/{key}/{value}.yaml"
        words = [word for word in choices(hint) if isinstance(word, str)]
        for near in difflib.get_close_matches(value, words, n=1, cutoff=0.54):
            choice += f". Did you mean {near}?"
    return f"{key} {given}; {owner} takes {type_name(hint)}{choice}"


def lacks(tree: Mapping[str, Any], key: str, base: type, object_at: Callable[[str], Any]) -> bool:
    """Return True if a key is an argument in the code that its node in the config lacks."""
    *parents, name = key.split(".")
    node: Any = tree
    for parent in parents:
        node = node.get(parent) if isinstance(node, dict) else None
    path = node.get("_target_") if isinstance(node, dict) else None
    if not isinstance(path, str) or name in node:
        return False
    try:
        target = object_at(path)
    except (ImportError, AttributeError):
        return False
    known = [*(parameters(target) or []), *((parameters(base) or []) if parents == ["cfg"] else [])]
    return callable(target) and name in {item.name for item in known}


def unknown_key(key: str, override: Any, values: Mapping[str, Any], title: object) -> str:
    """Return the line about an override of a key that conf.yaml, with these values by key, does not have."""
    if moved := describe_move(key):
        return moved
    above = next((parent for parent in _parents(key) if parent in values), "")
    free = isinstance(node := values.get(above), dict) and "_target_" not in node and "." in above
    cure = f" To add it, write +{override}" if free else suggest(key, values)
    return f"there is no key {key!r} in {title}.{cure}"


def _parents(key: str) -> list[str]:
    """Return the keys above a key, the innermost first."""
    parts = key.split(".")
    return [".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1)]


def describe_unresolved(key: str, error: Exception) -> str:
    """Return the line about a value with an invalid interpolation."""
    text = short_message(error)
    if unset := re.search(r"Environment variable '(\w+)' not found", text):
        text = f"the environment has no {unset[1]}; set it, or add a default: ${{oc.env:{unset[1]},0}}"
    else:
        text += f"; {ESCAPE}"
    return f"{key}: {text}"


def replaced_node(overrides: Sequence[str], error: str) -> str | None:
    """Return the line about an override that replaces a node, if it makes another one fail, which the error names."""
    keys = {item: item.partition("=")[0].lstrip("+~") for item in overrides}
    for item, key in keys.items():
        for other, below in keys.items():
            if below.startswith(f"{key}.") and f"'{below}'" in error:
                return f"the override {item!r} replaces all of {key}, which {other!r} changes; leave one of them out"
    return None
