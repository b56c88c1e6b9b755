"""Dotted paths of classes, functions and constants in conf.yaml."""

import functools
import importlib
import importlib.util
import inspect
import itertools
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from mlx_runtime.config.constructors.declarations import deferred, library_of
from mlx_runtime.errors import BindError, ConfigError

PUBLIC = {
    "mlx_runtime.loop.losses": "mlx_runtime.losses",
    "mlx_runtime.loop.options": "mlx_runtime",
    "mlx_runtime.companions.services.mlflow": "mlx_runtime.trackers",
    "mlx_runtime.companions.services.csv_file": "mlx_runtime.trackers",
    "mlx_runtime.tracking.trackers": "mlx_runtime.trackers",
    "mlx_runtime.companions.services.weights_and_biases": "mlx_runtime.trackers",
    "mlx_runtime.companions.hub.datasets": "mlx_runtime.datasets",
    "timm.models._factory": "timm",
}
"""Paths of classes and functions in conf.yaml, by the module that defines them."""


def path_of(thing: Any) -> str:
    """Return the dotted path by which a class or function can be imported.

    Raise BindError if there is none, as for lambdas, local functions and classes of `__main__`.
    """
    owner = getattr(thing, "__self__", None)
    if inspect.ismethod(thing) and isinstance(owner, type):  # it may be inherited
        return f"{path_of(owner)}.{thing.__name__}"
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    module = PUBLIC.get(str(module), module)
    if "._" in str(module) and library_of(thing) not in deferred:  # like optax._src.alias, which may move
        homes = itertools.accumulate(re.sub(r"\._\w+", "", str(module)).split("."), "{}.{}".format)
        found = (home for home in homes if getattr(sys.modules.get(home), "__dict__", {}).get(name) is thing)
        module = next(found, module)
    path = f"{module}.{name}" if module else str(name)
    if not name or "<" in name or module == "__main__":
        raise BindError(f"{thing!r} cannot be imported by name; define it with a name at the top level of a module")
    try:
        imported = object_at(path)
    except (ImportError, AttributeError):
        imported = None
    if imported != thing:
        raise BindError(f"{path} does not lead back to {thing!r}; define it with a name at the top level of a module")
    return path


def object_at(path: str) -> Any:
    """Import the class, function or constant at a dotted path; ImportError or AttributeError if it is not there."""
    parts = path.split(".")
    if not all(parts):
        raise ImportError(f"{path!r} is not a dotted path")
    for split in range(len(parts) - 1, 0, -1):
        module_name = ".".join(parts[:split])
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name and f"{module_name}.".startswith(f"{error.name}."):
                continue  # not a module, but perhaps a class with the next name
            raise
        return functools.reduce(getattr, parts[split:], module)
    raise ModuleNotFoundError(f"no module named {parts[0]!r}", name=parts[0])


def import_problem(error: Exception) -> str:
    """Return why a path cannot be imported, with the cure."""
    from mlx_runtime.extras import cure  # here, for errors only

    return "; ".join(filter(None, [f"cannot be imported: {str(error).splitlines()[-1]}", cure(error)]))


def named_class(setting: str, name: str, known: Mapping[str, str], needs: Iterable[str]) -> Any:
    """Return the class of a setting, given a word or an import path; ConfigError if it lacks a required method."""
    path, title = known.get(name, name), f"cfg.{setting}={name}"
    try:
        found = object_at(path)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{title} {import_problem(error)}") from error
    if missing := [item for item in needs if not callable(getattr(found, item, None))]:
        raise ConfigError(f"{title} has no method {missing[0]}, which every {setting} has")
    return found


def targets_of(tree: Any) -> Iterator[str]:
    """Yield the target of each node of a config."""
    if isinstance(tree, list):
        for item in tree:
            yield from targets_of(item)
    elif isinstance(tree, dict):
        if isinstance(target := tree.get("_target_"), str):
            yield target
        yield from targets_of(list(tree.values()))


def names_repositories(tree: Any) -> bool:
    """Return True if nodes of a config may name repositories of the Hugging Face Hub."""
    return any(target.endswith((".from_pretrained", ".load_dataset")) for target in targets_of(tree))
