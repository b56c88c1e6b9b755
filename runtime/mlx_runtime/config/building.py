"""Build live objects from a checked config."""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from mlx_runtime.config.conversion import fitted
from mlx_runtime.config.declarations import Declaration, declared, is_dataset, made_on_read
from mlx_runtime.config.signatures import parameters
from mlx_runtime.config.targets import object_at, path_of
from mlx_runtime.errors import (
    USER_ERRORS,
    ConfigError,
    full_message,
)

Tree = dict[str, Any]

Context = Callable[[], contextlib.AbstractContextManager[None]]


def build(node: Any, key: str = "", **objects: Any) -> Any:
    """Build the object that a node describes, arguments first.

    Works like `instantiate(node, _convert_="all")` of Hydra, except that arguments are converted to their annotated
    types (lists to tuples, strings to paths and enums), and that a `_partial_` node gives a `functools.partial` of the
    target itself.

    Args:
        node: a mapping with `_target_`, or any plain value.
        key: full key of the node, for errors.
        objects: further arguments that are not YAML, passed as they are.

    Raises:
        ConfigError: a constructor refused its arguments.
    """
    return _build(node, key, lambda target: target, objects)


def declare(node: Any, key: str = "", **objects: Any) -> Any:
    """Like `build`, with a Declaration in place of each torch Dataset."""
    return _build(node, key, declared, objects)


def build_group(node: Any, key: str, context: Context) -> Any:
    """Build a group of datasets, each of which is made when it is first read.

    If the constructor of the group does more with its datasets than store them, all are made at once.

    Args:
        node, key: as for `build`.
        context: entered while a dataset is made.

    Raises:
        ConfigError: a constructor refused its arguments.
    """
    try:
        group = declare_group(node, key, context)
    except (ConfigError, TypeError):
        return build(node, key)
    return build(node, key) if any(is_dataset(type(item)) for item in vars(group).values()) else group


def declare_group(node: Any, key: str, context: Context = contextlib.nullcontext) -> Any:
    """Build a group of datasets with a Declaration in place of each; arguments as for `build_group`."""
    cls = object_at(node["_target_"])

    def callee(target: Any) -> Any:
        if target is cls:
            return made_on_read(cls, context)
        return functools.partial(Declaration, target) if inspect.isroutine(target) else declared(target)

    return _build(node, key, callee, {})


def _build(node: Any, key: str, callee: Callable[[Any], Any], objects: Mapping[str, Any]) -> Any:
    """Build an object.

    Args:
        callee: returns what to call instead of a target.
    """
    if isinstance(node, list):
        return [_build(item, f"{key}[{index}]", callee, {}) for index, item in enumerate(node)]
    if not isinstance(node, dict):
        return node
    names = [name for name in node if name not in ("_target_", "_partial_")]
    arguments = {name: _build(node[name], f"{key}.{name}", callee, {}) for name in names}
    if "_target_" not in node:
        return arguments
    target = object_at(node["_target_"])
    args = arguments.pop("_args_", [])
    known = parameters(target) or []
    hints = {item.name: item.hint for item in known if item.kind is not inspect.Parameter.VAR_KEYWORD}
    args = [fitted(value, item.hint) for value, item in zip(args, known)] + args[len(known) :]  # noqa: B905
    kwargs = {name: fitted(value, hints.get(name, Any)) for name, value in arguments.items()} | dict(objects)
    if node.get("_partial_"):
        return functools.partial(target, *args, **kwargs)
    try:
        return callee(target)(*args, **kwargs)
    except USER_ERRORS as error:
        why = f"{type(error).__name__}: {full_message(error)}"
        raise ConfigError(f"{key}: {node['_target_']} cannot be built: {why}") from error


def build_cfg(node: Tree, base: type) -> Any:
    """Build the group `cfg`. Settings of the runtime that its class lacks become attributes of the object.

    Args:
        node: config node of the group.
        base: the runtime's class of settings, whose defaults fill in what is missing.

    Raises:
        ConfigError: a constructor refused its arguments.
    """
    own, rest = split_cfg(node, base)
    cfg, settings = build(own, "cfg"), build(rest, "cfg")
    for item in dataclasses.fields(base):
        if not hasattr(cfg, item.name):
            object.__setattr__(cfg, item.name, getattr(settings, item.name))
    return cfg


def split_cfg(node: Tree, base: type) -> tuple[Tree, Tree]:
    """Split the node `cfg` in two: the settings of its own class, and the runtime's settings that its class lacks."""
    taken = {item.name for item in parameters(object_at(node["_target_"])) or []}
    rest = {item.name for item in dataclasses.fields(base)} - taken
    own = {name: value for name, value in node.items() if name not in rest}
    return own, {"_target_": path_of(base)} | {name: value for name, value in node.items() if name in rest}
