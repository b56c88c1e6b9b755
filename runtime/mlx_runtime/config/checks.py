"""Checks of a config against the signatures of its constructors; all problems are found at once."""

import re
from collections.abc import Iterable, Iterator, Mapping
from inspect import Parameter
from pathlib import Path
from typing import Any, NamedTuple, get_origin

from mlx_runtime.config.building import Tree, split_cfg
from mlx_runtime.config.constructors.signatures import (
    MISSING,
    alternatives,
    convert,
    item_hint,
    parameters,
    takes_any_keyword,
    type_name,
)
from mlx_runtime.config.constructors.targets import loaded_object_at, object_at, path_of
from mlx_runtime.config.projects import commands
from mlx_runtime.errors import suggest


class Problem(NamedTuple):
    """The full key of a value, a line with the key, the problem and the cure, and a cure for values in the file.

    `unquoted` is True if the value would fit as text, in quotes.
    """

    key: str
    text: str
    cure: str = ""
    unquoted: bool = False


class Checker:
    """Compares the values of a config with the parameters of constructors.

    Without `imports`, targets are not imported; `unseen` lists those that were not imported already, and are therefore
    not checked. `variants` are the names that may replace a node, by its key. `project` is False for the conf.yaml of a
    run, which `bind` does not write.
    """

    def __init__(
        self, *, imports: bool = True, variants: Mapping[str, Iterable[str]] | None = None, project: bool = True
    ) -> None:
        self._project = project
        self.object_at = object_at if imports else loaded_object_at
        self._variants = variants or {}
        self.unseen: list[str] = []

    def check(self, tree: Tree, wanted: dict[str, type], base: type) -> Iterator[Problem]:
        """Yield the problems of a config with the `wanted` groups; `base` is the runtime's class of settings."""
        for name in tree:
            if name not in wanted:
                yield Problem(name, f"{name}: there is no such group.{suggest(name, wanted)}")
        for name, cls in wanted.items():
            if name not in tree:
                cure = f"add it with: {commands()} bind" if self._project else "put a good copy of the file back"
                yield Problem(name, f"{name}: missing; {cure}")
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
                free = {f"{name}.{optimizer}.params" for optimizer in tree[name]} if name == "optimizers" else ()
                yield from (item for item in self._value(tree[name], cls, name, path_of(cls)) if item.key not in free)

    def _is_callable(self, path: Any) -> bool:
        try:
            return callable(self.object_at(path))
        except (ImportError, AttributeError):
            return False

    def _value(self, value: Any, hint: Any, key: str, owner: str) -> Iterator[Problem]:
        if value == "???":
            yield Problem(key, f"{key}: ??? must be given a value; {owner} has no default for it")
        elif isinstance(value, dict) and "_target_" in value:
            yield from self._node(value, hint, key, owner)
        elif isinstance(value, dict | list) and _takes_scalars(hint):
            yield Problem(key, f"{key} is a {type(value).__name__}; {owner} takes {type_name(hint)}")
        elif (
            isinstance(value, dict)
            and not _takes_nodes(hint)
            and any(isinstance(v, dict | list) for v in value.values())
        ):
            for name, item in value.items():
                yield from self._value(item, item_hint(hint, dict), f"{key}.{name}", owner)
        elif isinstance(value, list) and _holds_mappings(value):
            for index, item in enumerate(value):
                yield from self._value(item, item_hint(hint, list, index), f"{key}[{index}]", owner)
        else:
            try:
                convert(value, hint)
            except TypeError:
                from mlx_runtime.config.mismatches import mismatch

                objects = _takes_objects(hint)
                text = mismatch(value, hint, key, owner, self._variants.get(key, ()), objects=objects)
                takes_text = all(item in (str, Path, type(None)) for item in alternatives(hint))
                yield Problem(key, text, unquoted=takes_text and isinstance(value, bool | int | float))

    def _node(self, node: Tree, hint: Any, key: str, owner: str) -> Iterator[Problem]:
        path, target_key = node["_target_"], f"{key}._target_"
        if not isinstance(path, str):
            yield Problem(target_key, f"{target_key} is {path!r:.100}, not the dotted path of a class or function")
            return
        try:
            target = self.object_at(path)
        except (ImportError, AttributeError) as error:
            from mlx_runtime.config.constructors.suggestions import import_problem

            mine = self._project and path.partition(".")[0] == owner.partition(".")[0]
            then = f"; if it was renamed in the code, run: {commands()} bind" if mine else ""
            yield Problem(target_key, f"{target_key} is {path!r}, which {import_problem(path, error)}", then)
            return
        if target is None:
            self.unseen.append(path)
            return
        if not node.get("_partial_") and _makes_another(target, hint):
            yield Problem(
                target_key,
                f"{target_key} is {path}, which is not a {path_of(hint)}; {owner} takes one. "
                "A wider type in the code, like a base class, would allow it",
            )
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
                for index, argument in enumerate(value):
                    yield from self._value(argument, Any, f"{here}[{index}]", path)
            elif not takes_any_keyword(items) and name not in ("_target_", "_partial_"):
                from mlx_runtime.config.constructors.suggestions import describe_move

                text = f"{here}: {path} has no such argument.{suggest(name, by_name)}"
                yield Problem(here, describe_move(here) or text)
        if node.get("_partial_") or "_args_" in node:
            return
        for item in items:
            named = item.kind in (item.POSITIONAL_OR_KEYWORD, item.KEYWORD_ONLY)
            if named and item.default is MISSING and item.name not in node:
                here = f"{key}.{item.name}"
                cure = f" with: {commands()} bind" if self._project else f" with +{here}=..."
                yield Problem(here, f"{here}: missing, and {path} has no default for it; add it", cure)


def _holds_mappings(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and any(map(_holds_mappings, value)))


def _takes_scalars(hint: Any) -> bool:
    """Return True for a type or a union of types of numbers and text."""
    return all(item in (bool, float, int, str, type(None)) for item in alternatives(hint))


def _takes_objects(hint: Any) -> bool:
    """Return True for classes whose objects are nodes in conf.yaml, and unions of them: all but Python's own."""
    classes = [item for item in alternatives(hint) if isinstance(item, type) and item is not type(None)]
    return classes != [] and all(item.__module__ != "builtins" for item in classes)


def _takes_nodes(hint: Any) -> bool:
    """Return True if a mapping must be a node: no alternative is a generic type, like dict[str, int]."""
    return _takes_objects(hint) and all(get_origin(item) is None for item in alternatives(hint))


def _makes_another(target: Any, hint: Any) -> bool:
    """Return True if calling a class does not create an instance of the annotated class."""
    if not isinstance(hint, type) or hint in (Any, MISSING) or not isinstance(target, type):
        return False
    try:
        return "__new__" not in vars(target) and not issubclass(target, hint)
    except TypeError:  # a Protocol that cannot be checked at run time
        return False


def ambiguous_words(path: Path) -> Iterator[str]:
    """Describe lines like `flag: yes`, which are booleans in Hydra's YAML 1.1, but words in editors and YAML 1.2."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if match := re.fullmatch(r"\s*(?:- )?([\w.]+): *(yes|no|on|off) *(?:#.*)?", line, re.IGNORECASE):
            name, word = match.groups()
            yield f'line {number}: {name}: {word} could be a word or a boolean; write "{word}", true or false'
