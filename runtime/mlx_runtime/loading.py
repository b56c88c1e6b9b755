"""conf.yaml and overrides → a checked config → live objects.

Precedence: constructor default < conf.yaml < `MLX_STORAGE` < command line. Everything is checked against the
constructors' signatures before anything starts, and all problems are told at once.
"""

import ast
import contextlib
import dataclasses
import functools
import inspect
import re
import tempfile
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc
from yaml import YAMLError

from mlx_runtime import registry, resuming
from mlx_runtime.config import TrainConfig, base_of
from mlx_runtime.documents import from_yaml
from mlx_runtime.errors import (
    RAISED_BY_USERS,
    ConfigError,
    RunFinished,
    StorageError,
    UsageError,
    first_line,
    message_of,
    near,
)
from mlx_runtime.layout import CONF, RunFolder, commands, list_runs, named_run, storage_root
from mlx_runtime.redaction import redacted_tree
from mlx_runtime.resuming import Change
from mlx_runtime.settings import Settings
from mlx_runtime.signatures import MISSING, convert, groups, loaded_at, name_of, object_at, parameters, path_of
from mlx_runtime.storage import Storage, is_uri

Tree = dict[str, Any]

LEAST = {
    "accumulate_grad_batches": 1,
    "checkpoint_every_steps": 1,
    "cpus_per_worker": 1,
    "hang_timeout_s": 1,
    "keep_checkpoints": 1,
    "limit_batches": 1,
    "log_every_steps": 1,
    "max_failures": -1,
    "max_workers": 1,
    "min_workers": 1,
    "num_epochs": 0,
    "overfit_batches": 1,
    "prefetch_batches": 0,
    "seed": 0,
    "start_epoch": 0,
    "start_workers": 0,
    "watch_gradients": 0,
}
"""The least value of each setting that makes sense."""

FAST_DEV_RUN = "--fast-dev-run"

EVAL = "--eval="
"""Prefix of the path of the checkpoint to evaluate. Its run is given with `--from=`."""

FAST = ("++cfg.limit_batches=2", "cfg.num_epochs=1", "cfg.resume=null", "cfg.restore_checkpoint_path=null")
"""What it implies; overrides that are typed win."""


@dataclass(frozen=True)
class Config:
    """A checked config.

    Attributes:
        tree: conf.yaml with all overrides applied and all `${...}` resolved; plain dicts, lists and scalars.
        unresolved: the same, but values of the environment still say `${oc.env:NAME}`; for the conf.yaml of the run.
        cfg: the `cfg` group as the object that user code sees.
        overrides: as typed.
        run: to go on with, or None for a new one.
        claimed: folder that was made for this run, not begun yet, or None.
        origin: the run whose conf.yaml this is instead of the experiment's, or None.
        changes: what differs from the config that the run had before.
        fast: only a look whether all code runs; nothing of the run is kept.
        unseen: targets that were not checked, since only a run may import them.
        checkpoint: to evaluate instead of training; nothing is kept but what `origin` gets to know.
    """

    tree: Tree
    unresolved: Tree
    cfg: TrainConfig
    overrides: tuple[str, ...] = ()
    run: RunFolder | None = None
    claimed: RunFolder | None = None
    origin: RunFolder | None = None
    changes: tuple[Change, ...] = ()
    fast: bool = False
    unseen: tuple[str, ...] = ()
    checkpoint: str | None = None

    @property
    def kept(self) -> bool:
        """Whether this makes or continues a run that stays in the storage."""
        return not self.fast and self.checkpoint is None

    @property
    def shown(self) -> Tree:
        """The config without secrets, for records, checkpoints and trackers."""
        found: Tree = redacted_tree(self.unresolved)
        return found

    def yaml(self) -> str:
        return OmegaConf.to_yaml(OmegaConf.create(self.unresolved))


_unseen: ContextVar[list[str] | None] = ContextVar("_unseen", default=None)
"""Where `_check` notes targets that are not imported; None if it may import them."""


