"""Merging of the code's defaults into conf.yaml; the user's values and comments stay."""

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ruamel.yaml.comments import CommentedMap

from mlx_runtime.config.binding.nodes import Node
from mlx_runtime.config.binding.text import quote_strings, remove_key
from mlx_runtime.config.constructors.signatures import parameters, takes_any_keyword
from mlx_runtime.config.constructors.targets import object_at
from mlx_runtime.config.variants import values_by_key
from mlx_runtime.errors import BindError

NodeOfClass = Callable[[str, str], Node | None]
"""Returns the node of a user's `_target_`, given its path and key, or None if the class does not exist any more."""


@dataclass
class Changes:
    """The changes of a merge, by full keys.

    `updated` values had the former default and get the new one, `dropped` maps keys to removed values with comments,
    and `kept` lists the user's values that differ from the default. `chosen` has the classes that the user has chosen,
    by the full key of their nodes.
    """

    added: list[str] = field(default_factory=list)
    updated: list[str] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)
    chosen: dict[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """True if the file must change."""
        return bool(self.added or self.updated or self.dropped)

    def lines(self) -> list[str]:
        """Return one line per key."""
        return [
            *(f"added    {key}" for key in self.added),
            *(f"updated  {key} (to the new default)" for key in self.updated),
            *(f"dropped  {key}: {text} (no longer an argument)" for key, text in self.dropped.items()),
            *(f"kept     {key} (your value; the code's default differs)" for key in self.kept),
        ]


@dataclass
class Merge:
    """Updates the mappings of a file in place, so that comments stay where they are.

    `former` contains the defaults at the last bind by full key; a value that still equals its former default follows
    the code. `node_of_class` describes classes that only the file names; `changes` receives all changes. `chosen` has
    the classes that the user had chosen at the last bind, by the full key of their nodes.
    """

    former: Mapping[str, Any]
    node_of_class: NodeOfClass
    changes: Changes
    chosen: Mapping[str, str] = field(default_factory=dict)

    def into(self, old: CommentedMap, new: Node, key: str = "") -> None:
        """Update `old`, the mapping at `key` in the file, to match the code's node `new`."""
        items = parameters(object_at(new["_target_"])) if "_target_" in new else []
        open_ended = items is None or takes_any_keyword(items)  # without a signature, nothing can be dropped
        for name, value in new.items():
            here = f"{key}.{name}".lstrip(".")
            if name not in old:
                old[name] = quote_strings(value)
                self.changes.added.append(here)
            elif _is_node(value) and isinstance(old[name], CommentedMap):
                self._node(old[name], value, here)
            elif name != "_target_" and _differ(old[name], value):
                if self._unedited(old[name], here):
                    old[name] = quote_strings(value)
                    self.changes.updated.append(here)
                else:
                    self.changes.kept.append(here)
        for name in [name for name in old if name not in new]:
            if not open_ended and not str(name).startswith("_"):
                value = json.dumps(old[name], default=str, ensure_ascii=False)
                self.changes.dropped[f"{key}.{name}".lstrip(".")] = f"{value}  {remove_key(old, name)}".rstrip()

    def _node(self, old: CommentedMap, new: Node, key: str) -> None:
        """Update a node of the code's class, of a class that the code no longer uses, or of the user's choice."""
        path = old.get("_target_", new["_target_"])
        if path == new["_target_"]:
            self.into(old, new, key)
            return
        try:
            left_by_code = self.former.get(f"{key}._target_") == path
            users = None if left_by_code else self.node_of_class(path, key)
        except BindError as error:
            hint = f"name another class there, or {new['_target_']}, the code's default"
            raise BindError(f"{key}._target_ is {path}, which cannot be described ({error}); {hint}") from error
        if users is None:
            self._replace(old, new, key)
            return
        self.changes.kept.append(f"{key}._target_")
        if old.get("_partial_"):  # its caller passes the other arguments
            users = {name: value for name, value in users.items() if name in old}
        self.changes.chosen[key] = path
        before = self.chosen.get(key, self.former.get(f"{key}._target_", path))
        former: Mapping[str, Any] = {}  # since the choice, all values are the user's
        if before != path and not old.get("_partial_"):  # a partial has no defaults, only arguments
            former = self._defaults_of(self.chosen[key], key) if key in self.chosen else self.former
        others = Merge(former, self.node_of_class, self.changes, self.chosen)
        others.into(old, users, key)

    def _defaults_of(self, path: str, key: str) -> dict[str, Any]:
        """Return the defaults of the class that the user had chosen before, by full key."""
        with contextlib.suppress(BindError):
            return {f"{key}.{name}": value for name, value in values_by_key(self.node_of_class(path, key)).items()}
        return {}

    def _replace(self, old: CommentedMap, new: Node, key: str) -> None:
        """Change the class of a node; arguments of both classes keep the user's value."""
        for name in list(old):
            if name not in new and (str(name).startswith("_") or self._unedited(old[name], f"{key}.{name}")):
                remove_key(old, name)
        old["_target_"] = new["_target_"]
        old.move_to_end("_target_", last=False)
        self.changes.updated.append(f"{key}._target_")
        count = len(self.changes.added)
        self.into(old, new, key)
        del self.changes.added[count:]  # they belong to the new class

    def _unedited(self, value: Any, key: str) -> bool:
        """Return True if the user has not edited the value: it is the former default, or `???` without one."""
        return not _differ(value, self.former[key]) if key in self.former else bool(value == "???")


def _differ(first: Any, second: Any) -> bool:
    """Return True unless two YAML values are the same; true is not 1, and .nan is .nan."""
    return json.dumps(first, default=str) != json.dumps(second, default=str)


def _is_node(value: Any) -> bool:
    return isinstance(value, dict) and "_target_" in value
