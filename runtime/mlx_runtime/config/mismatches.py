"""Messages about values that do not match the code, composed when one is found."""

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mlx_runtime.config.constructors import choices, parameters, type_name


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
