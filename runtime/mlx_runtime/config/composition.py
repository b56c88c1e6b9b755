"""conf.yaml, variants and overrides → a checked config.

Precedence: constructor default < conf.yaml < `--variant` < `MLX_STORAGE` < command line. Everything is checked against
the signatures of the constructors before anything starts, and all problems are reported at once.

A variant is a file `variants/NAME.yaml` next to conf.yaml, which `--variant=NAME` merges into it. Its mappings change
the values that they list. Those with a `_target_` replace the node; Hydra would merge the arguments of two classes.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, cast

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mlx_runtime.config.building import Tree, build, build_cfg, runtime_settings
from mlx_runtime.config.checks import Problem, problems_of, settings_problems
from mlx_runtime.config.constructors.signatures import base_of, groups, parameters
from mlx_runtime.config.constructors.targets import object_at
from mlx_runtime.config.interpolation import escape, plain_tree, values_by_key
from mlx_runtime.config.projects import commands
from mlx_runtime.errors import ConfigError, UsageError, short_message, suggest
from mlx_runtime.settings import Settings
from mlx_runtime.storage.documents import ESCAPE, from_yaml, scalar_text, to_yaml
from mlx_runtime.storage.local import read_regular
from mlx_runtime.storage.redaction import redact_tree

OPTION = "--variant="

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
    """

    tree: Tree
    unresolved: Tree
    cfg: Any
    overrides: tuple[str, ...] = ()

    @property
    def shown(self) -> Tree:
        """The config without secrets, for records, checkpoints and trackers."""
        tree: Tree = redact_tree(self.unresolved)
        return tree

    def yaml(self) -> str:
        """Return the conf.yaml of the run."""
        return to_yaml(escape(self.unresolved))


class Composition(NamedTuple):
    """conf.yaml with variants and overrides applied, not checked against any signature; trees as in `Config`.

    Attributes:
        problems: unknown keys in overrides; the trees do not contain them.
        left_out: arguments in the file of a class that an override has replaced, by the key of its node.
        files: conf.yaml and variants, by the keys whose values they set; None for the default of a setting.
        overrides: the overrides, as typed, by the key that they set; for that of the environment, the variable.
        path: conf.yaml.
        title: its name in messages.

    Nodes whose class a variant or an override has replaced may get any key, because arguments of the new class are not
    in the file.
    """

    tree: Tree
    unresolved: Tree
    problems: list[Problem]
    left_out: dict[str, list[str]]
    files: dict[str, Path | None]
    overrides: dict[str, str]
    path: Path
    title: object

    def override(self, key: str) -> str | None:
        """Return the override that set the value at a key, the node around it or its `_target_`, or a value in it."""
        around = {name: f"{name.removesuffix('._target_')}." for name in self.overrides}
        others = (name for name, top in around.items() if key.startswith(top) or name.startswith(f"{key}."))
        return _nearest(self.overrides, key) or self.overrides.get(next(others, ""))

    def source(self, key: str) -> str:
        """Return the override or the file that a value comes from; `default` for a setting that none of them lists."""
        return _nearest(self.overrides, key) or str(_nearest(self.files, key) or "default")


def _nearest(sources: Mapping[str, Any], key: str) -> Any:
    """Return what set the value at a key like `tools.parts[0].width`, or else the innermost node around it."""
    while key and key not in sources:
        key = key[: max(key.rfind("."), key.rfind("["), 0)]
    return sources.get(key)


def check(experiment: type, composition: Composition, *, keys_only: bool = False) -> Config:
    """Check a config against the constructors of an experiment; ConfigError has one line per problem.

    With `keys_only`, the code cannot be imported: `cfg` has only the runtime's settings, and these are checked.
    """
    tree, title = composition.tree, composition.title
    classes, base = groups(experiment), base_of(experiment)
    found = settings_problems(tree.get("cfg"), base) if keys_only else problems_of(tree, classes, base)
    raise_if([_blame(item, composition) for item in (*composition.problems, *found)], title)
    cfg = build(runtime_settings(tree["cfg"], base), "cfg") if keys_only else build_cfg(tree["cfg"], base)
    mentioned = ((text, re.findall(r"\bcfg(?:\.\w+)+", text)) for text in base.out_of_range(cfg))
    limits = [Problem(next(filter(composition.override, keys), ""), text) for text, keys in mentioned]
    raise_if([_blame(item, composition) for item in limits], title)
    if not keys_only:
        tree = {name: _in_order_of(object_at(tree[name]["_target_"]), tree[name]) for name in classes}
    return Config(tree, composition.unresolved, cfg)


