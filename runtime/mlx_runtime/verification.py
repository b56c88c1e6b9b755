"""Does conf.yaml re-create the defaults of the code? Builds each from the YAML text and compares deeply.

Freshly initialised weights differ by chance, so tensors are compared by shape, dtype, `requires_grad` and `_version`,
which counts in-place changes: a default that was changed after it was made has a higher one.
"""

import functools
import inspect
import math
import types
import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

import torch

from mlx_runtime.declarations import Declaration, declaring
from mlx_runtime.errors import BindError, ConfigError
from mlx_runtime.loading import build, fitted, parsed
from mlx_runtime.nodes import DUMMY_PARAMS, Node
from mlx_runtime.signatures import MISSING, groups, is_factory, parameters, recorded_default


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
            return differs(default, fitted(build(node, key, **objects), hint))
    except ConfigError as error:
        return str(error)


def differs(first: Any, second: Any, where: str = "", seen: set[tuple[int, int]] | None = None) -> str | None:
    """Where two objects differ, in words, or None when they are alike."""
    seen = set() if seen is None else seen
    if first is second or (id(first), id(second)) in seen:
        return None
    seen.add((id(first), id(second)))
    here = where.lstrip(".") or "it"
    if type(first) is not type(second):
        return f"{here} is a {type(first).__name__} and would be a {type(second).__name__}"
    for part, one, other in _parts(first, second):
        found = differs(one, other, f"{where}{part}", seen)
        if found:
            return found
    if not _same_leaf(first, second):
        return f"{here} is {first!r:.60} and would be {second!r:.60}"
    return None


def _parts(first: Any, second: Any) -> Iterator[tuple[str, Any, Any]]:
    """What two objects of one type consist of, pairwise."""
    if isinstance(first, torch.Tensor | torch.Generator | PurePath):
        return  # told by `_same_leaf`
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
        yield ".__closure__", _closure(first), _closure(second)
        return
    if isinstance(first, dict):
        yield ".keys()", list(first), list(second)
        for name in first:
            if name in second:
                yield f"[{name!r}]", first[name], second[name]
    elif isinstance(first, list | tuple | deque):
        yield " length", len(first), len(second)
        for index, (one, other) in enumerate(zip(first, second)):  # noqa: B905 - the length was compared
            yield f"[{index}]", one, other
    if not isinstance(first, type | types.ModuleType | types.CodeType | inspect.Signature):
        one, other = _attributes(first), _attributes(second)
        if one or other:
            yield " attributes", sorted(one), sorted(other)
            for name in one:
                if name in other:
                    yield f".{name}", one[name], other[name]


def _same_leaf(first: Any, second: Any) -> bool:
    """Whether two objects whose parts are alike are alike themselves."""
    if isinstance(first, torch.Tensor):
        facts = ("shape", "dtype", "requires_grad", "_version")
        return all(getattr(first, fact) == getattr(second, fact) for fact in facts)
    if isinstance(first, float) and math.isnan(first):
        return math.isnan(second)
    if isinstance(first, complex | set | frozenset | bytes | str | int | float):
        return bool(first == second)
    if any(True for _ in _parts(first, second)) or isinstance(first, torch.Generator | dict | list | tuple | deque):
        return True
    if isinstance(first, PurePath):
        return bool(first == second)
    stateless = not isinstance(first, type | types.BuiltinFunctionType) and "__eq__" not in _names(type(first))
    return stateless or bool(first == second)


def _names(cls: type) -> set[str]:
    """Names that a class or a base of it other than `object` defines."""
    return {name for base in cls.__mro__[:-1] for name in base.__dict__}


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