def load_config(experiment: type, overrides: Sequence[str] = (), path: Path = CONF, *, look: bool = False) -> Config:
    """Read conf.yaml, apply Hydra overrides and check the result against the constructors.

    Args:
        experiment: its class.
        overrides: of Hydra; among them `--resume=RUN` goes on with a run, the same as `cfg.resume=RUN`, and
            `--from=RUN` starts a new run. Both take the conf.yaml of that run, then the overrides. `--run=RUN` goes on
            with a run if it has begun, and begins it if it was only claimed. `--fast-dev-run` is short for `FAST`, in a
            storage that is removed at the end. `--eval=CHECKPOINT` evaluates a checkpoint of the run after `--from`.
        path: of conf.yaml.
        look: run no code that conf.yaml names: import no module for it, and make `cfg` of the runtime's own class, with
            its own fields, and without trackers and callbacks.

    Raises:
        ConfigError: with one line per problem.
        UsageError: there is no such run.
        RunFinished: the run to go on with has succeeded, and no more epochs are asked for.
    """
    fast = FAST_DEV_RUN in overrides
    if fast:
        overrides = [*FAST, *(item for item in overrides if item != FAST_DEV_RUN)]
    checkpoint = next((item.removeprefix(EVAL) for item in overrides if item.startswith(EVAL)), None)
    overrides = [item for item in overrides if not item.startswith(EVAL)]
    run, claimed, origin, typed, forced, declared = _chosen_run(path, overrides)
    if checkpoint is not None:
        forced = [*forced, f"++cfg.restore_checkpoint_path={_text(checkpoint)}", "++cfg.restore_strict=true"]
    if fast and run is not None:
        raise UsageError(f"{FAST_DEV_RUN} keeps nothing, and so cannot go on with a run; give it without --resume")
    found: list[Change] = []
    with _conf_of(run or origin) as conf:
        try:
            config = _load(experiment, [*typed, *forced], path if declared or conf is None else conf, look=look)
        except ConfigError as error:
            if (there := run or origin) is None:
                raise
            raise ConfigError(str(error).replace(str(conf), f"{there.place}/{there.conf.name}")) from None
        if run is not None:
            if declared:  # the same command again and again, perhaps with other settings by now
                _refuse_finished(run, conf or path, config.cfg)
            found = _changes(run, conf or path, config)
            if not declared:
                _refuse_finished(run, conf or path, config.cfg)
    config = replace(config, overrides=tuple(typed), changes=tuple(found), fast=fast)
    return replace(config, run=run, claimed=claimed, origin=origin, checkpoint=checkpoint)


def check(experiment: type, overrides: Sequence[str] = (), path: Path = CONF) -> None:
    """Refuse what a run with these overrides of Hydra would refuse, running no code that conf.yaml names.

    Raises:
        ConfigError: with one line per problem.
    """
    _load(experiment, overrides, path, look=True)


def _load(experiment: type, overrides: Sequence[str], path: Path, *, look: bool) -> Config:
    tree, kept, problems = _read(path, overrides)
    wanted = groups(experiment)
    told = {problem.partition(":")[0] for problem in problems}
    problems += _ambiguous_words(path)
    unseen: list[str] = []
    token = _unseen.set(unseen if look else None)
    base = base_of(experiment)
    try:
        problems += [problem for problem in _check(tree, wanted, base) if problem.partition(" is ")[0] not in told]
    finally:
        _unseen.reset(token)
    if problems:
        raise ConfigError(_listed(problems, path))
    cfg = _own_settings(tree["cfg"], base) if look else build_cfg(tree["cfg"], base)
    problems = [*_ranges(cfg), *_mapping_problems(tree, wanted)]
    if problems:
        raise ConfigError(_listed(problems, path))
    return Config(tree, kept, cfg, unseen=tuple(dict.fromkeys(unseen)))


def _own_settings(node: Tree, base: type) -> Any:
    """The runtime's settings with the plain values of a config, made without the user's classes."""
    hints = {item.name: item.hint for item in parameters(base) or []}
    plain = {name: node[name] for name in hints if name in node and not _names_code(node[name])}
    return base(**{name: fitted(value, hints[name]) for name, value in plain.items()})


def _names_code(value: Any) -> bool:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return (isinstance(value, dict) and "_target_" in value) or any(map(_names_code, items))