def _in_order_of(cls: Any, node: Tree) -> Tree:
    """Return a group in the order of its class: files and overrides may list its members in another one."""
    names = ["_target_", *(item.name for item in parameters(cls) or [])]
    return {name: node[name] for name in (*(item for item in names if item in node), *node)}


def _blame(problem: Problem, composition: Composition) -> str:
    """Return the text of a problem, with the override or variant that causes it, and the quotes that it lacks."""
    override, file = composition.override(problem.key), _nearest(composition.files, problem.key)
    text = problem.text
    if override:
        name, _, given = override.partition("=")
        if problem.unquoted and name.lstrip("+") == problem.key:
            text += f"; for text, write '{name}=\"{given}\"'"
        return f"{OVERRIDE}{' '.join(override.splitlines())}: {text}"
    if problem.unquoted and (typed := scalar_text((file or composition.path).read_bytes(), problem.key)) is not None:
        text += f'; for text, write "{typed}"'
    return text if file in (None, composition.path) else f"{text} (in {file})"


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
    """Compose conf.yaml with variants, the environment and the overrides, which have Hydra's grammar.

    `settings` are the defaults of `cfg` for values that conf.yaml does not list. `title` is the name of the file in
    messages, by default its path. `project` is the conf.yaml next to the variants if `path` is that of a run.
    """
    title = title or path
    if not path.exists() or (path.is_file() and not path.read_bytes().strip()):
        problem = f"{title} is empty" if path.exists() else f"there is no {title}"
        raise ConfigError(f"{problem}; write it with: {commands(path)} bind")
    tree = _yaml(path, title)
    files: dict[str, Path | None] = dict.fromkeys(values_by_key(tree), path)
    for name in [item.removeprefix(OPTION) for item in overrides if item.startswith(OPTION)]:
        variant = _variant((project or path).with_name("variants"), name)
        files |= dict.fromkeys(values_by_key(content := _yaml(variant, variant)), variant)
        _merge(tree, content)
    _complete(tree, settings)
    storage = Settings.read().storage
    implied = [] if storage is None else parse_overrides([storage_override(storage)])
    typed = parse_overrides([item for item in overrides if not item.startswith(OPTION)])
    left_out = _replace_classes(tree, typed)
    keys = values_by_key(tree)
    files = dict.fromkeys(keys) | files
    by_variant = [key for key in keys if files[key] not in (None, path)]
    replaced = {*left_out, *(key.removesuffix("._target_") for key in by_variant if key.endswith("._target_"))}
    cure = f"To add it: +KEY=..., or {commands(path)} bind if the code has it"
    set_by = {item.key_or_group: "MLX_STORAGE" for item in implied}
    set_by |= {item.key_or_group: str(item.input_line) for item in typed}
    composition = Composition({}, {}, [], left_out, files, set_by, path, title)
    config, problems, key, resolved = OmegaConf.create(tree), composition.problems, "", None
    try:
        for item in [*implied, *typed]:
            key, added = item.key_or_group, str(item.input_line).startswith("+")
            if item.package or not (key in keys or added or any(key.startswith(f"{node}.") for node in replaced)):
                name = f"{key}@{item.package}" if item.package else key  # of a config group, which Hydra has
                problems.append(Problem(key, f"there is no key {name!r} in {title}.{suggest(name, keys)} {cure}"))
            elif item.is_delete() and key in keys and "=" in str(item.input_line) and keys[key] != item.value():
                problems.append(Problem(key, f"{key} is {keys[key]!r:.100}, not {item.value()!r:.100}"))
            elif not item.is_delete():
                merges = isinstance(keys.get(key), dict) and isinstance(item.value(), dict)
                OmegaConf.update(config, key, item.value(), merge=merges, force_add=True)
            elif key in keys:
                above, _, name = key.rpartition(".")
                del (OmegaConf.select(config, above) if above else config)[name]
        resolved = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:  # an invalid interpolation
        key = str(error.full_key or key)
        problems.append(Problem(key, f"{key}: {short_message(error)}; {ESCAPE}"))
        raise_if([_blame(item, composition) for item in problems], title)
    return composition._replace(tree=cast(Tree, resolved), unresolved=plain_tree(config, environment=False))


