"""conf.yaml, variants and overrides → a checked config.

Precedence: constructor default < conf.yaml < `--variant` < `MLX_STORAGE` < command line. Everything is checked against
the signatures of the constructors before anything starts, and all problems are reported at once.
"""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import GrammarParseError, OmegaConfBaseException

from mlx_runtime.config.building import Tree, build_cfg, literal_mapping_problems
from mlx_runtime.config.checks import Checker, Problem, ambiguous_words
from mlx_runtime.config.constructors.signatures import base_of, groups, parameters, try_convert
from mlx_runtime.config.interpolation import escape, resolve_config
from mlx_runtime.config.projects import commands
from mlx_runtime.config.variants import OPTION, Selection, Variants, values_by_key
from mlx_runtime.errors import ConfigError, short_message
from mlx_runtime.sections import Section
from mlx_runtime.settings import Settings
from mlx_runtime.storage.documents import DEPTH, ESCAPE, scalar_text, to_yaml
from mlx_runtime.storage.redaction import redact_tree

SELECTED = "mlx-selected"
"""Name under which Hydra finds conf.yaml with its variants; must not be that of a file in `src`."""

OVERRIDE = "override "
"""Prefix of a problem that an override causes, before the override."""


@dataclass(frozen=True)
class Config:
    """A checked config.

    Attributes:
        tree: conf.yaml with all overrides applied and all `${...}` resolved; plain dicts, lists and scalars.
        unresolved: the same, with `${oc.env:NAME}` as a Reference; for the conf.yaml of the run.
        cfg: the group `cfg` as an object for user code.
        overrides: the overrides, as typed.
        unseen: targets that were not checked, because only runs may import them.
    """

    tree: Tree
    unresolved: Tree
    cfg: Any
    overrides: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()

    @property
    def shown(self) -> Tree:
        """The config without secrets, for records, checkpoints and trackers."""
        tree: Tree = redact_tree(self.unresolved)
        return tree

    def yaml(self) -> str:
        """Return the conf.yaml of the run."""
        return to_yaml(escape(self.unresolved))


class Composition(NamedTuple):
    """conf.yaml with overrides applied, not checked against any signature; trees as in `Config`.

    `problems` are unknown keys in overrides and invalid interpolations; the trees do not contain them. `selection` is
    the config with variants, before all other overrides. The other fields are the arguments of `read`.
    """

    tree: Tree
    unresolved: Tree
    problems: list[Problem]
    selection: Selection
    path: Path
    title: object
    project: Path | None


def check(experiment: type, composition: Composition, *, look: bool = False) -> Config:
    """Check a config against the constructors of an experiment; ConfigError has one line per problem.

    `look` runs no code that conf.yaml names, and builds `cfg` from the runtime's own class.
    """
    tree, unresolved, found, selection, path, title, project = composition
    classes, base, problems = groups(experiment), base_of(experiment), [*found]
    reported = {problem.key for problem in problems}
    own = project in (None, path)
    checker = Checker(imports=not look, variants=selection.variants.nodes, project=own)
    for index, (key, *_) in enumerate(problems):
        from mlx_runtime.config.mismatches import lacks

        if lacks(tree, key, base, checker.object_at):
            cure = f"run: {commands(path)} bind" if own else f"add it with +{key}=..."
            problems[index] = Problem(key, f"{key} is newer than {title}, which does not have it yet; {cure}")
    problems += [problem for problem in checker.check(tree, classes, base) if problem.key not in reported]
    words = [text + _in(file) for file in (None, *selection.files) for text in ambiguous_words(file or path)]
    raise_if([*words, *(_blame(problem, selection, path) for problem in problems)], title)
    cfg = _own_settings(tree["cfg"], base) if look else build_cfg(tree["cfg"], base)
    files = " and ".join(map(str, [title, *selection.files]))
    mentioned = ((text, re.findall(r"\bcfg(?:\.\w+)+", text)) for text in base.out_of_range(cfg))
    limits = [Problem(next(filter(selection.override, keys), ""), text) for text, keys in mentioned]
    raise_if([*(_blame(item, selection, path) for item in limits), *literal_mapping_problems(tree, classes)], files)
    tree = {name: _in_order_of(checker.object_at(tree[name]["_target_"]), tree[name]) for name in classes}
    return Config(tree, unresolved, cfg, unseen=tuple(dict.fromkeys(checker.unseen)))


def _in_order_of(cls: Any, node: Tree) -> Tree:
    """Return a group in the order of its class: files and overrides may list its members in another one."""
    names = ["_target_", *(item.name for item in parameters(cls) or [])]
    return {name: node[name] for name in (*(item for item in names if item in node), *node)}


def _in(file: Path | None) -> str:
    return f" (in {file})" if file else ""


