"""Values whose YAML does not depend on how they were made: scalars, members of a module, builtins."""

import inspect
import re
from typing import Any

import numpy as np

from mlx_runtime.config.conversion import convert
from mlx_runtime.config.signatures import MISSING
from mlx_runtime.config.targets import object_at, path_of
from mlx_runtime.errors import BindError

Node = dict[str, Any]
"""A mapping with `_target_`, the class or function to call, and its arguments, as Hydra's `instantiate` takes it."""

RESERVED = {"_target_", "_args_", "_partial_", "_recursive_", "_convert_"}
"""Keys with a meaning of their own in a node."""


def refuse_reserved(name: Any, key: str, kind: str) -> None:
    """Raise BindError for a name that a node cannot hold."""
    if name in RESERVED:
        raise BindError(f"{key}: {kind} cannot be named {name}, which has a meaning of its own in conf.yaml")


def scalar(value: Any, key: str) -> Any:
    """Return a number, string, boolean or None so that loading does not interpolate it.

    Raises:
        BindError: it is `???`, the mark of a missing value.
    """
    if value == "???":
        raise BindError(f"{key}: the default '???' means a missing value in conf.yaml; choose another")
    if isinstance(value, str):  # `${` becomes `\${`, and each backslash before it is doubled
        return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + "\\${", value)
    return value


def imported(path: str, value: Any, key: str) -> Node:
    """Return the node of a class, function or constant itself, as hydra-zen writes it.

    Raises:
        BindError: the path does not lead to the value.
    """
    try:
        there = object_at(path)
    except (ImportError, AttributeError):
        there = None
    if there is not value and not (inspect.ismethod(value) and there == value):
        raise BindError(f"{key}: {value!r} cannot be imported as {path}; give it a name at the top level of a module")
    return {"_target_": "hydra_zen.funcs.get_obj", "path": path}


def builtin(value: Any, key: str) -> Node:
    """Return the node of a value of a builtin type that YAML has no notation for.

    Raises:
        BindError: it is of any other type.
    """
    if type(value) is bytes:
        return {"_target_": "builtins.bytes.fromhex", "_args_": [value.hex()]}
    if type(value) is complex:
        return {"_target_": "builtins.complex", "_args_": [value.real, value.imag]}
    if isinstance(value, np.generic) and type(value.item()) in (bool, int, float, str):
        return {"_target_": path_of(type(value)), "_args_": [value.item()]}
    name, kind = key.rpartition(".")[2], type(value).__name__
    raise BindError(
        f"{key}: the default {value!r:.80} cannot be written to conf.yaml. "
        f"Write it in the signature as a constructor call, like `{name}: {kind} = {kind}(...)`"
    )


def restores(text: Any, hint: Any, value: Any) -> bool:
    """Return True if loading converts `text` back to exactly `value` because of the annotation."""
    if hint in (Any, MISSING):
        return False
    try:
        return _equal(convert(text, hint), value)
    except TypeError:
        return False


def _equal(first: Any, second: Any) -> bool:
    """Compare values and, all the way down, types: 1 is not True, (1,) is not [1]."""
    if type(first) is not type(second):
        return False
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(_equal, first, second))
    return bool(first == second)
