"""conf.yaml, written from the defaults of the code and verified to re-create them; edits of the user are kept.

The JSON Schema next to it lets editors complete and check it. It also stores the defaults of the last bind, so that the
next one can recognize edited values.
"""

import contextlib
import inspect
import json
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_runtime import companions
from mlx_runtime.config.binding.equality import unlike
from mlx_runtime.config.binding.merging import Changes, Merge, commented_map, read_text, yaml_text
from mlx_runtime.config.binding.nodes import Description, Node
from mlx_runtime.config.building import DUMMY_PARAMS, declare
from mlx_runtime.config.constructors.signatures import (
    argument_texts,
    base_of,
    groups,
    parameters,
    plain_defaults,
    schema_type,
    takes_any_keyword,
    try_convert,
)
from mlx_runtime.config.constructors.targets import names_repositories, object_at
from mlx_runtime.config.interpolation import parse_config, values_by_key
from mlx_runtime.config.projects import SCHEMA, commands
from mlx_runtime.errors import BindError, ConfigError, short_message
from mlx_runtime.storage.local import read_regular, write_atomic

DEFAULTS = "x-defaults"
"""Key in the schema of the defaults at the last bind, by full key, without the classes that the user has chosen."""

Schema = dict[str, Any]

OPEN: Schema = {"type": "string", "pattern": r"\$\{.*\}|^\?\?\?$"}
"""Schema of texts that may replace any value: an interpolation, or `???`."""

ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""Addresses of objects, which dataclasses without a docstring show in the signature that is their description."""

FIRST_SETTINGS = {
    *("name", "restore_checkpoint_path", "start_epoch", "num_epochs", "start_workers", "prefetch_batches"),
    *("path", "overwrite"),  # of a data job
    "storage_path",  # read by commands that import no code
}
"""Settings that every conf.yaml lists."""


def header(path: Path) -> str:
    """Return the comment at the top of a new conf.yaml."""
    group = commands(path)
    is_job = group == "mlx data"
    return (
        f"# yaml-language-server: $schema={SCHEMA}\n"
        f"# The config of this {'data job' if is_job else 'experiment'}: the source of truth for `{group} run`.\n"
        f"# Written by `{group} bind` from the defaults in src/. Edit freely: binding again keeps your values and\n"
        "# comments, adds new arguments and drops removed ones. "
        f"??? must be filled in{'' if is_job else ' (except the `params` of optimizers)'}.\n"
        + ("" if is_job else "# cfg has more settings than it lists here: `mlx train show` prints all of them.\n")
    )


@dataclass
class Binding:
    """The conf.yaml that fits the code, with its schema and notices for the user; `before` is empty without a file."""

    path: Path
    before: str
    after: str
    changes: Changes
    schema: str
    notices: list[str]

    @property
    def stale(self) -> bool:
        """True if the file does not match the code."""
        return self.before != self.after

    def lines(self) -> list[str]:
        """Return one line per changed or remarkable key."""
        return [*self.changes.lines(), *(f"notice   {text}" for text in self.notices)]

    def write(self) -> None:
        """Store both files, each atomically."""
        write_atomic(self.path, self.after)
        write_atomic(self.path.with_name(SCHEMA), self.schema)


def bind(experiment: type, path: Path) -> Binding:
    """Return the conf.yaml of an experiment. Nothing is stored yet.

    BindError if conf.yaml cannot re-create a default of the code, or an existing file is not YAML.
    """
    description = Description(experiment)
    _verify(description)
    before = read_text(path)
    present = commented_map(before, path)
    notices: list[str] = []
    if names_repositories(description.tree):
        notices = companions.part("hub.pins").pin_defaults(description.tree, present)
    former = {}
    with contextlib.suppress(FileNotFoundError, ValueError, LookupError, TypeError):  # missing or damaged
        former = json.loads(read_regular(path.with_name(SCHEMA), BindError))[DEFAULTS]
    cfg = description.tree["cfg"]
    tree = description.tree | {"cfg": _select_settings(experiment, cfg, present.get("cfg"))}
    merge, after = Merge(former, description.of_class), header(path) + yaml_text(tree)
    if present:
        merge.into(present, tree)
        after = yaml_text(present) if merge.changes else before  # or keep the layout
        check_written(after, present, path)
    cfg |= {name: item for name, item in tree["cfg"].items() if not isinstance(item, dict) or "_target_" in item}
    tree |= {"cfg": cfg}
    values, choices = values_by_key(tree), {key for key in merge.changes.kept if key.endswith("._target_")}
    defaults = {key: value for key, value in values.items() if key not in choices and f"{key}._target_" not in values}
    schema = json.dumps(schema_of(experiment, tree) | {DEFAULTS: defaults}, indent=1) + "\n"
    return Binding(path, before, after, merge.changes, schema, description.notices + notices)


def check_written(text: str, tree: Node, path: Path) -> None:
    """Raise BindError if a text does not contain a tree: ruamel loses line breaks next to some comments in lists."""
    try:
        same = json.dumps(commented_map(text, path), default=str) == json.dumps(tree, default=str)
    except BindError:
        same = False
    if not same:
        raise BindError(f"{path} cannot be written with its comments in lists; move them above the lists")


def _select_settings(experiment: type, cfg: Node, present: Any) -> Node:
    """Return the settings to list in conf.yaml: common ones, those already listed, and those of the user's code.

    The others have the runtime's defaults. Settings that are not plain values are listed, too.
    """
    there = present if isinstance(present, dict) else {}
    defaults = plain_defaults(base_of(experiment))
    listed = {}
    for name, value in cfg.items():
        section = isinstance(value, dict) and isinstance(there.get(name), dict)
        if name in FIRST_SETTINGS or name not in defaults or value != defaults[name]:
            listed[name] = value
        elif name in there:
            listed[name] = {key: value[key] for key in value if key in there[name]} if section else value
    return listed


def _verify(description: Description) -> None:
    """Build each default from the YAML text, and raise BindError if it differs from the declared one."""
    written = values_by_key(parse_config(yaml_text(description.tree)))
    problems = []
    for key, (default, hint) in description.defaults.items():
        if key in written and (difference := _difference(default, hint, written[key], key)):
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
            return unlike(default, lambda: try_convert(declare(node, key, **objects), hint))
    except ConfigError as error:
        return str(error)
    except Exception as error:
        return f"it cannot be built again: {type(error).__name__}: {short_message(error)}"


def _is_open(node: Any) -> bool:
    """Return True if the user must fill in a value in a node."""
    if isinstance(node, dict | list):
        return any(map(_is_open, node.values() if isinstance(node, dict) else node))
    return bool(node == "???")


def schema_of(experiment: type, tree: Mapping[str, Node]) -> Schema:
    """Return the schema of an experiment's conf.yaml, whose nodes are `tree`."""
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": f"conf.yaml of {experiment.__module__}.{experiment.__qualname__}",
        "type": "object",
        "required": list(groups(experiment)),
        "additionalProperties": False,
        "properties": {name: _node(node) for name, node in tree.items()},
    }


def _node(node: Node, description: str = "") -> Schema:
    """Return the schema of a node. It is valid only for its `_target_`; another class has other arguments."""
    target = object_at(node["_target_"])
    items = parameters(target) or []
    hints = {item.name: item.annotation for item in items}
    texts = argument_texts(target)
    properties: dict[str, Schema] = {
        "_target_": {"type": "string", "description": "class or function to call"},
        "_args_": {"type": "array"},
        "_partial_": {"type": "boolean"},
    }
    for name, value in node.items():
        text = texts.get(name, "")
        if name not in properties and isinstance(value, dict) and "_target_" in value:
            properties[name] = _node(value, text)
        elif name not in properties:
            kind = schema_type(hints.get(name, Any))
            properties[name] = ({"anyOf": [kind, OPEN]} if kind else {}) | ({"description": text} if text else {})
    return {
        "type": "object",
        "description": description or ADDRESS.sub("", (inspect.getdoc(target) or "").partition("\n")[0]),
        "if": {"properties": {"_target_": {"const": node["_target_"]}}},
        "then": {"properties": properties, "additionalProperties": takes_any_keyword(items) or not items},
    }