def _blame(problem: Problem, selection: Selection, path: Path) -> str:
    """Return the text of a problem, with the override or variant that causes it, and the quotes that it lacks."""
    override, file = selection.override(problem.key), selection.source(problem.key)
    if problem.unquoted and override:
        name, _, typed = override.partition("=")
        if name.lstrip("+") == problem.key:
            problem = problem._replace(text=f"{problem.text}; for text, write '{name}=\"{typed}\"'")
    elif problem.unquoted:
        key = problem.key.removeprefix(f"{file.parent.name}.") if file else problem.key
        if (text := scalar_text((file or path).read_bytes(), key)) is not None:
            problem = problem._replace(text=f'{problem.text}; for text, write "{text}"')
    if override and override.startswith("~"):
        return f"{OVERRIDE}{override}: the experiment needs {problem.key}; leave this override out"
    return f"{OVERRIDE}{override}: {problem.text}" if override else problem.text + problem.cure + _in(file)


def raise_if(problems: Sequence[str], title: object) -> None:
    """Raise ConfigError if there are problems; `title` names their source, unless overrides cause all of them."""
    if not problems:
        return
    typed = all(problem.startswith(OVERRIDE) for problem in problems)
    having = "the overrides have" if typed else f"{title} has"
    listed = "\n  ".join([f"{having} {len(problems)} problems:", *problems])
    error = ConfigError(listed if len(problems) > 1 else problems[0] if typed else f"{title}: {problems[0]}")
    error.problems = tuple(problems)
    raise error


def read(
    path: Path,
    overrides: Sequence[str],
    settings: Mapping[str, Any] = MappingProxyType({}),
    title: object = None,
    project: Path | None = None,
) -> Composition:
    """Compose conf.yaml with variants, the environment and the overrides, through Hydra.

    `settings` are the defaults of `cfg` for values that conf.yaml does not list. `title` is the name of the file in
    messages, by default its path. `project` is the conf.yaml of the project if `path` is that of a run. Overrides then
    choose from the project's variants, while strings in the run's file are only strings, because it contains the nodes
    of its variants.
    """
    title = title or path
    if not path.is_file():
        if path.exists():
            raise ConfigError(f"{title} is not a regular file")
        raise ConfigError(f"there is no {title}; write it with: {commands(path)} bind")
    if not path.read_bytes().strip():
        raise ConfigError(f"{title} is empty; write it with: {commands(path)} bind")
    try:
        selection = Selection(Variants(project or path), path.read_bytes(), names=project in (None, path))
        selection.complete(settings)
        items = _choose(overrides, selection)
        values = values_by_key(selection.tree)
        keys = list(values)
        if "hydra" in keys:  # Hydra's search path would import packages
            raise ConfigError(f"{title}: hydra: there is no such group; remove it, conf.yaml does not configure Hydra")
        problems, known = [], []
        for item in items:
            key = item.key_or_group
            if item.is_add() or item.is_force_add() or key in keys:
                known.append(str(item.input_line))
            elif any(key.startswith(f"{node}.") for node in selection.left_out):  # an argument of the new class
                known += [] if item.is_delete() else [f"++{item.input_line}"]
            else:
                from mlx_runtime.config.mismatches import unknown_key

                problems.append(Problem(key, unknown_key(key, item.input_line, values, title)))
        ConfigStore.instance().store(SELECTED, selection.tree)
        with initialize_config_dir(version_base=None, config_dir=str(path.parent.resolve())):
            config = compose(config_name=SELECTED, overrides=known)
        OmegaConf.set_struct(config, False)
        problems += _drop_unresolvable(config, "")
        tree: Any = OmegaConf.to_container(config, resolve=True)
        unresolved = resolve_config(config, environment=False)
        return Composition(tree, unresolved, problems, selection, path, title, project)
    except ValueError as error:
        raise ConfigError(f"{title} is not valid YAML: {' '.join(str(error).split())}") from error
    except (HydraException, OmegaConfBaseException) as error:
        source = "the overrides" if overrides and isinstance(error, HydraException) else title
        why = f": {short_message(error.__cause__)}" if error.__cause__ else ""
        why = why.replace("is not in struct", "is new there; to add keys, write ++ before the override")
        why += f"; {ESCAPE}" if isinstance(error.__cause__, GrammarParseError) else ""
        from mlx_runtime.config.mismatches import replaced_node

        raise ConfigError(replaced_node(overrides, str(error)) or f"{source}: {short_message(error)}{why}") from error


