"""Does conf.yaml re-create the defaults of the code? Builds each from the YAML text and compares deeply.

Freshly initialised weights differ by chance, so tensors are compared by shape, dtype, `requires_grad` and `_version`,
which counts in-place changes: a default that was changed after it was made has a higher one.
"""

import functools
import inspect
import math
import types
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from mlx_runtime.declarations import Declaration, declaring
from mlx_runtime.errors import BindError, ConfigError, first_line
from mlx_runtime.loading import build, fitted, parsed
from mlx_runtime.nodes import DUMMY_PARAMS, Node
from mlx_runtime.signatures import MISSING, groups, is_factory, parameters, recorded_default

_SCALARS = (complex, set, frozenset, bytes, str, int, float)
_CONTAINERS = (dict, list, tuple, deque)
_CODE = (type, types.ModuleType, types.CodeType, inspect.Signature)


def verify(experiment: type, tree: Mapping[str, Node], text: str) -> None:
    """Refuse a conf.yaml that would build something else than the code declares.

    Args:
        experiment: its class.
        tree: the nodes that were written.
        text: what was written of them.

    Raises:
        BindError: with one line per default that is not re-created.
    """
    written = parsed(text)
    problems = []
    for group, cls in groups(experiment).items():
        for parameter in parameters(cls) or []:
            key = f"{group}.{parameter.name}"
            if parameter.default is MISSING or parameter.name not in tree[group]:
                continue
            difference = _difference(cls, parameter.name, parameter.default, written[group][parameter.name], key)
            if difference:
                problems.append(f"{key}: conf.yaml would not re-create this default: {difference}")
    if problems:
        raise BindError("\n  ".join(problems))


