"""Merging of the code's defaults into the text of conf.yaml; the user's values and comments stay."""

import io
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import CommentMark
from ruamel.yaml.scalarstring import DoubleQuotedScalarString
from ruamel.yaml.tokens import CommentToken

from mlx_runtime.config.binding.nodes import Node
from mlx_runtime.config.constructors.signatures import parameters, takes_any_keyword
from mlx_runtime.config.constructors.targets import object_at
from mlx_runtime.errors import BindError
from mlx_runtime.storage.documents import AMBIGUOUS, yaml_message
from mlx_runtime.storage.local import read_regular

NodeOfClass = Callable[[str, str], Node]
"""Returns the node of a user's `_target_` with all defaults, given its path and key."""


@dataclass
class Changes:
    """The changes of a merge, by full keys.

    `updated` values had the former default and get the new one, `dropped` maps keys to removed values with comments,
    and `kept` lists the user's values that differ from the default.
    """

    added: list[str] = field(default_factory=list)
    updated: list[str] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)

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
    the code. `node_of_class` describes classes that only the file names; `changes` receives all changes.
    """

    former: Mapping[str, Any]
    node_of_class: NodeOfClass
    changes: Changes = field(default_factory=Changes)

    def into(self, old: CommentedMap, new: Node, key: str = "") -> None:
        """Update `old`, the mapping at `key` in the file, to match the node `new`.

        The nodes in `new` whose class the user has changed are replaced by those of the user's class.
        """
        items = parameters(object_at(new["_target_"])) if "_target_" in new else []
        open_ended = items is None or takes_any_keyword(items)  # without a signature, nothing can be dropped
        for name, value in new.items():
            here = f"{key}.{name}".lstrip(".")
            if name not in old:
                old[name] = quote_strings(value)
                self.changes.added.append(here)
            elif isinstance(value, dict) and "_target_" in value and isinstance(old[name], CommentedMap):
                new[name] = self._node(old[name], value, here)
            elif name != "_target_" and _differ(old[name], value):
                if not _differ(old[name], self.former.get(here, "???")):
                    old[name] = quote_strings(value)
                    self.changes.updated.append(here)
                else:
                    self.changes.kept.append(here)
        for name in [name for name in old if name not in new]:
            if not open_ended and not str(name).startswith("_"):
                value = json.dumps(old[name], default=str, ensure_ascii=False)
                self.changes.dropped[f"{key}.{name}".lstrip(".")] = f"{value}  {remove_key(old, name)}".rstrip()

    def _node(self, old: CommentedMap, new: Node, key: str) -> Node:
        """Update a node, and return the description of its class: the code's, or the user's choice."""
        path = old.get("_target_", new["_target_"])
        if path == self.former.get(f"{key}._target_") != new["_target_"]:  # the code has changed the class
            self.changes.updated.append(f"{key}._target_")
            old["_target_"] = new["_target_"]
            for name in [name for name in old if str(name).startswith("_") and name not in new]:
                remove_key(old, name)
        elif path != new["_target_"]:
            self.changes.kept.append(f"{key}._target_")
            try:
                new = self.node_of_class(path, key)
            except BindError as error:
                hint = f"name another class there, or {new['_target_']}, the code's default"
                raise BindError(f"{key}._target_ is {path}, which cannot be described ({error}); {hint}") from error
            if old.get("_partial_"):  # its caller passes the other arguments
                new = {name: old[name] for name in new if name in old}
        self.into(old, new, key)
        return new


def _differ(first: Any, second: Any) -> bool:
    """Return True unless two YAML values are the same; true is not 1, and .nan is .nan."""
    return json.dumps(first, default=str) != json.dumps(second, default=str)


def yaml_text(tree: Any) -> str:
    """Write a tree as YAML."""
    stream = io.StringIO()
    _yaml().dump(quote_strings(tree), stream)
    return stream.getvalue()


def read_text(file: Path) -> str:
    """Return the content of a file, or "" if it does not exist; raise BindError if it is not text."""
    try:
        return read_regular(file, BindError).decode()
    except FileNotFoundError:
        return ""
    except UnicodeDecodeError as error:
        raise BindError(f"{file} is not UTF-8 text: {error}") from error


def commented_map(text: str, title: object) -> CommentedMap:
    """Read a mapping with its comments, its order and its quotes; it is empty if there is no text."""
    try:
        tree = _yaml().load(text if text.strip() else "{}")
    except Exception as error:  # ruamel raises many types of exceptions, all with the same meaning
        raise BindError(f"{title} is not valid YAML: {yaml_message(error)}") from error
    if not isinstance(tree, CommentedMap):
        raise BindError(f"{title} is not a mapping of groups; remove it and bind again")
    return tree


def _yaml() -> YAML:
    yaml = YAML()
    yaml.width = 120
    yaml.preserve_quotes = True
    yaml.representer.add_representer(  # the default writes None as an empty value
        type(None), lambda writer, _: writer.represent_scalar("tag:yaml.org,2002:null", "null")
    )
    yaml.representer.add_representer(float, _write_float)
    yaml.indent(mapping=2, sequence=4, offset=2)
    return yaml


def _write_float(writer: Any, value: float) -> Any:
    node = writer.represent_float(value)
    node.value = re.sub(r"^(-?\d+)e", r"\1.0e", node.value)  # in YAML 1.1, 1e-08 is text
    return node


def quote_strings(value: Any) -> Any:
    """Prepare a value for the writer: quote strings that YAML 1.1 or 1.2 would not read as strings."""
    if isinstance(value, CommentedMap | CommentedSeq):
        return value  # read from the file, or already prepared
    if isinstance(value, dict):
        return CommentedMap((quote_strings(name), quote_strings(item)) for name, item in value.items())
    if isinstance(value, list):
        return [quote_strings(item) for item in value]
    return DoubleQuotedScalarString(value) if isinstance(value, str) and AMBIGUOUS.match(value) else value


def remove_key(mapping: CommentedMap, name: str) -> str:
    """Remove a key and return the comment on its line. Comments below it belong to the next key, and stay."""
    comments, slot = comments_behind(mapping, name)
    is_leaf = not isinstance(mapping[name], CommentedMap | CommentedSeq)
    own, _, below = comments[slot].value.partition("\n") if comments[slot] is not None else ("", "", "")
    above = list(mapping)[: list(mapping).index(name)]
    if below.strip() and above:  # ruamel keeps comments with the value above them
        comments, slot = comments_behind(mapping, above[-1])
        token = comments[slot]
        before = token.value.rstrip("\n") if token is not None else ""
        mark = token.start_mark if token is not None else CommentMark(0)
        comments[slot] = CommentToken(f"{before}\n{below}", mark, None)
    del mapping[name]
    mapping.ca.items.pop(name, None)
    return own.strip() if is_leaf else ""


def comments_behind(holder: Any, last: Any) -> tuple[list[Any], int]:
    """Return the place of the comment behind a value in ruamel: the last leaf below its key."""
    while isinstance(holder[last], CommentedMap | CommentedSeq) and holder[last]:
        holder = holder[last]
        last = list(holder)[-1] if isinstance(holder, CommentedMap) else len(holder) - 1
    slot = 2 if isinstance(holder, CommentedMap) else 0
    return holder.ca.items.setdefault(last, [None] * 4), slot