def _drop_unresolvable(node: Any, key: str) -> Iterator[Problem]:
    """Yield a problem for each invalid interpolation below a key, and replace it by null."""
    is_list = OmegaConf.is_list(node)
    for name in range(len(node)) if is_list else list(node):
        here = f"{key}[{name}]" if is_list else f"{key}.{name}".lstrip(".")
        if OmegaConf.is_missing(node, name):
            continue
        try:
            value = node[name]
        except OmegaConfBaseException as error:
            from mlx_runtime.config.mismatches import describe_unresolved

            yield Problem(here, describe_unresolved(here, error))
            node[name] = None
        else:
            if OmegaConf.is_config(value) and not OmegaConf.is_interpolation(node, name):
                yield from _drop_unresolvable(value, here)


def _choose(overrides: Sequence[str], selection: Selection) -> list[Override]:
    """Choose the variants that overrides and options name, and return the other overrides, parsed.

    Outer nodes are chosen before inner ones. Strings in place of a node come last, so that errors name the string and
    not an override below the node.
    """
    options = [item for item in overrides if item.startswith(OPTION)]
    for option in options:
        selection.apply(option.removeprefix(OPTION))
    storage = Settings.read().storage
    words = [] if storage is None else [storage_override(storage)]
    items = parse_overrides([*words, *(item for item in overrides if item not in options)])
    if several := next((item for item in items if item.is_sweep_override()), None):
        key, _, values = str(several.input_line).partition("=")
        raise ConfigError(
            f"the override {several.input_line!r} has several values, which need: mlx train sweep. If it is one value, "
            f"write a list as {key}=[{values}], and quote text: '{key}=\"{values}\"'"
        )
    by_depth = sorted(items, key=lambda item: item.key_or_group.count("."))
    chosen = [item for item in by_depth if not item.is_delete() and selection.choose(item.key_or_group, item.value())]
    selection.chosen += [*options, *(str(item.input_line) for item in chosen)]
    others = [item for item in items if item not in chosen]
    for item in others:
        selection.mark(item.key_or_group, None)
        selection.overrides[item.key_or_group] = str(item.input_line)
        node, _, last = item.key_or_group.rpartition(".")
        if last == "_target_" and "." in node:  # not of a whole group
            selection.name_class(node, item.value())
    nodes = selection.variants.nodes
    return sorted(others, key=lambda item: isinstance(item.value(), str) and item.key_or_group in nodes)


def parse_overrides(overrides: Sequence[str]) -> list[Override]:
    """Parse overrides in Hydra's grammar; raise ConfigError, with the override, if one is invalid."""
    for item in overrides:
        if item.startswith("="):
            raise ConfigError(f"the override {item!r} has no key; write key=value without spaces")
        if item.encode(errors="replace").decode() != item:  # half a surrogate pair: bytes that are not UTF-8
            raise ConfigError(f"the override {item!a:.100} holds text that is not Unicode; type it again")
        if _nesting_depth(item) > DEPTH:
            raise ConfigError(f"the override {item!r:.100} is nested more than {DEPTH} levels deep")
    try:
        return OverridesParser.create().parse_overrides([_quote_value(item) for item in overrides])
    except OverrideParseException as error:
        key, mark, _ = str(error.override).partition("=")
        cure = f"close its brackets and quotes, or quote its whole value: '{key}=\"…\"'"
        if not mark or str(error.override).endswith(","):
            cure = "write key=value, or key=a,b in a sweep, without spaces"
        why = f": {short_message(error.__cause__)}" if error.__cause__ else f"; {cure}"
        raise ConfigError(f"the override {error.override!r} is not understood{why}") from error


def _nesting_depth(text: str) -> int:
    """Return the maximum number of open brackets and braces."""
    return max(itertools.accumulate((letter in "[{") - (letter in "]}") for letter in text), default=0)


def storage_override(root: str) -> str:
    """Return the override that sets the storage path."""
    return f"cfg.storage_path={quote(escape(root))}"


def quote(value: Any) -> str:
    """Quote any string for an override, in which `${...}` is a reference."""
    return "'" + re.sub(r"(\\*)('|$)", lambda match: 2 * match[1] + match[2].replace("'", r"\'"), str(value)) + "'"


def _quote_value(override: str) -> str:
    """Quote the value of `cfg.x=a=b`: Hydra's grammar does not allow a second `=`."""
    match = re.fullmatch(r"([+~]{0,2}[\w.@]+)=([^'\"(\[{\s][^'\"(\[{]*=[^'\"]*)", override)
    return f"{match[1]}='{match[2]}'" if match else override


def _own_settings(node: Tree, base: type) -> Any:
    """Build the runtime's settings from the plain values of `cfg`, without the user's classes."""
    values = {}
    for item in parameters(base) or []:
        name, hint = item.name, item.annotation
        if isinstance(hint, type) and issubclass(hint, Section):
            values[name] = _own_settings(node.get(name, {}), hint)
        elif name in node and not _names_code(node[name]):
            values[name] = try_convert(node[name], hint)
    return base(**values)


def _names_code(value: Any) -> bool:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return (isinstance(value, dict) and "_target_" in value) or any(map(_names_code, items))