def _chosen_run(
    path: Path, overrides: Sequence[str]
) -> tuple[RunFolder | None, RunFolder | None, RunFolder | None, list[str], list[str], bool]:
    """The run to resume, to begin, or to start from, the overrides that are left, what they imply, and whether the
    experiment's own conf.yaml says what a run to resume should be.
    """
    options = {"--resume": "", "--from": "", "--run": ""}
    typed: list[str] = []
    waiting = ""  # for the run of an option, when it is a word of its own
    for item in overrides:
        name, _, value = item.partition("=")
        if name in options:
            options[name], waiting = value or "latest", "" if value else name
        elif waiting and not _is_override(item):
            options[waiting], waiting = item, ""
        else:
            typed.append(item)
            waiting = ""
    found = _read(path, typed)[0].get("cfg")
    cfg = found if isinstance(found, dict) else {}  # what is wrong with it is reported later
    root, experiment = storage_root(str(cfg.get("storage_path", "runs"))), str(cfg.get("name", "experiment"))
    resume = options["--resume"] or options["--run"] or cfg.get("resume")
    claimed = named_run(options["--run"], root, experiment) if options["--run"] else None
    if claimed is not None and claimed.begun():
        claimed = None
    if options["--from"]:
        if options["--resume"]:
            raise UsageError("--resume goes on with a run and --from starts a new one; give one of them")
        origin = named_run(options["--from"], root, experiment)
        kept = claimed.root if claimed else cfg.get("storage_path", "runs")
        return None, claimed, origin, typed, ["cfg.resume=null", f"cfg.storage_path={_text(kept)}"], False
    if claimed is not None:
        return None, claimed, None, typed, ["cfg.resume=null", f"cfg.storage_path={_text(claimed.root)}"], False
    if resume in ("auto", "latest"):  # not one that was killed before it had begun
        begun = [folder for folder in list_runs(root, experiment) if folder.begun()]
        if resume == "auto" and not begun:
            return None, None, None, typed, [], False
        resume = begun[-1].name if begun else resume
    if not resume:
        return None, None, None, typed, [], False
    run = named_run(str(resume), root, experiment)
    declared = cfg.get("resume") == "auto" and not options["--resume"]
    return run, None, None, typed, [f"cfg.storage_path={_text(run.root)}"], declared


def _is_override(text: str) -> bool:
    """Whether a word is an override and not the name of a run."""
    return bool(re.match(r"~|[+]{0,2}[A-Za-z_][\w.@/]*=", text)) and not is_uri(text)


@contextlib.contextmanager
def _conf_of(folder: RunFolder | None) -> Iterator[Path | None]:
    """The conf.yaml of a run as a file of this machine.

    Raises:
        StorageError: it cannot be read.
    """
    if folder is None:
        yield None
        return
    with tempfile.TemporaryDirectory() as temporary:
        conf = Path(temporary, "conf.yaml")
        try:
            conf.write_bytes(Storage(folder.place).read(folder.conf.name))
        except OSError as error:
            raise StorageError(f"cannot read {folder.place}/conf.yaml: {first_line(error)}") from error
        yield conf


def _refuse_finished(run: RunFolder, conf: Path, cfg: TrainConfig) -> None:
    """A run that has succeeded is not run again, unless it shall train for longer.

    Raises:
        UsageError: somebody trains it at present.
        RunFinished: nothing is left to do.
    """
    record = registry.refuse_living(run)
    before = OmegaConf.select(OmegaConf.load(conf), "cfg.num_epochs")
    if record.get("status") == "SUCCEEDED" and cfg.num_epochs <= before:
        raise RunFinished(
            f"{run.experiment} {run.name} has succeeded, with cfg.num_epochs={before}. To train on, raise it; "
            "for a new run, leave out --resume and cfg.resume"
        )


def _changes(run: RunFolder, conf: Path, config: Config) -> "list[Change]":
    """What differs from the config that a run had before.

    Raises:
        ConfigError: some of it cannot change when a run resumes.
    """
    found = resuming.changes(parsed(conf.read_text(encoding="utf-8")), config.tree)
    problems = resuming.refusals(found, type(config.cfg))
    if problems:
        listed = "\n  ".join([f"{run.title} cannot resume with other values of", *problems])
        raise ConfigError(
            f"{listed}\nLeave them as they were, or start a new run with them: mlx train run --from {run.title}"
        )
    return [change for change in found if change.key.removeprefix("cfg.") not in resuming.IGNORED]


def storage_override(root: str) -> str:
    """The override that chooses a storage."""
    return f"cfg.storage_path={_text(root)}"


def _text(value: Any) -> str:
    """A string as an override wants it, whatever is in it."""
    return "'" + re.sub(r"(\\*)('|$)", lambda match: 2 * match[1] + match[2].replace("'", r"\'"), str(value)) + "'"


