"""Checks of a config against the signatures of its constructors; all problems are found at once."""

import re
from collections.abc import Iterator
from inspect import Parameter
from pathlib import Path
from typing import Any, NamedTuple

from mlx_runtime.config.building import Tree, names_code, split_cfg
from mlx_runtime.config.constructors.signatures import (
    MISSING,
    alternatives,
    convert,
    item_hint,
    parameters,
    takes_any_keyword,
    type_name,
)
from mlx_runtime.config.constructors.targets import import_problem, object_at, path_of
from mlx_runtime.errors import suggest
from mlx_runtime.sections import Section


class Problem(NamedTuple):
    """The full key of a value, a line with the key, the problem and the cure, and whether text lacks quotes."""

    key: str
    text: str
    unquoted: bool = False


class Checker:
    """Compares the values of a config with the parameters of constructors."""

    def check(self, tree: Tree, wanted: dict[str, type], base: type) -> Iterator[Problem]:
        """Yield the problems of a config with the `wanted` groups; `base` is the runtime's class of settings."""
        for name in tree:
            if name not in wanted:
                yield Problem(name, f"{name}: there is no such group.{suggest(name, wanted)}")
        for name, cls in wanted.items():
            if name not in tree:
                yield Problem(name, f"{name}: missing; bind again, or put a good copy of the file back")
            elif isinstance(tree[name], dict) and "_target_" not in tree[name]:
                yield Problem(name, f"{name}: _target_ is missing; add _target_: {path_of(cls)}")
            elif name == "cfg" and isinstance(tree[name], dict) and self._is_callable(tree[name].get("_target_")):
                own, rest = split_cfg(tree[name], base)
                found = [*self._value(own, cls, name, path_of(cls)), *self._value(rest, base, name, path_of(base))]
                hints = {item.name: item.annotation for item in parameters(base) or []}
                wrong = {key for problem in found for key in problem.key.split(".")[1:2]}
                for key in own:  # your type may be wider
                    if key in hints and key not in wrong:
                        found += self._value(own[key], hints[key], f"{name}.{key}", path_of(base))
                yield from found
            else:  # the `params` of optimizers come from the models
                found = [*self._value(tree[name], cls, name, path_of(cls))]
                yield from (item for item in found if not re.fullmatch(r"optimizers\.\w+\.params", item.key))

    def settings(self, values: Tree, base: type, key: str = "cfg") -> Iterator[Problem]:
        """Yield the problems of the runtime's own settings in `cfg`, without those of a user's class."""
        for item in parameters(base) or []:
            value, here, hint = values.get(item.name), f"{key}.{item.name}", item.annotation
            if isinstance(value, dict) and isinstance(hint, type) and issubclass(hint, Section):
                yield from self.settings(value, hint, here)
            elif item.name in values and not names_code(value):
                yield from self._value(value, hint, here, path_of(base))

    def _is_callable(self, path: Any) -> bool:
        try:
            return callable(object_at(path))
        except (ImportError, AttributeError):
            return False

    def _value(self, value: Any, hint: Any, key: str, owner: str) -> Iterator[Problem]:
        if value == "???":
            yield Problem(key, f"{key}: ??? must be given a value; {owner} has no default for it")
        elif isinstance(value, dict) and "_target_" in value:
            yield from self._node(value, hint, key, owner)
        else:
            yield from self._items(value, hint, key, owner)
            try:
                convert(value, hint)
            except TypeError:
                texts = all(item in (str, Path, type(None)) for item in alternatives(hint))
                unquoted = texts and isinstance(value, bool | int | float)
                yield Problem(key, _mismatch(value, hint, key, owner), unquoted)

    def _items(self, value: Any, hint: Any, key: str, owner: str) -> Iterator[Problem]:
        """Check the nodes in a list or mapping; `convert` checks the other items."""
        items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for name, item in items:
            here = f"{key}.{name}" if isinstance(value, dict) else f"{key}[{name}]"
            inner = item_hint(hint, dict) if isinstance(value, dict) else item_hint(hint, list, name)
            if item == "???" or (isinstance(item, dict) and "_target_" in item):
                yield from self._value(item, inner, here, owner)
            else:
                yield from self._items(item, inner, here, owner)

    def _node(self, node: Tree, hint: Any, key: str, owner: str) -> Iterator[Problem]:
        path, target_key = node["_target_"], f"{key}._target_"
        if not isinstance(path, str):
            yield Problem(target_key, f"{target_key} is {path!r:.100}, not the dotted path of a class or function")
            return
        try:
            target = object_at(path)
        except (ImportError, AttributeError) as error:
            yield Problem(target_key, f"{target_key} is {path!r}, which {import_problem(path, error)}")
            return
        if not node.get("_partial_") and _makes_another(target, hint):
            yield Problem(target_key, f"{target_key} is {path}, which is not a {path_of(hint)}, as {owner} wants")
        items = parameters(target)
        if items is not None:
            yield from self._arguments(node, path, items, key)

    def _arguments(self, node: Tree, path: str, items: list[Parameter], key: str) -> Iterator[Problem]:
        by_name = {item.name: item for item in items}
        for name, value in node.items():
            here, item = f"{key}.{name}", by_name.get(name)
            if item is not None and item.kind is not item.VAR_KEYWORD:
                if value == "???" and item.default is not MISSING:
                    yield Problem(here, f"{here}: ??? must be given a value or removed, as {path} has a default")
                elif value is not None or item.default is not None:  # as in `stride: int = None`
                    yield from self._value(value, item.annotation, here, path)
            elif name == "_args_":
                yield from self._items(value, Any, here, path)
            elif not takes_any_keyword(items) and name not in ("_target_", "_partial_"):
                yield Problem(here, f"{here}: {path} has no such argument.{suggest(name, by_name)}")
        if node.get("_partial_") or "_args_" in node:
            return
        for item in items:
            named = item.kind in (item.POSITIONAL_OR_KEYWORD, item.KEYWORD_ONLY)
            if named and item.default is MISSING and item.name not in node:
                here = f"{key}.{item.name}"
                cure = f"bind again, or add it with +{here}=..."
                yield Problem(here, f"{here}: missing, and {path} has no default for it; {cure}")


def _mismatch(value: Any, hint: Any, key: str, owner: str) -> str:
    text = f"{key} is {value!r:.100}; {owner} takes {type_name(hint)}"
    if isinstance(value, dict) and isinstance(hint, type) and hint.__module__ != "builtins":
        return f"{key} has no _target_; {owner} takes {type_name(hint)}"
    return text


def _makes_another(target: Any, hint: Any) -> bool:
    """Return True if calling a class does not create an instance of the annotated class."""
    if not isinstance(hint, type) or hint in (Any, MISSING) or not isinstance(target, type):
        return False
    try:
        return "__new__" not in vars(target) and not issubclass(target, hint)
    except TypeError:  # a Protocol that cannot be checked at run time
        return False
