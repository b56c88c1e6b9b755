"""Checks of a config against the signatures of constructors; all problems are found at once."""

import re
from collections.abc import Iterable, Iterator
from inspect import Parameter
from pathlib import Path
from typing import Any, NamedTuple

from mlx_runtime.config.building import Tree, runtime_settings, split_cfg
from mlx_runtime.config.constructors.signatures import (
    MISSING,
    PASSED,
    alternatives,
    convert,
    parameters,
    takes_any_keyword,
    type_name,
)
from mlx_runtime.config.constructors.targets import import_problem, object_at, path_of
from mlx_runtime.errors import suggest
from mlx_runtime.sections import OF_MODELS


class Problem(NamedTuple):
    """The full key of a value, a line with the key, the problem and the cure, and whether text lacks quotes."""

    key: str
    text: str
    unquoted: bool = False


def problems_of(tree: Tree, wanted: dict[str, type], base: type) -> Iterator[Problem]:
    """Yield the problems of a config with the `wanted` groups; `base` is the runtime's class of settings."""
    for name in tree:
        if name not in wanted:
            yield Problem(name, f"{name}: there is no such group.{suggest(name, wanted)}")
    for name, cls in wanted.items():
        if name not in tree:
            yield Problem(name, f"{name}: missing; bind again, or put a good copy of the file back")
        elif isinstance(tree[name], dict) and "_target_" not in tree[name]:
            yield Problem(name, f"{name}: _target_ is missing; add _target_: {path_of(cls)}")
        elif name == "cfg" and isinstance(tree[name], dict):
            yield from _cfg_problems(tree[name], cls, base)
        else:  # the `params` of optimizers come from the models
            found = _value_problems(tree[name], cls, name, path_of(cls))
            yield from (item for item in found if not re.fullmatch(r"optimizers\.\w+\.params", item.key))


def settings_problems(cfg: Any, base: type) -> list[Problem]:
    """Return the problems of the runtime's own settings in `cfg`, without importing classes of the user."""
    settings = runtime_settings(cfg, base) if isinstance(cfg, dict) else cfg
    return _value_problems(settings, base, "cfg", path_of(base))


def _cfg_problems(cfg: Tree, cls: type, base: type) -> Iterable[Problem]:
    """Return the problems of `cfg`: of the user's class, of settings that it lacks, and of types wider than ours."""
    try:
        own, rest = split_cfg(cfg, base)
    except (ImportError, AttributeError):
        return _value_problems(cfg, cls, "cfg", path_of(cls))
    found = [
        *settings_problems(own, base),
        *_value_problems(own, cls, "cfg", path_of(cls)),
        *_value_problems(rest, base, "cfg", path_of(base)),
    ]
    return {item.key: item for item in found}.values()


def _value_problems(value: Any, hint: Any, key: str, owner: str) -> list[Problem]:
    found: list[Problem] = []

    def visit(part: Any, wanted: Any, here: str) -> None:
        if part == "???":
            found.append(Problem(here, f"{here}: ??? must be given a value; {owner} has no default for it"))
        else:
            found.extend(_node_problems(part, wanted, here, owner))

    try:
        convert(value, hint, key, visit)
    except TypeError:
        of_class = isinstance(value, dict) and isinstance(hint, type) and hint.__module__ != "builtins"
        what = "has no _target_" if of_class else f"is {value!r:.100}"
        texts = all(item in (str, Path, type(None)) for item in alternatives(hint))
        unquoted = texts and isinstance(value, bool | int | float)
        found.append(Problem(key, f"{key} {what}; {owner} takes {type_name(hint)}", unquoted))
    return found


def _node_problems(node: Tree, hint: Any, key: str, owner: str) -> Iterator[Problem]:
    path, target_key = node["_target_"], f"{key}._target_"
    section = next((item for item in OF_MODELS if f"{key}.".startswith(f"cfg.{item}.")), "")
    plain = section and (path != path_of(OF_MODELS[section]) or key == f"cfg.{section}")
    if plain or not isinstance(path, str):
        needed = f"allowed in cfg.{section}; remove it" if plain else "the dotted path of a class or function"
        yield Problem(target_key, f"{target_key} is {path!r:.100}, not {needed}")
        return
    try:
        target = object_at(path)
    except (ImportError, AttributeError) as error:
        yield Problem(target_key, f"{target_key} is {path!r}, which {import_problem(error)}")
        return
    if not node.get("_partial_") and _makes_another(target, hint):
        yield Problem(target_key, f"{target_key} is {path}, which is not a {path_of(hint)}, as {owner} wants")
    items = parameters(target)
    if items is not None:
        yield from _argument_problems(node, path, items, key)


def _argument_problems(node: Tree, path: str, items: list[Parameter], key: str) -> Iterator[Problem]:
    by_name = {item.name: item for item in items}
    for name, value in node.items():
        here, item = f"{key}.{name}", by_name.get(name)
        if item is not None and item.kind is not item.VAR_KEYWORD:
            if value == "???" and item.default is not MISSING:
                yield Problem(here, f"{here}: ??? must be given a value or removed, as {path} has a default")
            elif value is not None or item.default is not None:  # as in `stride: int = None`
                yield from _value_problems(value, item.annotation, here, path)
        elif name == "_args_":
            yield from _value_problems(value, Any, here, path)
        elif not takes_any_keyword(items) and name not in ("_target_", "_partial_"):
            cure = suggest(name, [item.name for item in items if item.default is not PASSED])
            yield Problem(here, f"{here}: {path} has no such argument.{cure}")
    if node.get("_partial_") or "_args_" in node:
        return
    for item in items:
        named = item.kind in (item.POSITIONAL_OR_KEYWORD, item.KEYWORD_ONLY)
        if named and item.default is MISSING and item.name not in node:
            here = f"{key}.{item.name}"
            cure = f"bind again, or add it with +{here}=..."
            yield Problem(here, f"{here}: missing, and {path} has no default for it; {cure}")


def _makes_another(target: Any, hint: Any) -> bool:
    """Return True if calling a class does not create an instance of the annotated class."""
    if not isinstance(hint, type) or hint in (Any, MISSING) or not isinstance(target, type):
        return False
    try:
        return "__new__" not in vars(target) and not issubclass(target, hint)
    except TypeError:  # a Protocol that cannot be checked at run time
        return False
