"""Write conf.yaml from the defaults of the code, verify that it re-creates them, and keep what the user edited."""

import difflib
import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_runtime.config.building import declare
from mlx_runtime.config.equality import unlike
from mlx_runtime.config.expressions import recorded_default
from mlx_runtime.config.interpolation import parsed
from mlx_runtime.config.merging import Changes, Merge, NodeOfClass
from mlx_runtime.config.nodes import DUMMY_PARAMS, Description, Node
from mlx_runtime.config.projects import commands
from mlx_runtime.config.schema import former_defaults, schema_of
from mlx_runtime.config.signatures import MISSING, fitted, groups, is_factory, parameters
from mlx_runtime.config.text import commented_map, yaml_text
from mlx_runtime.errors import BindError, ConfigError, short_message
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
    """The conf.yaml that fits the code, with its schema and notices for the user; `before` is empty without a file."""

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

    BindError if conf.yaml cannot re-create a default of the code, or the existing file is not YAML.
    """
    description = Description(experiment)
    _verify(experiment, description.tree, yaml_text(description.tree))
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
    """Update conf.yaml to match the code, in memory; `former` holds the defaults at the last bind, by full key."""
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    changes = Changes()
    if not before.strip():
        return Binding(path, before, header(path) + yaml_text(dict(tree)), changes)
    merged = commented_map(before, path)
    Merge(former or {}, node_of_class, changes).into(merged, tree)
    return Binding(path, before, yaml_text(merged) if changes else before, changes)  # else not even the layout changes


def _verify(experiment: type, tree: Mapping[str, Node], text: str) -> None:
    """Build each default from the YAML text, and refuse text that builds something other than the code declares."""
    written = parsed(text)
    problems = []
    for group, cls in groups(experiment).items():
        for item in parameters(cls) or []:
            if item.default is not MISSING and item.name in tree[group]:
                default, key = item.default, f"{group}.{item.name}"
                if is_factory(default):
                    recorded = recorded_default(cls, item.name)
                    assert recorded is not None, "a factory without source is refused earlier"
                    default = recorded[0]
                if difference := _difference(default, item.annotation, written[group][item.name], key):
                    problems.append(f"{key}: conf.yaml would not re-create this default: {difference}")
    if problems:
        raise BindError("\n  ".join(problems))


def _difference(default: Any, hint: Any, node: Any, key: str) -> str | None:
    objects = {}
    if isinstance(node, dict) and node.get("params") == "???":
        node = {name: value for name, value in node.items() if name != "params"}
        objects["params"] = DUMMY_PARAMS
    if _is_open(node):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # issued when the default itself was constructed
            return unlike(default, lambda: fitted(declare(node, key, **objects), hint))
    except ConfigError as error:
        return str(error)
    except Exception as error:
        return f"it cannot be built again: {type(error).__name__}: {short_message(error)}"


def _is_open(node: Any) -> bool:
    """Return True if the user must fill in something in a node."""
    if isinstance(node, dict | list):
        return any(map(_is_open, node.values() if isinstance(node, dict) else node))
    return bool(node == "???")
