"""Nodes → conf.yaml: write the file exactly, and keep what the user edited."""

import difflib
import inspect
import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import CommentMark
from ruamel.yaml.scalarstring import DoubleQuotedScalarString
from ruamel.yaml.tokens import CommentToken

from mlx_runtime.errors import BindError
from mlx_runtime.layout import commands
from mlx_runtime.nodes import Description, Node
from mlx_runtime.schema import former_defaults, schema_of
from mlx_runtime.signatures import convert, object_at, parameters
from mlx_runtime.storage import write_atomic
from mlx_runtime.verification import verify

SCHEMA = "conf.schema.json"

HEADER = f"""\
# yaml-language-server: $schema={SCHEMA}
# Every setting of this experiment: the source of truth for `mlx train run`.
# Written by `mlx train bind` from the defaults in src/. Edit freely: binding again keeps your values and comments,
# adds new arguments and drops removed ones. ??? must be filled in (the `params` of an optimizer excepted).
"""

JOB_HEADER = f"""\
# yaml-language-server: $schema={SCHEMA}
# Every setting of this data job: the source of truth for `mlx data run`.
# Written by `mlx data bind` from the defaults in src/. Edit freely: binding again keeps your values and comments,
# adds new arguments and drops removed ones. ??? must be filled in.
"""


@dataclass
class Binding:
    """conf.yaml as it should be, and what that changes.

    Attributes:
        path: of the file.
        before, after: its text; `before` is empty when there is no file.
        added, updated, kept: full keys; `updated` had the former default and has the new one.
        renamed: the former full key by the new one.
        dropped: text of the values that are gone, with their comments, by full key.
        schema: text of the JSON Schema beside it.
        notices: what else a person should know, one line each.
    """

    path: Path
    before: str
    after: str = ""
    notices: list[str] = field(default_factory=list)
    schema: str = ""
    added: list[str] = field(default_factory=list)
    updated: list[str] = field(default_factory=list)
    renamed: dict[str, str] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)

    @property
    def stale(self) -> bool:
        """Whether the file must change to fit the code."""
        return self.before != self.after

    def lines(self) -> list[str]:
        """One line per key that a person should know of."""
        return [
            *(f"added    {key}" for key in self.added),
            *(f"updated  {key} (to the code's new default)" for key in self.updated),
            *(
                f"renamed  {old} to {key} (type and position fit, so it keeps the value)"
                for key, old in self.renamed.items()
            ),
            *(f"dropped  {key}: {text} (no longer an argument)" for key, text in self.dropped.items()),
            *(f"kept     {key} (your value; the code's default differs)" for key in self.kept),
            *(f"notice   {text}" for text in self.notices),
        ]

    def write(self) -> None:
        """Store both files, each atomically."""
        write_atomic(self.path, self.after)
        write_atomic(self.path.with_name(SCHEMA), self.schema)

    def diff(self) -> str:
        """What writing would change in conf.yaml, as a unified diff."""
        lines = (self.before.splitlines(keepends=True), self.after.splitlines(keepends=True))
        return "".join(difflib.unified_diff(*lines, str(self.path), f"{self.path} (bound)"))


def bind(experiment: type, path: Path) -> Binding:
    """What conf.yaml must be for an experiment; nothing is stored yet.

    Raises:
        BindError: the code has a default that conf.yaml cannot re-create, or the present file is not YAML.
    """
    description = Description(experiment)
    verify(experiment, description.tree, yaml_text(description.tree))
    schema = path.with_name(SCHEMA)
    former = former_defaults(json.loads(schema.read_text(encoding="utf-8"))) if schema.exists() else {}
    binding = merge(path, description.tree, former, description.of_class)
    binding.notices = description.notices
    binding.schema = json.dumps(schema_of(experiment, description.tree), indent=1) + "\n"
    return binding