def _yaml(file: Path, title: object) -> Tree:
    """Return a YAML file with unresolved `${...}`."""
    try:
        tree: Any = OmegaConf.to_container(from_yaml(read_regular(file, ConfigError)))
    except ValueError as error:
        raise ConfigError(f"{title} is not valid YAML: {' '.join(str(error).split())}") from error
    return tree  # type: ignore[no-any-return]


def _variant(folder: Path, name: str) -> Path:
    files = {file.stem: file for file in folder.glob("*.yaml")}
    if name not in files:
        raise UsageError(f"there is no variant {name!r} in {folder}.{suggest(name, files)}")
    return files[name]


def _merge(tree: Tree, changes: Tree) -> None:
    for name, value in changes.items():
        if isinstance(value, dict) and "_target_" not in value and isinstance(tree.get(name), dict):
            _merge(tree[name], value)
        else:
            tree[name] = value


def _complete(tree: Tree, settings: Mapping[str, Any]) -> None:
    """Add the values of `cfg` that the file does not list, including those in partly listed sections."""
    if isinstance(cfg := tree.get("cfg"), dict):
        for name, value in settings.items():
            path = value.get("_target_") if isinstance(value, dict) else None
            given = cfg.get(name, {} if path else value)
            completes = path and isinstance(given, dict) and given.get("_target_", path) == path
            cfg[name] = {**value, **given} if completes else given


def _replace_classes(tree: Tree, overrides: Sequence[Override]) -> dict[str, list[str]]:
    """Remove the arguments of nodes whose class an override replaces. Return their names by the key of the node."""
    left_out = {}
    for item in overrides:
        key, line = item.key_or_group, str(item.input_line)
        if item.is_sweep_override():
            raise ConfigError(
                f"the override {line!r} has several values, which need: mlx train sweep. If it is one value, "
                "write a list in brackets, and quote text: '\"a,b\"'"
            )
        node = values_by_key(tree).get(above := key.rpartition("._target_")[0])
        if "." in above and isinstance(node, dict) and node.get("_target_") != item.value():
            left_out[above] = [name for name in node if name not in ("_target_", "_partial_")]
            for name in left_out[above]:
                del node[name]
    return left_out


def parse_overrides(overrides: Sequence[str]) -> list[Override]:
    """Parse overrides in Hydra's grammar; raise ConfigError, with the override, if one is invalid."""
    for item in overrides:
        if item.encode(errors="replace").decode() != item:  # half a surrogate pair: bytes that are not UTF-8
            raise ConfigError(f"the override {item!a:.100} is not valid Unicode; type it again")
    try:
        return OverridesParser.create().parse_overrides([_quote_value(item) for item in overrides])
    except RecursionError:
        raise ConfigError("an override is nested too deeply") from None
    except OverrideParseException as error:
        why = f": {short_message(error.__cause__)}" if error.__cause__ else ""
        cure = "write key=value without spaces, and quote a value with brackets or commas: 'key=\"…\"', not keys in it"
        raise ConfigError(f"the override {error.override!r} is not understood{why}; {cure}") from error


def _quote_value(override: str) -> str:
    """Quote the value of `cfg.loader=workers=2`: Hydra's grammar does not allow a second `=`."""
    match = re.fullmatch(r"([+~]{0,2}[\w.@]+)=([^'\"(\[{\s][^'\"(\[{]*=[^'\"]*)", override)
    return f"{match[1]}='{match[2]}'" if match else override


def storage_override(root: str) -> str:
    """Return the override that sets the storage path."""
    return f"cfg.storage_path={quote(escape(root))}"


def quote(value: Any) -> str:
    """Quote any string for an override, in which `${...}` is a reference."""
    return "'" + re.sub(r"(\\*)('|$)", lambda match: 2 * match[1] + match[2].replace("'", r"\'"), str(value)) + "'"
