"""conf.yaml, variants and overrides → a checked config.

Precedence: constructor default < conf.yaml < `--variant` < `MLX_STORAGE` < command line. Everything is checked against
the signatures of the constructors before anything starts, and all problems are reported at once.

A variant is a file `variants/NAME.yaml` next to conf.yaml, which `--variant=NAME` merges into it. Its mappings change
the values that they list. Those with a `_target_` replace the node; Hydra would merge the arguments of two classes.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from omegaconf.errors import OmegaConfBaseException

from mlx_runtime.config.building import Tree, build_cfg, plain_settings
from mlx_runtime.config.checks import Checker, Problem
from mlx_runtime.config.constructors.signatures import base_of, groups, parameters
from mlx_runtime.config.constructors.targets import object_at
from mlx_runtime.config.interpolation import escape, plain_tree, values_by_key
from mlx_runtime.config.projects import commands
from mlx_runtime.errors import ConfigError, UsageError, short_message, suggest
from mlx_runtime.settings import Settings
from mlx_runtime.storage.documents import ESCAPE, from_yaml, scalar_text, to_yaml
from mlx_runtime.storage.local import read_regular
from mlx_runtime.storage.redaction import redact_tree

SELECTED = "mlx-selected"
"""Name under which Hydra finds conf.yaml with its variants; must not be that of a file in `src`."""

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
        problems: unknown keys in overrides and invalid interpolations; the trees do not contain them.
        left_out: arguments in the file of a class that an override has replaced, by the key of its node.
        files: conf.yaml and variants, by the keys whose values they set; None for the default of a setting.
        overrides: the overrides, as typed, by the key that they set.
        path: conf.yaml.
        title: its name in messages.
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
        storage = key == "cfg.storage_path" and Settings.read().storage is not None
        typed = self.overrides.get(key) if storage else _nearest(self.overrides, key)
        return typed or ("MLX_STORAGE" if storage else str(_nearest(self.files, key) or "default"))


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
    checker, reported = Checker(), {problem.key for problem in composition.problems}
    problems, cfg = [*composition.problems], tree.get("cfg")
    found = checker.check(tree, classes, base)
    if keys_only and isinstance(cfg, dict):
        found = checker.settings(cfg, base)
    problems += [item for item in found if item.key not in reported]
    raise_if([_blame(item, composition) for item in problems], title)
    cfg = plain_settings(tree["cfg"], base) if keys_only else build_cfg(tree["cfg"], base)
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
    """Compose conf.yaml with variants, the environment and the overrides, through Hydra.

    `settings` are the defaults of `cfg` for values that conf.yaml does not list. `title` is the name of the file in
    messages, by default its path. `project` is the conf.yaml next to the variants if `path` is that of a run.
    """
    title = title or path
    if not path.is_file() and path.exists():
        raise ConfigError(f"{title} is not a regular file")
    if not path.exists() or not path.read_bytes().strip():
        problem = f"{title} is empty" if path.exists() else f"there is no {title}"
        raise ConfigError(f"{problem}; write it with: {commands(path)} bind")
    tree = _yaml(path, title)
    files: dict[str, Path | None] = dict.fromkeys(values_by_key(tree), path)
    for name in [item.removeprefix(OPTION) for item in overrides if item.startswith(OPTION)]:
        variant = _variant((project or path).with_name("variants"), name)
        files |= dict.fromkeys(values_by_key(content := _yaml(variant, variant)), variant)
        _merge(tree, content)
    if "hydra" in tree:  # Hydra's search path would import packages
        raise ConfigError(f"{title}: hydra: there is no such group; remove it, conf.yaml does not configure Hydra")
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
    known, problems = _split([*implied, *typed], keys, replaced, title, cure)
    set_by = {item.key_or_group: str(item.input_line) for item in typed}
    try:
        ConfigStore.instance().store(SELECTED, tree)
        with initialize_config_dir(version_base=None, config_dir=str(path.parent.resolve())):
            config = compose(config_name=SELECTED, overrides=known)
        OmegaConf.set_struct(config, False)
        problems += _drop_unresolvable(config, "")
        resolved: Any = OmegaConf.to_container(config, resolve=True)
        unresolved = plain_tree(config, environment=False)
        return Composition(resolved, unresolved, problems, left_out, files, set_by, path, title)
    except (HydraException, OmegaConfBaseException) as error:
        why = f": {short_message(error.__cause__)}" if error.__cause__ else ""
        raise ConfigError(f"{'the overrides' if known else title}: {short_message(error)}{why}; {ESCAPE}") from error


def _split(
    overrides: Sequence[Override], keys: Mapping[str, Any], replaced: Iterable[str], title: object, cure: str
) -> tuple[list[str], list[Problem]]:
    """Return the overrides for Hydra, and the problems of others: keys that do not exist, and are not to be added.

    Nodes whose class is `replaced` may get any key, because arguments of the new class are not in the file.
    """
    known, problems = [], []
    for item in overrides:
        key, line = item.key_or_group, str(item.input_line)
        if not (key in keys or line.startswith("+") or any(key.startswith(f"{node}.") for node in replaced)):
            problems.append(Problem(key, f"there is no key {key!r} in {title}.{suggest(key, keys)} {cure}"))
        elif not item.is_delete():
            known.append(f"++{line.lstrip('+')}")
        elif key in keys:
            known.append(line)
    return known, problems


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
        if "." in above and isinstance(node, dict) and not _same_class(node.get("_target_"), item.value()):
            left_out[above] = [name for name in node if name not in ("_target_", "_partial_")]
            for name in left_out[above]:
                del node[name]
    return left_out


def _same_class(first: Any, second: Any) -> bool:
    """Return True if two paths name the same class, like `torch.optim.Adam` and `torch.optim.adam.Adam`."""
    try:
        return first == second or object_at(first) is object_at(second)
    except (ImportError, AttributeError):
        return False


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
            yield Problem(here, f"{here}: {short_message(error)}; {ESCAPE}")
            node[name] = None
        else:
            if OmegaConf.is_config(value) and not OmegaConf.is_interpolation(node, name):
                yield from _drop_unresolvable(value, here)


def parse_overrides(overrides: Sequence[str]) -> list[Override]:
    """Parse overrides in Hydra's grammar; raise ConfigError, with the override, if one is invalid."""
    for item in overrides:
        if item.startswith("="):
            raise ConfigError(f"the override {item!r} has no key; write key=value without spaces")
        if item.encode(errors="replace").decode() != item:  # half a surrogate pair: bytes that are not UTF-8
            raise ConfigError(f"the override {item!a:.100} is not valid Unicode; type it again")
    try:
        return OverridesParser.create().parse_overrides([_quote_value(item) for item in overrides])
    except RecursionError:
        raise ConfigError("an override is nested too deeply") from None
    except OverrideParseException as error:
        why = f": {short_message(error.__cause__)}" if error.__cause__ else ""
        cure = "write key=value without spaces, and quote a value with brackets or commas: 'key=\"…\"'"
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