def parsed(text: str | bytes, *, environment: bool = True) -> Tree:
    """YAML text as a run reads it, with `???` left in place.

    Args:
        text: of a conf.yaml.
        environment: resolve `${oc.env:NAME}` where the variable is set; else all of these stay as they are.

    Raises:
        ValueError: it is not YAML, too large, too deep, or no mapping; the message is one line.
    """
    config = from_yaml(text.encode() if isinstance(text, str) else text)
    try:
        tree: Tree = _resolved(config, environment=environment)
    except (OmegaConfBaseException, RecursionError) as error:
        raise ValueError(first_line(error)) from error
    return tree


def _resolved(config: Any, *, environment: bool) -> Any:
    """A config as plain dicts and lists, with interpolations resolved.

    Args:
        config: of OmegaConf.
        environment: false leaves interpolations as they are that read the environment, directly or by way of others.
            Those that read a variable which is not set stay in any case.

    Raises:
        OmegaConfBaseException: another interpolation leads nowhere.
    """
    unread = False

    def variable(*arguments: Any) -> Any:
        nonlocal unread
        with contextlib.suppress(KeyError):
            if environment:
                return oc.env(*arguments)
        unread = True
        raise LookupError

    def walked(node: Any, raw: Any) -> Any:
        items = raw.items() if isinstance(raw, dict) else enumerate(raw)
        found = {key: below(node, key, value) for key, value in items}
        return found if isinstance(raw, dict) else list(found.values())

    def below(node: Any, key: Any, raw: Any) -> Any:
        nonlocal unread
        if OmegaConf.is_interpolation(node, key):
            unread = False
            try:
                value = node[key]
                return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
            except OmegaConfBaseException:
                if unread:
                    return raw
                raise
        return walked(node[key], raw) if isinstance(raw, dict | list) else raw

    OmegaConf.register_new_resolver("oc.env", variable, replace=True)
    try:
        return walked(config, OmegaConf.to_container(config))
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)


def unset_variables(node: Any) -> set[str]:
    """The environment variables that a config from `parsed` names because they are not set here."""
    if isinstance(node, dict | list):
        return {name for item in (node.values() if isinstance(node, dict) else node) for name in unset_variables(item)}
    return set(re.findall(r"\$\{oc\.env:\s*(\w+)", node)) if isinstance(node, str) else set()


def build(node: Any, key: str = "", **objects: Any) -> Any:
    """Call what a node describes, arguments first, each as its annotation wants it.

    The same as Hydra's `instantiate(node, _convert_="all")`, except that lists become tuples, and strings Paths and
    Enums, where an annotation says so, and that a `_partial_` node gives a `functools.partial` of the target itself.

    Args:
        node: a mapping with `_target_`, or any plain value.
        key: where it stands in conf.yaml, for the error.
        objects: further arguments that are not YAML; passed on as they are.

    Raises:
        ConfigError: a constructor refused its arguments.
    """
    if isinstance(node, list):
        return [build(item, f"{key}[{index}]") for index, item in enumerate(node)]
    if not isinstance(node, dict):
        return node
    made = {name: build(item, f"{key}.{name}") for name, item in node.items() if name not in ("_target_", "_partial_")}
    if "_target_" not in node:
        return made
    target = object_at(node["_target_"])
    args = made.pop("_args_", [])
    known = parameters(target) or []
    hints = {item.name: item.hint for item in known if item.kind is not inspect.Parameter.VAR_KEYWORD}
    args = [fitted(value, item.hint) for value, item in zip(args, known)] + args[len(known) :]  # noqa: B905
    kwargs = {name: fitted(value, hints.get(name, Any)) for name, value in made.items()} | objects
    if node.get("_partial_"):
        return functools.partial(target, *args, **kwargs)
    try:
        return target(*args, **kwargs)
    except RAISED_BY_USERS as error:
        why = f"{type(error).__name__}: {message_of(error)}"
        raise ConfigError(f"{key}: {node['_target_']} cannot be made: {why}") from error


