"""Write conf.yaml from the defaults of the code, and keep what the user edited."""

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_runtime.config.literals import Node
from mlx_runtime.config.merging import Changes, Merge, NodeOfClass
from mlx_runtime.config.nodes import Description
from mlx_runtime.config.projects import commands
from mlx_runtime.config.schema import former_defaults, schema_of
from mlx_runtime.config.text import commented_map, yaml_text
from mlx_runtime.config.verification import verify
from mlx_runtime.storage.local import write_atomic

SCHEMA = "conf.schema.json"


def header(path: Path) -> str:
    """Return the comment at the top of a new conf.yaml."""
    group = commands(path)
    is_job = group == "mlx data"
    return (
        f"# yaml-language-server: $schema={SCHEMA}\n"
        f"# All settings of this {'data job' if is_job else 'experiment'}: the source of truth for `{group} run`.\n"
        f"# Written by `{group} bind` from the defaults in src/. Edit freely: binding again keeps your values and\n"
        "# comments, adds new arguments and drops removed ones. "
        f"??? must be filled in{'' if is_job else ' (except the `params` of optimizers)'}.\n"
    )


@dataclass
class Binding:
    """The conf.yaml that fits the code.

    Attributes:
        path: path of the file.
        before, after: its text; `before` is empty if there is no file.
        changes: changes from `before` to `after`.
        schema: text of the JSON Schema beside it.
        notices: what else the user should know, one line each.
    """

    path: Path
    before: str
    after: str
    changes: Changes
    schema: str = ""
    notices: list[str] = field(default_factory=list)

    @property
    def stale(self) -> bool:
        """True if the file must change to fit the code."""
        return self.before != self.after

    def lines(self) -> list[str]:
        """Return one line per key that the user should know about."""
        return [*self.changes.lines(), *(f"notice   {text}" for text in self.notices)]

    def write(self) -> None:
        """Store both files, each atomically."""
        write_atomic(self.path, self.after)
        write_atomic(self.path.with_name(SCHEMA), self.schema)

    def diff(self) -> str:
        """Return what writing would change in conf.yaml, as a unified diff."""
        lines = (self.before.splitlines(keepends=True), self.after.splitlines(keepends=True))
        return "".join(difflib.unified_diff(*lines, str(self.path), f"{self.path} (bound)"))


def bind(experiment: type, path: Path) -> Binding:
    """Return the conf.yaml of an experiment. Nothing is stored yet.

    Raises:
        BindError: conf.yaml cannot re-create a default of the code, or the existing file is not YAML.
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
    node_of_class: NodeOfClass = lambda path, key: None,
) -> Binding:
    """Update conf.yaml to match the code, in memory.

    Args:
        path: path of the file.
        tree: nodes that describe the code's defaults.
        former: defaults at the last bind, by full key.
        node_of_class: describes classes that only the file names.

    Raises:
        BindError: the existing file is not YAML.
    """
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    changes = Changes()
    if not before.strip():
        return Binding(path, before, header(path) + yaml_text(dict(tree)), changes)
    merged = commented_map(before, path)
    Merge(former or {}, node_of_class, changes).into(merged, tree)
    return Binding(path, before, yaml_text(merged) if changes else before, changes)  # else not even the layout changes
