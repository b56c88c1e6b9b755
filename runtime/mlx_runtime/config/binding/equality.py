"""Deep comparison of two objects: types, attributes, slots, closures, and the pickled state of C and Rust objects.

Initial weights are random, so tensors are compared by shape, dtype, `requires_grad` and `_version`. The latter counts
in-place changes, and is higher in a default that was modified after its construction.
"""

import functools
import inspect
import math
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import PurePath
from typing import Any

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from mlx_runtime.config.constructors.declarations import Declaration, is_pretrained
from mlx_runtime.config.constructors.signatures import parameters, try_convert
from mlx_runtime.errors import short_message

_CODE = (PurePath, type, types.ModuleType, types.CodeType, inspect.Signature)
"""Types whose objects are compared as a whole, without their attributes."""

_VALUES = (complex, set, frozenset, bytes, str, int, float, *_CODE)
"""Types whose objects are compared with `==`."""

_CONTAINERS = (dict, list, tuple, deque)

_ATTRIBUTES: dict[type, tuple[str, ...]] = {
    types.MethodType: ("__func__", "__self__"),
    functools.partial: ("func", "args", "keywords"),
    types.FunctionType: ("__code__", "__defaults__", "__closure__"),
    types.CellType: ("cell_contents",),
    UninitializedParameter: ("requires_grad",),
    UninitializedBuffer: ("requires_grad",),
    torch.Tensor: ("shape", "dtype", "requires_grad", "_version"),
}
"""Attributes to compare, for types that do not list theirs."""


def unlike(default: Any, make: Callable[[], Any]) -> str | None:
    """Return a description of the differences between a default and the result of `make`, or None.

    Differences between two objects from `make` (the time, a random number, a serial number) are ignored.
    Objects that cannot be compared count as different.
    """
    made = make()
    differences = list(_differences(default, made, "", {}))
    if differences:
        chance = {where for where, _ in _differences(made, make(), "", {}) if where is not None}
        differences = [item for item in differences if item[0] not in chance]
    return differences[0][1] if differences else None


def _differences(
    first: Any, second: Any, where: str, seen: dict[tuple[int, int], tuple[Any, Any]]
) -> Iterator[tuple[str | None, str]]:
    """Yield the path of each differing part (None if comparing it raised an exception), and a description of it."""
    if isinstance(second, Declaration) and not isinstance(first, Declaration):
        second = second.make()  # the default was made, too: by code outside `src`, or in a function
    if first is second or (id(first), id(second)) in seen:
        return
    seen[id(first), id(second)] = first, second  # kept alive: many are temporary, and ids are reused
    here = where.lstrip(".") or "it"
    if not _same_type(type(first), type(second)):
        yield where, f"{here} is a {type(first).__name__} and would be a {type(second).__name__}"
        return
    try:
        one, other = _parts(first), _parts(second)
        if lacking := sorted(one.keys() ^ other.keys()):
            yield where, f"{here} differs in {lacking[0].strip()}, which only one of them has"
        differs = bool(lacking)
        for part in one:
            for difference in _differences(one[part], other.get(part), f"{where}{part}", seen):
                differs = True
                yield difference
        if not differs and not _same_value(first, second, bool(one)):
            yield where, f"{here} is {first!r:.60} and would be {second!r:.60}"
    except Exception as error:  # raised by an `__eq__`, a `__repr__` or a property
        yield None, f"{here} cannot be compared: {type(error).__name__}: {short_message(error)}"


def _same_type(first: type, second: type) -> bool:
    """Return True for the same type, or for types created equally at run time, like torch's parametrizations."""
    names = ("__module__", "__qualname__", "__bases__")
    return first is second or all(getattr(first, name) == getattr(second, name) for name in names)


def _parts(thing: Any) -> dict[str, Any]:
    """Return the parts of an object by name, like `.bias`."""
    for cls, names in _ATTRIBUTES.items():
        if isinstance(thing, cls):
            return {f".{name}": getattr(thing, name) for name in names}
    if isinstance(thing, torch.Generator):
        return {" state": thing.get_state().tolist()}
    if isinstance(thing, Declaration):
        return {".target": thing.target, **{f".{name}": value for name, value in _arguments(thing).items()}}
    if isinstance(thing, weakref.ref):
        return {"()": thing()}
    if isinstance(thing, _CODE):
        return {}
    parts = {f".{name}": value for name, value in _attributes(thing).items()}
    if isinstance(thing, dict):
        parts |= {".keys()": list(thing), ".default_factory": getattr(thing, "default_factory", None)}
        places = [f"[{name!r}]" if isinstance(name, str) else f"[{index}]" for index, name in enumerate(thing)]
        return parts | dict(zip(places, thing.values(), strict=True))
    if isinstance(thing, _CONTAINERS):
        items = {f"[{index}]": item for index, item in enumerate(thing)}
        return {**parts, ".maxlen": getattr(thing, "maxlen", None), **items}
    hooks = ("__reduce__", "__reduce_ex__", "__getstate__")
    pickles_itself = any(getattr(type(thing), name, None) is not getattr(object, name, None) for name in hooks)
    wanted = not isinstance(thing, _VALUES) and (not parts or pickles_itself)  # as objects of C or Rust need
    if wanted and (state := _pickle(thing)) is not None:
        parts[" state"] = state
    return parts


def _same_value(first: Any, second: Any, has_parts: bool) -> bool:
    """Return True if two objects whose parts are equal are equal."""
    if isinstance(first, float) and math.isnan(first):
        return math.isnan(second)
    defines_eq = any("__eq__" in base.__dict__ for base in type(first).__mro__[:-1])
    return not (isinstance(first, _VALUES) or (defines_eq and not has_parts)) or bool(first == second)


def _pickle(thing: Any) -> Any:
    """Return the pickled state of an object, or None if it cannot be pickled, like a lock."""
    try:
        return thing.__reduce_ex__(4)
    except Exception:  # classes raise all kinds of errors
        return None


def _attributes(thing: Any) -> dict[str, Any]:
    """Return `__dict__` and `__slots__` together."""
    attributes = dict(getattr(thing, "__dict__", {}))
    for cls in type(thing).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(thing, name):
                attributes[name] = getattr(thing, name)
    return attributes


def _arguments(declaration: Declaration) -> dict[str, Any]:
    """Return a declaration's arguments by name, with defaults; for libraries, as they are passed when building."""
    target = declaration.target
    if target is functools.partial:
        return {"args": declaration.args, "keywords": declaration.kwargs}
    items = parameters(target) or []
    bound = inspect.Signature(items).bind(*declaration.args, **declaration.kwargs)
    bound.apply_defaults()
    hints = {item.name: item.annotation for item in items} if is_pretrained(target) else {}
    return {name: try_convert(value, hints.get(name, Any)) for name, value in bound.arguments.items()}