def build_cfg(node: Tree, base: type = TrainConfig) -> Any:
    """The group `cfg`. Settings of the runtime that its class does not have become attributes of it all the same.

    Args:
        node: of conf.yaml.
        base: the runtime's class of settings, whose defaults stand for those that are missing.

    Raises:
        ConfigError: a constructor refused its arguments.
    """
    own, rest = _split_cfg(node, base)
    cfg, settings = build(own, "cfg"), build(rest, "cfg")
    for item in dataclasses.fields(base):
        if not hasattr(cfg, item.name):
            object.__setattr__(cfg, item.name, getattr(settings, item.name))
    return cfg


def _split_cfg(node: Tree, base: type) -> tuple[Tree, Tree]:
    """The node `cfg` as that of its own class, and of the runtime's with what the former does not take."""
    taken = {item.name for item in parameters(object_at(node["_target_"])) or []}
    rest = {item.name for item in dataclasses.fields(base)} - taken
    own = {name: value for name, value in node.items() if name not in rest}
    return own, {"_target_": path_of(base)} | {name: value for name, value in node.items() if name in rest}


def build_optimizers(node: Tree, models: Any) -> Any:
    """Make the optimizers, each over the parameters of the models that `map_params_to_optimizers` gives it.

    Raises:
        ConfigError: the map names a model or an optimizer that does not exist, or leaves an optimizer without one.
    """
    made_models = {name: made for name, made in vars(models).items() if hasattr(made, "parameters")}
    names = [name for name in node if name != "_target_"]
    mapping = getattr(models, "map_params_to_optimizers", {})
    problems = _mapping_errors(mapping, list(made_models), names, type(models))
    if problems:
        raise ConfigError("\n  ".join(problems))
    params: dict[str, list[Any]] = {name: [] for name in names}
    for model, optimizer in mapping.items():
        params[optimizer] += made_models[model].parameters()
    made = {}
    for name in names:
        arguments = {key: value for key, value in node[name].items() if key != "params"}
        made[name] = build(arguments, f"optimizers.{name}", params=params[name])
    return object_at(node["_target_"])(**made)


def _implied(settings: Settings) -> list[str]:
    """Overrides that the environment stands for."""
    if settings.storage is None:
        return []
    return [storage_override(settings.storage)]


def _quoted(override: str) -> str:
    """`cfg.loader=workers=2` with its value in quotes, without which Hydra's grammar has no place for a second `=`."""
    match = re.fullmatch(r"([+~]{0,2}[\w.@]+)=([^'\"(\[{\s][^'\"(\[{]*=[^'\"]*)", override)
    return f"{match[1]}='{match[2]}'" if match else override


def composed(path: Path, overrides: Sequence[str]) -> Tree:
    """conf.yaml with what the environment and the overrides say, through Hydra; not checked.

    Raises:
        ConfigError: the file or an override cannot be read.
    """
    tree, _, problems = _read(path, overrides)
    if problems:
        raise ConfigError(_listed(problems, path))
    return tree


def _read(path: Path, overrides: Sequence[str]) -> tuple[Tree, Tree, list[str]]:
    """The same, also as `Config.unresolved` has it, with what is wrong left out of the trees and told as one line each.

    Raises:
        ConfigError: the file or an override cannot be read at all.
    """
    overrides = [*_implied(Settings.read()), *map(_quoted, overrides)]
    if not path.is_file():
        raise ConfigError(f"there is no {path}; write it with: {commands(path)} bind")
    try:
        keys = keys_of(OmegaConf.to_container(from_yaml(path.read_bytes())))
        if "hydra" in keys:  # its search path would import packages
            raise ConfigError(f"{path}: hydra: there is no such group; conf.yaml does not configure Hydra, remove it")
        problems, known = [], []
        for item in OverridesParser.create().parse_overrides(list(overrides)):
            key = item.key_or_group
            if item.is_add() or item.is_force_add() or key in keys:
                known.append(str(item.input_line))
            else:
                problems.append(f"override {item.input_line}: there is no key {key!r}.{near(key, keys)}")
        with initialize_config_dir(config_dir=str(path.parent.resolve()), version_base=None):
            config = compose(config_name=path.stem, overrides=known)
        OmegaConf.set_struct(config, False)
        for key in keys_of(OmegaConf.to_container(config)):
            try:
                OmegaConf.select(config, key)
            except OmegaConfBaseException as error:  # an interpolation that leads nowhere
                problems.append(f"{key}: {first_line(error)}")
                OmegaConf.update(config, key, None)
        tree = OmegaConf.to_container(config, resolve=True)
        kept = _resolved(config, environment=False)
    except (YAMLError, ValueError) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    except OverrideParseException as error:
        raise ConfigError(f"the override {error.override!r} is not understood; write key=value") from error
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"{path}: {first_line(error)}") from error
    assert isinstance(tree, dict)
    return tree, kept, problems  # type: ignore[return-value]


