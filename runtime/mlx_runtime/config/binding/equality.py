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
from torch.nn.parameter import is_lazy

from mlx_runtime.config.constructors.declarations import Declaration, is_loaded_later, is_pretrained
from mlx_runtime.config.constructors.signatures import parameters, try_convert
from mlx_runtime.errors import short_message

_SCALARS = (complex, set, frozenset, bytes, str, int, float)
_CONTAINERS = (dict, list, tuple, deque)
_CODE = (type, types.ModuleType, types.CodeType, inspect.Signature)
_WHOLE = (torch.Tensor, torch.Generator, PurePath, *_CODE)
"""Types whose objects are compared as a whole."""

_ATTRIBUTES: dict[type, tuple[str, ...]] = {
    types.MethodType: ("__func__", "__self__"),
    functools.partial: ("func", "args", "keywords"),
    types.FunctionType: ("__code__", "__defaults__", "__closure__"),
    types.CellType: ("cell_contents",),
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
    if isinstance(second, Declaration) and is_loaded_later(second) and not isinstance(first, Declaration):
        second = second.make()  # the default was made, too: by code outside `src`, or in a function
    if first is second or (id(first), id(second)) in seen:
        return
    seen[id(first), id(second)] = first, second  # kept alive: many are temporary, and ids are reused
    here = where.lstrip(".") or "it"
    if not _same_type(type(first), type(second)):
        yield where, f"{here} is a {type(first).__name__} and would be a {type(second).__name__}"
        return
    alike = True
    try:
        for part, one, other in _parts(first, second):
            for difference in _differences(one, other, f"{where}{part}", seen):
                alike = False
                yield difference
        if alike and not _same_whole(first, second):
            yield where, f"{here} is {first!r:.60} and would be {second!r:.60}"
    except Exception as error:  # raised by an `__eq__`, a `__repr__` or a property
        yield None, f"{here} cannot be compared: {type(error).__name__}: {short_message(error)}"


def _same_type(first: type, second: type) -> bool:
    """Return True for the same type, or for types created equally at run time, like torch's parametrizations."""
    names = ("__module__", "__qualname__", "__bases__")
    return first is second or all(getattr(first, name) == getattr(second, name) for name in names)


def _parts(first: Any, second: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name of each part of two objects of one type, like `.bias`, and both of its values."""
    if isinstance(first, _WHOLE):
        return
    for cls, names in _ATTRIBUTES.items():
        if isinstance(first, cls):
            yield from ((f".{name}", getattr(first, name), getattr(second, name)) for name in names)
            return
    if isinstance(first, Declaration):
        yield ".target", first.target, second.target
        yield "", _arguments(first), _arguments(second)
    elif isinstance(first, weakref.ref):
        yield "()", first(), second()
    else:
        yield from _items(first, second)
        yield from _state(first, second)


def _items(first: Any, second: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the items of containers."""
    if isinstance(first, dict):
        yield ".keys()", list(first), list(second)
        yield ".default_factory", getattr(first, "default_factory", None), getattr(second, "default_factory", None)
        for name, one, other in zip(first, first.values(), second.values()):  # noqa: B905 - the keys were compared
            yield f"[{name!r}]", one, other
    elif isinstance(first, _CONTAINERS):
        yield " length", len(first), len(second)
        yield ".maxlen", getattr(first, "maxlen", None), getattr(second, "maxlen", None)
        for index, (one, other) in enumerate(zip(first, second)):  # noqa: B905 - the length was compared
            yield f"[{index}]", one, other


def _state(first: Any, second: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield attributes and, for objects of C or Rust without visible attributes, the pickled state."""
    attributes, others = _attributes(first), _attributes(second)
    if attributes or others:
        yield " attributes", sorted(attributes), sorted(others)
        for name in attributes:
            if name in others:
                yield f".{name}", attributes[name], others[name]
    hooks = ("__reduce__", "__reduce_ex__", "__getstate__")
    pickles_itself = any(getattr(type(first), name, None) is not getattr(object, name, None) for name in hooks)
    if not isinstance(first, _CONTAINERS + _SCALARS) and (not attributes or pickles_itself):
        yield " state", _pickle(first), _pickle(second)


def _same_whole(first: Any, second: Any) -> bool:
    """Return True if two objects with equal parts are also equal as a whole."""
    if isinstance(first, torch.Tensor):
        names = ("requires_grad",) if is_lazy(first) else ("shape", "dtype", "requires_grad", "_version")
        return all(getattr(first, name) == getattr(second, name) for name in names)
    if isinstance(first, torch.Generator):
        return torch.equal(first.get_state(), second.get_state())
    if isinstance(first, float) and math.isnan(first):
        return math.isnan(second)
    if isinstance(first, (PurePath, *_SCALARS, *_CODE)):
        return bool(first == second)
    if isinstance(first, (weakref.ref, *_ATTRIBUTES, *_CONTAINERS)):
        return True
    if _attributes(first) or _pickle(first) is not None:
        return True
    defines_eq = any("__eq__" in base.__dict__ for base in type(first).__mro__[:-1])
    return not defines_eq or bool(first == second)


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
    bound = inspect.signature(target).bind(*declaration.args, **declaration.kwargs)
    bound.apply_defaults()
    hints = {item.name: item.annotation for item in parameters(target) or []} if is_pretrained(target) else {}
    return {name: try_convert(value, hints.get(name, Any)) for name, value in bound.arguments.items()}
