"""conf.yaml, written from the defaults of the code and verified to re-create them; edits of the user are kept.

Variants that name a class are completed and merged in the same way; others are only checked.
"""

import contextlib
import difflib
import inspect
import json
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mlx_runtime import companions
from mlx_runtime.config.binding.equality import unlike
from mlx_runtime.config.binding.expressions import record_default
from mlx_runtime.config.binding.merging import Changes, Merge, NodeOfClass
from mlx_runtime.config.binding.nodes import Description, Node
from mlx_runtime.config.binding.schema import former_defaults, schema_of
from mlx_runtime.config.binding.text import commented_map, read_text, yaml_text
from mlx_runtime.config.building import DUMMY_PARAMS, declare
from mlx_runtime.config.checks import Checker
from mlx_runtime.config.constructors.signatures import (
    MISSING,
    base_of,
    groups,
    is_factory,
    own_default,
    parameters,
    plain_defaults,
    settings_of,
    try_convert,
)
from mlx_runtime.config.constructors.targets import names_repositories
from mlx_runtime.config.interpolation import parse_config, resolve_config
from mlx_runtime.config.projects import commands
from mlx_runtime.config.variants import Selection, Variants, is_patch, values_by_key
from mlx_runtime.errors import BindError, ConfigError, short_message, suggest
from mlx_runtime.storage.local import read_regular, write_atomic

SCHEMA = "conf.schema.json"

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
    """The conf.yaml that fits the code, with its schema and notices for the user; `before` is empty without a file.

    `variants` has the same for each variant, without a schema; `invalid` has one line per value in a variant that runs
    would reject.
    """

    path: Path
    before: str
    after: str
    changes: Changes
    schema: str = ""
    notices: list[str] = field(default_factory=list)
    variants: list["Binding"] = field(default_factory=list)
    invalid: list[str] = field(default_factory=list)

    @property
    def stale(self) -> list[Path]:
        """The files that do not match the code."""
        return [part.path for part in (self, *self.variants) if part.before != part.after]

    def lines(self) -> list[str]:
        """Return one line per changed or remarkable key."""
        variants = [f"{line} in {part.path}" for part in self.variants for line in part.changes.lines()]
        notices = [*(f"notice   {text}" for text in self.notices), *(f"invalid  {text}" for text in self.invalid)]
        return [*self.changes.lines(), *variants, *notices]

    def write(self) -> None:
        """Store all files, each atomically.

        Raise BindError if a variant is invalid; nothing is stored then.
        """
        if self.invalid:
            stale = f"\n  nothing was written, not even {self.path}" if self.stale else ""
            raise BindError("\n  ".join(self.invalid) + stale)
        for part in (*self.variants, self):
            write_atomic(part.path, part.after)
        write_atomic(self.path.with_name(SCHEMA), self.schema)

    def diff(self) -> str:
        """Return the pending changes as a unified diff."""
        parts = (self, *self.variants)
        return "".join(line for part in parts for line in _diff(part.before, part.after, part.path))


def _diff(before: str, after: str, path: Path) -> Iterator[str]:
    lines = (before.splitlines(keepends=True), after.splitlines(keepends=True))
    return difflib.unified_diff(*lines, str(path), f"{path} (bound)")


def bind(experiment: type, path: Path) -> Binding:
    """Return the conf.yaml of an experiment. Nothing is stored yet.

    BindError if conf.yaml cannot re-create a default of the code, or an existing file is not YAML.
    """
    description = Description(experiment)
    _verify(experiment, description.tree, yaml_text(description.tree))
    before = read_text(path)
    present = commented_map(before, path) if before.strip() else {}
    notices: list[str] = []
    if names_repositories(description.tree):
        notices = companions.part("hub.pins").pin_defaults(description.tree, present)
    former = {}
    with contextlib.suppress(FileNotFoundError, ValueError):  # without it, bind knows no former defaults
        former = json.loads(read_regular(path.with_name(SCHEMA), BindError))
    tree = description.tree | {"cfg": _select_settings(experiment, description.tree["cfg"], present.get("cfg"))}
    binding = merge(path, tree, former_defaults(former), description.of_class, former.get("x-chosen", {}))
    binding.notices = description.notices + notices
    variants, nodes = Variants(path), dict[str, dict[str, Node]]()
    for key, files in variants.nodes.items():
        for name, file in files.items():
            defaults = former_defaults(former.get("definitions", {}).get(f"{key}/{name}", {}), key)
            part, node = _merge_variant(file, key, description, defaults)
            variants.texts[file] = part.after
            if node is not None:
                nodes.setdefault(key, {})[name] = node
            binding.variants.append(part)
    for file in variants.partial.values():
        variants.texts[file] = read_text(file)
    try:
        binding.invalid = list(_invalid(experiment, variants, binding.after))
    except ValueError as error:  # such as a `${` that begins no reference
        raise BindError(f"{path} is not valid YAML: {error}") from error
    schema = schema_of(experiment, description.tree, nodes) | {"x-chosen": binding.changes.chosen}
    binding.schema = json.dumps(schema, indent=1) + "\n"
    return binding