def _check(tree: Tree, wanted: dict[str, type], base: type = TrainConfig) -> list[str]:
    """Every problem of the config, as full key and cure."""
    problems = [f"{name}: there is no such group.{near(name, wanted)}" for name in tree if name not in wanted]
    for name, cls in wanted.items():
        if name not in tree:
            problems.append(f"{name}: missing; bring it in with: {commands()} bind")
        elif name == "cfg" and isinstance(tree[name], dict) and _importable(tree[name].get("_target_")):
            own, rest = _split_cfg(tree[name], base)
            _check_value(own, cls, name, path_of(cls), problems)
            _check_value(rest, base, name, path_of(base), problems)
        else:
            _check_value(tree[name], cls, name, path_of(cls), problems)
    if "optimizers" in tree:  # their parameters come from the models
        free = {f"optimizers.{name}.params" for name in tree["optimizers"]}
        problems = [problem for problem in problems if problem.partition(":")[0] not in free]
    return problems


def _target_at(path: str) -> Any:
    """What a `_target_` names; `MISSING` if a look would have to import it."""
    return object_at(path) if _unseen.get() is None else loaded_at(path)


def _importable(path: Any) -> bool:
    """True if a path leads to something callable; a look finds only what was imported before."""
    with contextlib.suppress(ImportError, AttributeError):
        found = _target_at(path)
        return found is not MISSING and callable(found)
    return False


def _ambiguous_words(path: Path) -> list[str]:
    """Lines like `flag: yes`: Hydra's YAML 1.1 reads a boolean, where editors and YAML 1.2 see a word."""
    lines = enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
    found = [
        (number, re.fullmatch(r"\s*(?:- )?([\w.]+): *(yes|no|on|off) *(?:#.*)?", line, re.IGNORECASE))
        for number, line in lines
    ]
    return [
        f'line {number}: {match[1]}: {match[2]} could be a word or a boolean; write "{match[2]}", true or false'
        for number, match in found
        if match
    ]


def _ranges(cfg: TrainConfig) -> list[str]:
    """Settings below the least that makes sense."""
    return [
        f"cfg.{name} is {value!r}; the least is {least}"
        for name, least in LEAST.items()
        if (value := getattr(cfg, name, least)) is not None and value < least
    ] + [*_worker_range(cfg), *_clip_range(cfg)]


def _worker_range(cfg: TrainConfig) -> list[str]:
    least, most = cfg.min_workers or cfg.start_workers, cfg.max_workers or cfg.start_workers
    if least <= cfg.start_workers <= most or cfg.start_workers == 0:
        return []
    return [f"cfg.start_workers is {cfg.start_workers}, not between cfg.min_workers={least} and cfg.max_workers={most}"]


def _clip_range(cfg: TrainConfig) -> list[str]:
    clip = getattr(cfg, "gradient_clip", None)
    if clip is None or clip > 0:
        return []
    return [f"cfg.gradient_clip is {clip!r}; write a norm above 0, or null to leave gradients as they are"]


def _mapping_problems(tree: Tree, wanted: dict[str, type]) -> list[str]:
    """What `map_params_to_optimizers` gets wrong, where the source says it plainly; else workers tell."""
    mapping = _literal_mapping(wanted["models"]) if "models" in wanted and "optimizers" in wanted else None
    if mapping is None:
        return []
    models, optimizers = ([name for name in tree[group] if name != "_target_"] for group in ("models", "optimizers"))
    return _mapping_errors(mapping, models, optimizers, wanted["models"])


def _literal_mapping(cls: type) -> dict[str, str] | None:
    """`map_params_to_optimizers` of a class body, or as `self.map_params_to_optimizers = {...}` in its `__init__`."""
    found = getattr(cls, "map_params_to_optimizers", None)
    if isinstance(found, dict):
        return found
    with contextlib.suppress(OSError, TypeError, SyntaxError, ValueError):
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(cls)))):
            targets = node.targets if isinstance(node, ast.Assign) else []
            if any(isinstance(item, ast.Attribute) and item.attr == "map_params_to_optimizers" for item in targets):
                return ast.literal_eval(node.value)  # type: ignore[attr-defined,no-any-return]
    return None