def _difference(cls: type, name: str, default: Any, node: Any, key: str) -> str | None:
    if is_factory(default):
        recorded = recorded_default(cls, name)
        assert recorded is not None, "what has no readable factory was refused before"
        default = recorded[0]
    hint = next(item.hint for item in parameters(cls) or [] if item.name == name)
    objects = {}
    if isinstance(node, dict) and node.get("params") == "???":
        node = {name: value for name, value in node.items() if name != "params"}
        objects["params"] = DUMMY_PARAMS
    if _open(node):
        return None  # the user must fill it in
    try:
        with declaring(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # said when the default itself was made
            return unlike(default, lambda: fitted(build(node, key, **objects), hint))
    except ConfigError as error:
        return str(error)
    except Exception as error:
        return f"it cannot be made again: {type(error).__name__}: {first_line(error)}"


def unlike(default: Any, make: Callable[[], Any]) -> str | None:
    """Where a default differs from what is made of conf.yaml, in words, or None when they are alike.

    What differs between two objects made alike does so by chance: the time, a random number, a serial number.
    """
    made = make()
    found = list(_differences(default, made, "", {}))
    if found and all(item.certain for item in found):
        by_chance = {item.where for item in _differences(made, make(), "", {})}
        found = [item for item in found if item.where not in by_chance]
    return found[0].text if found else None


def differs(first: Any, second: Any) -> str | None:
    """Where two objects differ, in words, or None when they are alike. What cannot be compared counts as different."""
    return next((item.text for item in _differences(first, second, "", {})), None)


@dataclass(frozen=True)
class _Difference:
    """One place where two objects differ; not certain where comparing them raised."""

    where: str
    text: str
    certain: bool = True


def _differences(
    first: Any, second: Any, where: str, seen: dict[tuple[int, int], tuple[Any, Any]]
) -> Iterator[_Difference]:
    if first is second or (id(first), id(second)) in seen:
        return
    seen[id(first), id(second)] = first, second  # kept alive, since many are temporary and ids are reused
    here = where.lstrip(".") or "it"
    if not _same_type(type(first), type(second)):
        yield _Difference(where, f"{here} is a {type(first).__name__} and would be a {type(second).__name__}")
        return
    alike = True
    try:
        for part, one, other in _parts(first, second):
            for found in _differences(one, other, f"{where}{part}", seen):
                alike = False
                yield found
        if alike and not _same_leaf(first, second):
            yield _Difference(where, f"{here} is {first!r:.60} and would be {second!r:.60}")
    except Exception as error:  # of any class's `__eq__`, `__repr__` or properties
        yield _Difference(where, f"{here} cannot be compared: {type(error).__name__}: {first_line(error)}", False)


def _same_type(first: type, second: type) -> bool:
    """Whether two types are one, or were made alike while the program ran, as torch's parametrizations are."""
    return first is second or all(
        getattr(first, fact) == getattr(second, fact) for fact in ("__module__", "__qualname__", "__bases__")
    )


def _parts(first: Any, second: Any) -> Iterator[tuple[str, Any, Any]]:
    """What two objects of one type consist of, pairwise."""
    if isinstance(first, (torch.Tensor, torch.Generator, PurePath, *_CODE)):
        return  # compared by `_same_leaf`
    if isinstance(first, Declaration):
        yield ".target", first.target, second.target
        yield "", _arguments(first), _arguments(second)
        return
    if isinstance(first, types.MethodType):
        yield ".__func__", first.__func__, second.__func__
        yield ".__self__", first.__self__, second.__self__
        return
    if isinstance(first, functools.partial):
        yield ".func", first.func, second.func
        yield ".args", first.args, second.args
        yield ".keywords", first.keywords, second.keywords
        return
    if isinstance(first, types.FunctionType):
        yield ".__code__", first.__code__, second.__code__
        yield ".__defaults__", first.__defaults__, second.__defaults__
        yield ".__closure__", _closure(first), _closure(second)
        return
    if isinstance(first, weakref.ref):
        yield "()", first(), second()
        return
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
    attributes, others = _attributes(first), _attributes(second)
    if attributes or others:
        yield " attributes", sorted(attributes), sorted(others)
        for name in attributes:
            if name in others:
                yield f".{name}", attributes[name], others[name]
    if not isinstance(first, _CONTAINERS + _SCALARS) and (not attributes or _pickles_itself(type(first))):
        yield " state", _pickled(first), _pickled(second)  # of C or Rust, which do not show it as attributes


def _same_leaf(first: Any, second: Any) -> bool:
    """Whether two objects whose parts are alike are alike themselves."""
    if isinstance(first, torch.Tensor):
        if is_lazy(first):
            return bool(first.requires_grad == second.requires_grad)
        facts = ("shape", "dtype", "requires_grad", "_version")
        return all(getattr(first, fact) == getattr(second, fact) for fact in facts)
    if isinstance(first, torch.Generator):
        return torch.equal(first.get_state(), second.get_state())
    if isinstance(first, float) and math.isnan(first):
        return math.isnan(second)
    if isinstance(first, (PurePath, *_SCALARS, *_CODE)):
        return bool(first == second)
    if isinstance(first, (weakref.ref, *_CONTAINERS)) or _attributes(first) or _pickled(first) is not None:
        return True
    return "__eq__" not in _names(type(first)) or bool(first == second)


def _names(cls: type) -> set[str]:
    """Names that a class or a base of it other than `object` defines."""
    return {name for base in cls.__mro__[:-1] for name in base.__dict__}


def _pickles_itself(cls: type) -> bool:
    hooks = ("__reduce__", "__reduce_ex__", "__getstate__")
    return any(getattr(cls, name, None) is not getattr(object, name, None) for name in hooks)


def _pickled(thing: Any) -> Any:
    """What pickle would store of an object, or None when it cannot be pickled, like a lock."""
    try:
        return thing.__reduce_ex__(4)
    except Exception:  # each class has its own way to refuse
        return None


def _attributes(thing: Any) -> dict[str, Any]:
    """`__dict__` and `__slots__` together."""
    found = dict(getattr(thing, "__dict__", {}))
    for cls in type(thing).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(thing, name):
                found[name] = getattr(thing, name)
    return found


def _arguments(declaration: Declaration) -> dict[str, Any]:
    """A declaration's arguments by name, defaults filled in."""
    bound = inspect.signature(declaration.target).bind(*declaration.args, **declaration.kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def _closure(function: types.FunctionType) -> list[Any]:
    cells = function.__closure__ or ()
    return [cell.cell_contents for cell in cells]


def _open(node: Any) -> bool:
    """Whether something in a node must be filled in."""
    if isinstance(node, dict):
        return any(_open(item) for item in node.values())
    if isinstance(node, list):
        return any(_open(item) for item in node)
    return bool(node == "???")