def merge(
    path: Path,
    tree: dict[str, Node],
    former: Mapping[str, Any] | None = None,
    of_class: Callable[[str, str], Node | None] = lambda path, key: None,
) -> Binding:
    """Bring conf.yaml up to date with the code, in memory.

    Args:
        path: of the file.
        tree: what the code says.
        former: the defaults of the last bind by full key; a value that is still that default follows the code.
        of_class: the node of a class that the user put in a `_target_`, by its path and key; None when it is gone.

    Raises:
        BindError: the present file is not YAML.
    """
    binding = Binding(path, path.read_text(encoding="utf-8") if path.exists() else "")
    if not binding.before.strip():
        merged, header = dict(tree), JOB_HEADER if commands(path) == "mlx data" else HEADER
    else:
        header = ""
        try:
            merged = yaml_writer().load(binding.before)
        except Exception as error:  # ruamel raises many kinds, all meaning the same to the user
            raise BindError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
        if not isinstance(merged, CommentedMap):
            raise BindError(f"{path} is not a mapping of groups; remove it and bind again")
        _Merge(binding, former or {}, of_class).into(merged, tree, "")
    if header or binding.added or binding.updated or binding.renamed or binding.dropped:
        binding.after = header + yaml_text(merged)
    else:
        binding.after = binding.before  # nothing to say: not even the layout changes
    return binding


def yaml_writer() -> YAML:
    """A writer that keeps comments and order, and says null where PyYAML would say nothing."""
    yaml = YAML()
    yaml.width = 120
    yaml.preserve_quotes = True
    yaml.representer.add_representer(
        type(None), lambda writer, _: writer.represent_scalar("tag:yaml.org,2002:null", "null")
    )
    yaml.indent(mapping=2, sequence=4, offset=2)
    return yaml


def yaml_text(tree: Any) -> str:
    """A tree as this library writes YAML."""
    stream = io.StringIO()
    yaml_writer().dump(_quoted(tree), stream)
    return stream.getvalue()


@dataclass
class _Merge:
    """Brings the mappings of a file up to date with the code, in place, so that comments stay where they are."""

    binding: Binding
    former: Mapping[str, Any]
    of_class: Callable[[str, str], Node | None]

    def into(self, old: CommentedMap, new: Node, key: str, *, same_class: bool = True) -> None:
        open_ended = "_target_" in new and _takes_any_keyword(new["_target_"])
        if same_class and not open_ended:
            for name, former in self._renames(old, new, key):
                old.insert(list(old).index(former), name, old[former])
                old.ca.items[name] = old.ca.items.pop(former, None) or [None, None, None, None]
                del old[former]
                self.binding.renamed[f"{key}.{name}"] = f"{key}.{former}"
                if not _differ(old[name], self.former.get(f"{key}.{former}", old)):
                    old[name] = _quoted(new[name])
        for name, value in new.items():
            here = f"{key}.{name}".lstrip(".")
            if name not in old:
                old[name] = _quoted(value)
                self.binding.added.append(here)
            elif _is_node(value) and isinstance(old[name], CommentedMap):
                self._node(old, name, value, here)
            elif name != "_target_" and _differ(old[name], value):
                if here in self.former and not _differ(old[name], self.former[here]):
                    old[name] = _quoted(value)
                    self.binding.updated.append(here)
                else:
                    self.binding.kept.append(here)
        for name in [name for name in old if name not in new]:
            if not open_ended and not str(name).startswith("_"):
                value = json.dumps(old[name], default=str, ensure_ascii=False)
                self.binding.dropped[f"{key}.{name}".lstrip(".")] = f"{value}  {_drop(old, name)}".rstrip()

    def _node(self, parent: CommentedMap, name: str, new: Node, key: str) -> None:
        """A node of the file: of the code's class, of one that the code has left, or of the user's choice."""
        old = parent[name]
        chosen = old.get("_target_", new["_target_"])
        if chosen == new["_target_"]:
            self.into(old, new, key)
            return
        users = None if self.former.get(f"{key}._target_") == chosen else self._users_class(chosen, new, key)
        if users is None:
            self._replace(old, new, key)
            return
        self.binding.kept.append(f"{key}._target_")
        if old.get("_partial_"):  # whoever calls it gives the other arguments
            users = {name: value for name, value in users.items() if name in old}
        _Merge(self.binding, {}, self.of_class).into(
            old, users, key, same_class=False
        )  # former defaults were another's

    def _users_class(self, chosen: str, new: Node, key: str) -> Node | None:
        try:
            return self.of_class(chosen, key)
        except BindError as error:
            cure = f"put another class there, or {new['_target_']}, which the code has"
            raise BindError(f"{key}._target_ is {chosen}, which cannot be described ({error}); {cure}") from error

    def _replace(self, old: CommentedMap, new: Node, key: str) -> None:
        """Turn a node into one of another class; what both classes have keeps the user's value."""
        for name in list(old):
            unedited = f"{key}.{name}" in self.former and not _differ(old[name], self.former[f"{key}.{name}"])
            if (unedited or str(name).startswith("_")) and name not in new:
                _drop(old, name)
        old["_target_"] = new["_target_"]
        old.move_to_end("_target_", last=False)
        self.binding.updated.append(f"{key}._target_")
        added = len(self.binding.added)
        self.into(old, new, key, same_class=False)
        del self.binding.added[added:]  # they came with the class

    def _renames(self, old: CommentedMap, new: Node, key: str) -> list[tuple[str, str]]:
        """Pairs of a new and a former name that seem to be one argument: its place and its type are the same."""
        before, after = ([name for name in names if not str(name).startswith("_")] for names in (old, new))
        found = []
        matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
        for tag, start, stop, first, last in matcher.get_opcodes():
            if tag == "replace" and stop - start == last - first:
                for former, name in zip(before[start:stop], after[first:last], strict=True):
                    if former not in new and name not in old and self._fits(old[former], new, name, f"{key}.{former}"):
                        found.append((name, former))
        return found

    def _fits(self, value: Any, new: Node, name: str, former: str) -> bool:
        """Whether a value may be that of another argument, whose default is what that of the former one was."""
        default = new[name]
        if _is_node(default) or _is_node(value):
            return _is_node(default) and _is_node(value) and default["_target_"] == value["_target_"]
        if former in self.former and _differ(default, self.former[former]):
            return False
        hints = (
            {item.name: item.hint for item in parameters(object_at(new["_target_"])) or []} if "_target_" in new else {}
        )
        try:
            convert(value, hints.get(name, type(default)))
        except TypeError:
            return False
        return True


