"""The parameters of constructors and their types."""

import dataclasses
import inspect
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mlx_runtime.config.targets import object_at
from mlx_runtime.errors import BindError

MISSING = inspect.Parameter.empty


@dataclass(frozen=True)
class Parameter:
    """One parameter of a constructor.

    Attributes:
        name: its name in the signature.
        hint: resolved type, `Any` if it cannot be resolved, `MISSING` without an annotation.
        default: the default value, or `MISSING`.
        kind: positional only, keyword, `*args` or `**kwargs`, as in `inspect.Parameter`.
    """

    name: str
    hint: Any
    default: Any
    kind: Any


def parameters(target: Callable[..., Any]) -> list[Parameter] | None:
    """Return the parameters of a class or function in order, or None if it has no signature (some C types)."""
    signature = signature_of(target)
    if signature is None:
        return None
    hints = _resolver(target)
    return [
        Parameter(item.name, MISSING if item.annotation is MISSING else hints(item), item.default, item.kind)
        for item in signature.parameters.values()
    ]


def signature_of(target: Callable[..., Any]) -> inspect.Signature | None:
    """Return the signature of a class or function with the errors of `inspect.signature` corrected, or None."""
    try:
        signature = inspect.signature(target)
    except (ValueError, TypeError):
        return None
    items = list(signature.parameters.values())
    if isinstance(target, type) and items and items[0].name == "self":
        del items[0]  # pyo3 classes, like those of tokenizers, list it
    if dataclasses.is_dataclass(target) and hasattr(target.__init__, "__wrapped__"):
        outer = inspect.signature(target.__init__, follow_wrapped=False).parameters.values()
        items += [item for item in outer if item.kind is inspect.Parameter.VAR_KEYWORD]  # configs of transformers
    return signature.replace(parameters=items)


def is_factory(default: Any) -> bool:
    """Return True if a dataclass field shows a placeholder because a factory makes its default."""
    return type(default).__name__ == "_HAS_DEFAULT_FACTORY_CLASS"


def base_of(experiment: type) -> Any:
    """Return the class of the runtime's settings: `TrainConfig`, or `DataConfig` for a data job."""
    return object_at(f"mlx_runtime.{_config_name(experiment)}")


def groups(experiment: type) -> dict[str, type]:
    """Return the groups of an experiment: parameters of its `__init__`, or its annotated attributes without one.

    Raises:
        BindError: a parameter has no type.
    """
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    own = [item for item in parameters(experiment) or [] if item.kind in named]
    if own:
        hints = {item.name: item.hint for item in own}
        owner = f"{experiment.__name__}.__init__"
    else:
        bases = [base for base in experiment.__mro__ if base.__module__.partition(".")[0] not in _FOREIGN]
        names = {name for base in bases for name in inspect.get_annotations(base)}
        hints = {name: hint for name, hint in typing.get_type_hints(experiment).items() if name in names}
        owner = experiment.__name__
    for name, hint in hints.items():
        if hint is MISSING or not isinstance(hint, type):
            title = name.capitalize() if name != "cfg" else _config_name(experiment)
            raise BindError(f"{owner}: {name!r} has no type; write {name}: {title}")
    if "cfg" not in hints:
        raise BindError(f"{owner} has no cfg; write cfg: {_config_name(experiment)}, and name the other groups alike")
    return hints


_FOREIGN = ("mlx_runtime", "builtins")


def _config_name(experiment: type) -> str:
    name: str = getattr(experiment, "CONFIG", "TrainConfig")
    return name


def _resolver(target: Callable[..., Any]) -> Callable[[inspect.Parameter], Any]:
    """Resolve annotations one by one: a name that exists for type checkers only must not hide the others."""
    function = inspect.unwrap(target.__init__ if isinstance(target, type) else target)  # type: ignore[misc]
    try:
        resolved = typing.get_type_hints(function)
    except Exception:  # annotations are arbitrary expressions
        resolved = {}
    namespace = getattr(function, "__globals__", {})

    def hint(item: inspect.Parameter) -> Any:
        if item.name in resolved:
            return resolved[item.name]
        if not isinstance(item.annotation, str):
            return item.annotation
        try:
            return eval(item.annotation, dict(namespace))
        except Exception:
            return Any

    return hint