def _mapping_errors(
    mapping: Mapping[str, str], models: Sequence[str], optimizers: Sequence[str], cls: type
) -> list[str]:
    where = f"{cls.__name__}.map_params_to_optimizers"
    problems = []
    for model, optimizer in mapping.items():
        if model not in models:
            problems.append(f"{where} names the model {model!r}, which does not exist.{near(model, models)}")
        if optimizer not in optimizers:
            problems.append(
                f"{where} names the optimizer {optimizer!r}, which does not exist.{near(optimizer, optimizers)}"
            )
    idle = sorted(set(optimizers) - set(mapping.values()))
    if not problems:
        problems += [f"optimizers.{name} trains no model; give it one in {where}, or remove it" for name in idle]
    return problems


def _check_value(value: Any, hint: Any, key: str, owner: str, problems: list[str]) -> None:
    if value == "???":
        problems.append(f"{key}: ??? must be given a value; {owner} has no default for it")
    elif isinstance(value, dict) and "_target_" in value:
        _check_node(value, hint, key, owner, problems)
    elif isinstance(value, dict) and any(isinstance(item, dict | list) for item in value.values()):
        for name, item in value.items():
            _check_value(item, Any, f"{key}.{name}", owner, problems)
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for index, item in enumerate(value):
            _check_value(item, Any, f"{key}[{index}]", owner, problems)
    else:
        try:
            convert(value, hint)
        except TypeError:
            problems.append(f"{key} is {value!r}; {owner} wants {name_of(hint)}")


def _check_node(node: Tree, hint: Any, key: str, owner: str, problems: list[str]) -> None:
    path, unseen = node["_target_"], _unseen.get()
    try:
        target = _target_at(path)
    except (ImportError, AttributeError) as error:
        problems.append(f"{key}._target_ is {path!r}, which cannot be imported: {str(error).splitlines()[-1]}")
        return
    if target is MISSING and unseen is not None:
        unseen.append(path)
        return
    says = isinstance(hint, type) and hint not in (Any, MISSING)
    plain_class = says and isinstance(target, type) and "__new__" not in vars(target)
    if plain_class and not node.get("_partial_") and not issubclass(target, hint):
        problems.append(
            f"{key}._target_ is {path}, which is not a {path_of(hint)}; {owner} wants one. "
            "A wider type in the code, like a base class, would allow it"
        )
    known = parameters(target)
    if known is None:
        return
    by_name = {item.name: item for item in known}
    open_ended = any(item.kind is inspect.Parameter.VAR_KEYWORD for item in known)
    for name, value in node.items():
        if name in by_name and by_name[name].kind is not inspect.Parameter.VAR_KEYWORD:
            if value is None and by_name[name].default is None:
                continue  # as in `stride: int = None`, whatever the annotation says
            _check_value(value, by_name[name].hint, f"{key}.{name}", path, problems)
        elif name == "_args_":
            for index, item in enumerate(value):
                _check_value(item, Any, f"{key}._args_[{index}]", path, problems)
        elif not open_ended and name not in ("_target_", "_partial_"):
            problems.append(f"{key}.{name}: {path} has no such argument.{near(name, by_name)}")
    if node.get("_partial_") or "_args_" in node:
        return
    for item in known:
        named = item.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        if named and item.default is MISSING and item.name not in node:
            problems.append(
                f"{key}.{item.name}: missing, and {path} has no default for it; bring it in with: {commands()} bind"
            )


def fitted(value: Any, hint: Any) -> Any:
    """A plain value as the annotation wants it; one that does not fit was checked before, or is an object already."""
    try:
        return convert(value, hint)
    except TypeError:
        return value


def keys_of(tree: Any, prefix: str = "") -> list[str]:
    """Every full key below a mapping."""
    if not isinstance(tree, dict):
        return []
    keys = [f"{prefix}{name}" for name in tree]
    return keys + [key for name, item in tree.items() for key in keys_of(item, f"{prefix}{name}.")]


def _listed(problems: Sequence[str], path: Path) -> str:
    if len(problems) == 1:
        return f"{path}: {problems[0]}"
    return "\n  ".join([f"{path} has {len(problems)} problems:", *problems])
