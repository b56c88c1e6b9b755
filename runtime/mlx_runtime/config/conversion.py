"""YAML values as annotations want them: a list for `tuple` becomes a tuple, a string for `Path` a Path."""

import enum
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from mlx_runtime.config.signatures import MISSING


def convert(value: Any, hint: Any) -> Any:
    """Convert a YAML value to an annotated type.

    Raises:
        TypeError: the value does not fit the type.
    """
    if hint in (Any, MISSING, object) or isinstance(hint, typing.TypeVar):
        return value
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return convert(value, arguments[0])
    if origin in (typing.Union, types.UnionType):
        return _first_fit(value, arguments)
    if origin is Literal:
        return _checked(value, any(type(value) is type(choice) and value == choice for choice in arguments))
    kind = origin or hint
    if kind is tuple and isinstance(value, list | tuple):
        return _tuple(value, arguments or (Any, ...))
    if kind in (list, Sequence) and isinstance(value, list):
        return [convert(item, arguments[0] if arguments else Any) for item in value]
    if kind is dict and isinstance(value, dict):
        key, item = arguments or (Any, Any)
        return {convert(k, key): convert(v, item) for k, v in value.items()}
    if kind is float and type(value) is int:
        return value  # Python accepts an int, too; a default of 0 for a float stays the int that it was
    if kind is int and type(value) is bool:
        raise TypeError  # in Python a bool is an int; in a config it is a mistake
    if isinstance(kind, type) and isinstance(value, str):
        if issubclass(kind, enum.Enum) and value in kind.__members__:
            return kind[value]
        if issubclass(kind, Path):
            return kind(value)
    return _checked(value, _is_instance(value, kind))


def fitted(value: Any, hint: Any) -> Any:
    """Convert a value if it fits the type, else return it as it is, like an object that was built already."""
    try:
        return convert(value, hint)
    except TypeError:
        return value


def type_name(hint: Any) -> str:
    """Return a type as it is written in code."""
    if hint is type(None):
        return "None"
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint).replace("typing.", "")


def _checked(value: Any, fits: bool) -> Any:
    if not fits:
        raise TypeError
    return value


def _first_fit(value: Any, hints: Sequence[Any]) -> Any:
    exact = [hint for hint in hints if (typing.get_origin(hint) or hint) is type(value)]
    for hint in [*exact, *hints]:
        try:
            return convert(value, hint)
        except TypeError:
            continue
    raise TypeError


def _tuple(values: Sequence[Any], hints: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(hints) == 2 and hints[1] is Ellipsis:
        hints = (hints[0],) * len(values)
    if len(hints) != len(values):
        raise TypeError
    return tuple(convert(item, hint) for item, hint in zip(values, hints, strict=True))


def _is_instance(value: Any, kind: Any) -> bool:
    try:
        return isinstance(value, kind)
    except TypeError:  # a special form without instances, like Callable[..., int] or NewType
        return True
