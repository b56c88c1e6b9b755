"""Nodes → conf.yaml: write the file exactly, and keep what the user edited."""

import inspect
import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.scalarstring import DoubleQuotedScalarString

from mlx_runtime.errors import BindError
from mlx_runtime.layout import write_atomic
from mlx_runtime.nodes import Description, Node
from mlx_runtime.signatures import object_at, parameters
from mlx_runtime.verification import verify

HEADER = """\
# Every setting of this experiment: the source of truth for `mlx train run`.
# Written by `mlx train bind` from the defaults in src/. Edit freely: binding again keeps your values and comments,
# adds new arguments and drops removed ones. ??? must be filled in (the `params` of an optimizer excepted).
"""


@dataclass
class Binding:
    """conf.yaml as it should be, and what that changes.

    Attributes:
        path: of the file.
        before, after: its text; `before` is empty when there is no file.
        added, dropped, kept: full keys.
        notices: what else a person should know, one line each.
    """

    path: Path
    before: str
    after: str = ""
    notices: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)

    @property
    def stale(self) -> bool:
        """Whether the file must change to fit the code."""
        return self.before != self.after

    def lines(self) -> list[str]:
        """One line per key that a person should know of."""
        return [
            *(f"added    {key}" for key in self.added),
            *(f"dropped  {key} (no longer an argument)" for key in self.dropped),
            *(f"kept     {key} (your value; the code's default differs)" for key in self.kept),
            *(f"notice   {text}" for text in self.notices),
        ]

    def write(self) -> None:
        """Store it, atomically."""
        write_atomic(self.path, self.after)


def bind(experiment: type, path: Path) -> Binding:
    """What conf.yaml must be for an experiment; nothing is stored yet.

    Raises:
        BindError: the code has a default that conf.yaml cannot re-create, or the present file is not YAML.
    """
    description = Description(experiment)
    verify(experiment, description.tree, _yaml_text(description.tree))
    binding = merge(path, description.tree)
    binding.notices = description.notices
    return binding


def merge(path: Path, tree: dict[str, Node]) -> Binding:
    """Bring conf.yaml up to date with the code, in memory.

    Raises:
        BindError: the present file is not YAML.
    """
    binding = Binding(path, path.read_text(encoding="utf-8") if path.exists() else "")
    if not binding.before.strip():
        merged, header = dict(tree), HEADER
    else:
        header = ""
        try:
            merged = _yaml().load(binding.before)
        except Exception as error:  # ruamel raises many kinds, all meaning the same to the user
            raise BindError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
        if not isinstance(merged, CommentedMap):
            raise BindError(f"{path} is not a mapping of groups; remove it and bind again")
        _merge(merged, tree, "", binding)
    if header or binding.added or binding.dropped:
        binding.after = header + _yaml_text(merged)
    else:
        binding.after = binding.before  # nothing to say: not even the layout changes
    return binding


def _yaml() -> YAML:
    """A writer that keeps comments and order, and says null where PyYAML would say nothing."""
    yaml = YAML()
    yaml.width = 120
    yaml.representer.add_representer(
        type(None), lambda writer, _: writer.represent_scalar("tag:yaml.org,2002:null", "null")
    )
    yaml.indent(mapping=2, sequence=4, offset=2)
    return yaml


def _yaml_text(tree: Any) -> str:
    stream = io.StringIO()
    _yaml().dump(_quoted(tree), stream)
    return stream.getvalue()


def _merge(old: CommentedMap, new: Node, key: str, binding: Binding) -> None:
    """Bring a mapping of the file up to date with the code, in place, so that comments stay where they are."""
    for name, value in new.items():
        here = f"{key}.{name}".lstrip(".")
        if name not in old:
            old[name] = _quoted(value)
            binding.added.append(here)
        elif _is_node(value) and isinstance(old[name], CommentedMap):
            if old[name].get("_target_") == value["_target_"]:
                _merge(old[name], value, here, binding)
            else:
                binding.kept.append(f"{here}._target_")  # another class: its arguments are the user's
        elif old[name] != value:
            binding.kept.append(here)
    open_ended = "_target_" in new and _takes_any_keyword(new["_target_"])
    for name in [name for name in old if name not in new]:
        if not open_ended and not str(name).startswith("_"):
            del old[name]
            binding.dropped.append(f"{key}.{name}".lstrip("."))


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