def _drop(old: CommentedMap, name: str) -> str:
    """Remove a key with the comment behind it, which is returned; the comments below belong to what follows."""
    comments, slot = _comments(old, name)
    inner = isinstance(old[name], CommentedMap | CommentedSeq)
    own, _, below = comments[slot].value.partition("\n") if comments[slot] is not None else ("", "", "")
    above = list(old)[: list(old).index(name)]
    if below.strip() and above:  # ruamel keeps comments with the value above them
        comments, slot = _comments(old, above[-1])
        token = comments[slot]
        before = token.value.rstrip("\n") if token is not None else ""
        mark = token.start_mark if token is not None else CommentMark(0)
        comments[slot] = CommentToken(f"{before}\n{below}", mark, None)
    del old[name]
    old.ca.items.pop(name, None)
    return "" if inner else own.strip()


def _comments(holder: Any, last: Any) -> tuple[list[Any], int]:
    """Where ruamel keeps the comment behind the value of a key, which is with the last leaf below it."""
    while isinstance(holder[last], CommentedMap | CommentedSeq) and holder[last]:
        holder = holder[last]
        last = list(holder)[-1] if isinstance(holder, CommentedMap) else len(holder) - 1
    slot = 2 if isinstance(holder, CommentedMap) else 0
    return holder.ca.items.setdefault(last, [None] * 4), slot


def _differ(first: Any, second: Any) -> bool:
    """Whether two YAML values are not the same; true is not 1, and .nan is .nan."""
    return json.dumps(first, default=str) != json.dumps(second, default=str)


def _takes_any_keyword(path: str) -> bool:
    return any(item.kind is inspect.Parameter.VAR_KEYWORD for item in parameters(object_at(path)) or [])


def _is_node(value: Any) -> bool:
    return isinstance(value, dict) and "_target_" in value


def _quoted(value: Any) -> Any:
    """Ready for the YAML writer: strings that YAML 1.1 would read as something else get quotes."""
    if isinstance(value, CommentedMap | CommentedSeq):
        return value  # read from the file, or made ready before
    if isinstance(value, dict):
        return CommentedMap((name, _quoted(item)) for name, item in value.items())
    if isinstance(value, list):
        return [_quoted(item) for item in value]
    if isinstance(value, str) and value != "???" and _reads_otherwise(value):
        return DoubleQuotedScalarString(value)
    return value


def _reads_otherwise(text: str) -> bool:
    try:
        return bool(OmegaConf.create({"value": OmegaConf.create(f"value: {text}").value}).value != text)
    except Exception:  # not even YAML without quotes
        return True