def _select_settings(experiment: type, cfg: Node, present: Any) -> Node:
    """Return the settings to list in conf.yaml: common ones, those that user code declares, and those already listed.

    The others have the runtime's defaults. Settings that are not plain values are listed, too.
    """
    there = present if isinstance(present, dict) else {}
    declared, defaults = FIRST_SETTINGS | _declared_settings(experiment), plain_defaults(base_of(experiment))
    listed = {}
    for name, value in cfg.items():
        section = there.get(name)
        if name.startswith("_") or name in declared or name not in defaults or value != defaults[name]:
            listed[name] = value
        elif isinstance(value, dict) and isinstance(section, dict):
            listed[name] = {key: item for key, item in value.items() if key in section}
        elif name in there:
            listed[name] = value
    return listed


def _declared_settings(experiment: type) -> set[str]:
    """Return the names of the settings that user code declares: the fields of its class, without inherited ones."""
    base, cls = base_of(experiment), groups(experiment)["cfg"]
    own = [item for item in cls.__mro__ if item not in base.__mro__]
    names = {name for item in own for name in inspect.get_annotations(item)}
    return names | ({item.name for item in parameters(cls) or []} if not issubclass(cls, base) else set())


def _merge_variant(
    file: Path, key: str, description: Description, former: Mapping[str, Any]
) -> tuple[Binding, Node | None]:
    """Update a variant of the node at a key to match its class.

    Return the node with all defaults, empty if its class does not exist any more; None for a patch.
    """
    before = read_text(file)
    merged, changes = commented_map(before, file), Changes()
    if is_patch(merged):
        return Binding(file, before, before, changes), None
    target = merged["_target_"]
    try:
        node = description.of_class(target, key) if isinstance(target, str) else None
    except BindError as error:
        raise BindError(f"{file}: {target} cannot be described: {error}") from error
    if node is not None:
        passed = {name: value for name, value in node.items() if name in merged} if merged.get("_partial_") else node
        Merge(former, description.of_class, changes).into(merged, passed, key)
    changes.kept.clear()  # variants are meant to differ
    return Binding(file, before, yaml_text(merged) if changes else before, changes), node or {}


def _invalid(experiment: type, variants: Variants, conf: str) -> Iterator[str]:
    """Describe the values in variants that a run would reject. Each variant is applied to conf.yaml separately."""
    classes, base = groups(experiment), base_of(experiment)
    settings = settings_of(experiment)
    bound = Selection(variants, conf.encode())
    bound.complete(settings)
    keys = values_by_key(bound.tree)
    named = [(file, key, name) for key, files in variants.nodes.items() for name, file in files.items()]
    for file, key, name in [*named, *((file, "", name) for name, file in variants.partial.items())]:
        selection = Selection(variants, conf.encode())
        selection.complete(settings)
        if key and key not in keys:
            if not any(key.startswith(f"{other}.") for other in variants.nodes):  # otherwise, a variant may have it
                yield f"{file.parent}: there is no key {key!r}.{suggest(key, keys)}"
            continue
        try:
            if key:
                selection.choose(key, name)
            else:
                selection.apply(name)
        except ConfigError as error:
            yield str(error)
            continue
        try:
            tree = resolve_config(OmegaConf.create(selection.tree), environment=True)
        except OmegaConfBaseException as error:
            yield f"{file}: {short_message(error)}"
            continue
        values = values_by_key(tree)
        for problem in Checker(variants=variants.nodes).check(tree, classes, base):
            value = values.get(problem.key)
            if selection.source(problem.key) == file and not _is_open(value) and "${" not in str(value):
                yield f"{file}: {problem.text}"


def merge(
    path: Path,
    tree: dict[str, Node],
    former: Mapping[str, Any] | None = None,
    node_of_class: NodeOfClass = lambda path, key: None,
    chosen: Mapping[str, str] = MappingProxyType({}),
) -> Binding:
    """Update conf.yaml to match the code, in memory.

    `former` contains the defaults at the last bind, and `chosen` the classes that the user had chosen, by full key.
    """
    before = read_text(path)
    changes = Changes()
    if not before.strip():
        return Binding(path, before, header(path) + yaml_text(dict(tree)), changes)
    merged = commented_map(before, path)
    Merge(former or {}, node_of_class, changes, chosen).into(merged, tree)
    return Binding(path, before, yaml_text(merged) if changes else before, changes)  # or keep the layout


def _verify(experiment: type, tree: Mapping[str, Node], text: str) -> None:
    """Build each default from the YAML text, and raise BindError if it differs from the declared one."""
    written = parse_config(text)
    problems = []
    for group, cls in groups(experiment).items():
        if (own := own_default(experiment, group, cls)) is not None:
            if difference := _difference(own.default, cls, written[group], group):
                problems.append(f"{group}: conf.yaml would not re-create this default: {difference}")
            continue
        for item in parameters(cls) or []:
            if item.default is not MISSING and item.name in tree[group]:
                default, key = item.default, f"{group}.{item.name}"
                if is_factory(default):
                    recorded = record_default(cls, item.name)
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
