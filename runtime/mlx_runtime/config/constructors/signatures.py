"""The parameters of constructors, and conversions of YAML values to their types, like a list to a tuple."""

import contextlib
import dataclasses
import enum
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from mlx_runtime.config.constructors.declarations import is_nnx
from mlx_runtime.config.constructors.targets import object_at, path_of
from mlx_runtime.errors import BindError
from mlx_runtime.sections import Section

MISSING = inspect.Parameter.empty

PASSED = object()
"""Default of a parameter for which a run passes an argument: `rngs` of Flax NNX modules."""

Visit = Callable[[Any, Any, str], None]

SCHEMA_TYPES: dict[Any, str] = {
    **{bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"},
    **{list: "array", tuple: "array", Sequence: "array", dict: "object"},
}


def parameters(target: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """Return the parameters of a class or function, or None if it has no signature, like some C types.

    Annotations are resolved, or replaced by `Any` if that fails; errors of `inspect.signature` are corrected.
    """
    try:
        items = list(inspect.signature(target).parameters.values())
    except (ValueError, TypeError):
        return None
    if isinstance(target, type) and items and items[0].name == "self":
        del items[0]  # pyo3 classes, like those of tokenizers, list it
    hidden = {item.kind for item in items} == {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    if hidden and isinstance(target, type) and type(target).__call__ is not type.__call__:  # of the metaclass of Flax
        items = list(inspect.signature(target.__init__).parameters.values())[1:]  # type: ignore[misc]
    if is_nnx(target):
        items = sorted(map(_passed, items), key=lambda item: item.kind)
    if dataclasses.is_dataclass(target) and hasattr(target.__init__, "__wrapped__"):
        outer = inspect.signature(target.__init__, follow_wrapped=False).parameters.values()
        items += [item for item in outer if item.kind is item.VAR_KEYWORD]  # for configs of transformers
    function = inspect.unwrap(target.__init__ if isinstance(target, type) else target)  # type: ignore[misc]
    names = getattr(function, "__globals__", {})
    return [item.replace(annotation=_resolved(item.annotation, names)) for item in items]


def _passed(item: inspect.Parameter) -> inspect.Parameter:
    is_rngs = item.name == "rngs" and item.kind in (item.POSITIONAL_OR_KEYWORD, item.KEYWORD_ONLY)
    return item.replace(kind=item.KEYWORD_ONLY, default=PASSED) if is_rngs else item


def _resolved(hint: Any, names: dict[str, Any]) -> Any:
    """Resolve one annotation by itself, because a name that only type checkers import would fail all others."""
    if hint is MISSING:
        return hint
    try:
        return typing.get_type_hints(types.SimpleNamespace(__annotations__={"it": hint}), names)["it"]
    except Exception:  # annotations are arbitrary expressions
        return Any


def takes_any_keyword(items: list[inspect.Parameter]) -> bool:
    return any(item.kind is item.VAR_KEYWORD for item in items)


def is_factory(default: Any) -> bool:
    """Return True if the default of a dataclass field is the placeholder of a factory."""
    return type(default).__name__ == "_HAS_DEFAULT_FACTORY_CLASS"


def base_of(experiment: type) -> Any:
    """Return the class of the runtime's settings: `TrainConfig`, or `DataConfig` for a data job."""
    return object_at(f"mlx_runtime.{getattr(experiment, 'CONFIG', 'TrainConfig')}")


def groups(experiment: type) -> dict[str, type]:
    """Return the groups of an experiment: parameters of its `__init__` or, without one, annotated attributes."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    items = {item.name: item for item in parameters(experiment) or [] if item.kind in named}
    hints = {name: item.annotation for name, item in items.items()}
    owner = f"{experiment.__name__}.__init__"
    if not hints:
        ours = ("mlx_runtime", "builtins")
        bases = [base for base in experiment.__mro__ if base.__module__.partition(".")[0] not in ours]
        names = {name for base in bases for name in inspect.get_annotations(base)}
        hints = {name: hint for name, hint in typing.get_type_hints(experiment).items() if name in names}
        owner = experiment.__name__
    for name, hint in hints.items():
        if hint is MISSING or not isinstance(hint, type):
            title = name.capitalize() if name != "cfg" else base_of(experiment).__name__
            raise BindError(f"{owner}: {name!r} has no type; write {name}: {title}")
        if (items[name].default if name in items else getattr(experiment, name, MISSING)) not in (MISSING, None):
            raise BindError(f"{owner}: {name!r} has a default; write the defaults of its arguments in {hint.__name__}")
    if "cfg" not in hints:
        example = f"cfg: {base_of(experiment).__name__}"
        raise BindError(f"{owner} has no cfg; write {example}, and declare the other groups the same way")
    return hints


def settings_of(experiment: type) -> dict[str, Any]:
    """Return the plain defaults of `cfg`: those of its class, and the runtime's for settings that it lacks."""
    return plain_defaults(base_of(experiment), groups(experiment)["cfg"])


def plain_defaults(*classes: type) -> dict[str, Any]:
    """Return the plain defaults of classes; later classes take precedence."""
    items = [item for cls in classes for item in parameters(cls) or []]
    return {item.name: value for item in items if (value := plain(item.default)) is not MISSING}


def plain(value: Any) -> Any:
    """Return a value as in conf.yaml, or `MISSING` if it is not plain."""
    if isinstance(value, list | tuple):
        items = [plain(item) for item in value]
        return MISSING if MISSING in items else items
    if isinstance(value, Section):
        node = {name: plain(item) for name, item in vars(value).items()}
        return MISSING if MISSING in node.values() else {"_target_": path_of(type(value)), **node}
    alike = value is None or type(value) in (bool, int, float) or (type(value) is str and "${" not in value)
    return value if alike else MISSING


def alternatives(hint: Any) -> tuple[Any, ...]:
    """Return the types of a union, or the single type of another annotation."""
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def convert(value: Any, hint: Any, key: str = "", visit: Visit | None = None) -> Any:
    """Convert a YAML value to an annotated type; TypeError if it does not fit.

    Nodes and `???` inside the value fit any type; `visit` is called with each one, its type and its key.
    """
    if (isinstance(value, dict) and "_target_" in value) or (isinstance(value, str) and value == "???"):
        if visit is not None:
            visit(value, hint, key)
        return value
    if hint in (Any, MISSING, object) or isinstance(hint, typing.TypeVar):
        if visit is None or type(value) not in (dict, list):
            return value
        hint = type(value)
    kind, arguments = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind in (typing.Union, types.UnionType):
        found = {}
        for choice in arguments:
            with contextlib.suppress(TypeError):
                found[choice] = convert(value, choice)
        if not found:
            raise TypeError
        if visit is not None:  # nodes fit any type, so several alternatives may fit
            convert(value, next(iter(found)) if len(found) == 1 else Any, key, visit)
        exact = (item for choice, item in found.items() if (typing.get_origin(choice) or choice) is type(value))
        return next(exact, next(iter(found.values())))
    if kind is Literal:
        return _check(value, any(type(value) is type(choice) and value == choice for choice in arguments))
    if kind is tuple and isinstance(value, list | tuple):
        hints = arguments or (Any, ...)
        if hints[1:] == (...,):
            hints = hints[:1] * len(value)
        items = zip(_check(value, len(hints) == len(value)), hints, strict=True)
        return tuple(convert(item, wanted, f"{key}[{index}]", visit) for index, (item, wanted) in enumerate(items))
    if kind in (list, Sequence) and isinstance(value, list):
        wanted = arguments[0] if arguments else Any
        return [convert(item, wanted, f"{key}[{index}]", visit) for index, item in enumerate(value)]
    if kind in (dict, Mapping) and isinstance(value, dict):
        names, wanted = arguments or (Any, Any)
        return {convert(name, names): convert(item, wanted, f"{key}.{name}", visit) for name, item in value.items()}
    if visit is not None and type(value) in (dict, list):
        convert(value, Any, key, visit)  # the nodes in other containers
    if kind is float and type(value) is int:
        return value  # Python accepts an int, too; an int default of a float stays an int
    if kind is int and type(value) is bool:
        raise TypeError  # in Python a bool is an int; in a config it is a mistake
    if isinstance(kind, type) and isinstance(value, str):
        if issubclass(kind, enum.Enum) and value in kind.__members__:
            return kind[value]
        if issubclass(kind, Path):
            return kind(value)
    try:
        fits = isinstance(value, kind)
    except TypeError:  # a special form without instances, like Callable[..., int] or NewType
        fits = True
    return _check(value, fits)


def _check(value: Any, fits: bool) -> Any:
    if not fits:
        raise TypeError
    return value


def try_convert(value: Any, hint: Any) -> Any:
    """Convert a value if it fits the type; otherwise return it unchanged, like an object that was already built."""
    try:
        return convert(value, hint)
    except TypeError:
        return value


def schema_type(hint: Any) -> dict[str, Any]:
    """Return the JSON Schema of the values that `convert` accepts for a type; {} accepts anything."""
    kinds = alternatives(hint)
    if len(kinds) > 1:
        choices = [schema_type(kind) for kind in kinds]
        return {"anyOf": choices} if all(choices) else {}
    origin = typing.get_origin(hint) or hint
    if origin is Literal:
        return {"enum": list(typing.get_args(hint))}
    if isinstance(origin, type) and issubclass(origin, enum.Enum):
        return {"enum": list(origin.__members__)}
    plain = str if isinstance(origin, type) and issubclass(origin, Path) else origin
    return {"type": SCHEMA_TYPES[plain]} if plain in SCHEMA_TYPES else {}


def type_name(hint: Any) -> str:
    """Return a type as written in code."""
    if hint is type(None):
        return "None"
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint).replace("typing.", "")


def argument_texts(target: Any) -> dict[str, str]:
    """Return the texts on arguments in the Args or Attributes sections of a class and its bases."""
    texts: dict[str, str] = {}
    sources = reversed(target.__mro__[:-1]) if isinstance(target, type) else [target]
    for source in sources:
        for owner in (source, vars(source).get("__init__") if isinstance(source, type) else None):
            text = inspect.cleandoc(getattr(owner, "__doc__", None) or "")
            found = re.findall(r"^ {4}(\w+)(?: \([^)]*\))?: (.+(?:\n {8}.+)*)$", text, re.MULTILINE)
            texts |= {name: " ".join(lines.split()) for name, lines in found}
    return texts
