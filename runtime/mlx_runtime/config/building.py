"""Objects, built from a checked config."""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from mlx_runtime import companions
from mlx_runtime.config.constructors import declarations
from mlx_runtime.config.constructors.signatures import parameters, takes_any_keyword, try_convert
from mlx_runtime.config.constructors.targets import object_at, path_of
from mlx_runtime.errors import USER_ERRORS, ConfigError, full_message, suggest
from mlx_runtime.sections import OF_MODELS, Section

Tree = dict[str, Any]

DUMMY_PARAMS: list[Any]
"""Placeholder in `adam: Adam = Adam(DUMMY_PARAMS)`; a run passes the parameters of the mapped models instead."""

_without_weights: ContextVar[bool] = ContextVar("without_weights", default=False)

observer: ContextVar[Callable[[str, Any], object]] = ContextVar("observer", default=lambda key, made: None)
"""Called with the key of each node and the object that was built from it."""

Context = Callable[[str], contextlib.AbstractContextManager[None]]
"""Returns the context manager for the construction of a dataset, given its name in the group."""


def __getattr__(name: str) -> Any:  # because launching needs no torch
    if name != "DUMMY_PARAMS":
        raise AttributeError(name)
    import torch

    return globals().setdefault(name, [torch.nn.Parameter(torch.zeros(1))])


def build(node: Any, key: str = "", **objects: Any) -> Any:
    """Build the object of the node at `key`, arguments first; raise ConfigError if a constructor rejects them.

    Works like `instantiate(node, _convert_="all")` of Hydra, except that arguments are converted to their annotated
    types (lists to tuples, strings to paths and enums), and that a `_partial_` node builds a `functools.partial` of the
    target itself. `objects` are further arguments, passed unchanged.
    """
    return _build(node, key, _builder, objects)


def _builder(target: Any, key: str) -> Callable[..., Any]:
    """Return the function to call for the target of the node at `key`: a companion's for some models, or the target."""
    if declarations.is_pretrained(target):
        return functools.partial(companions.part("hub.pretrained").make, target, _without_weights.get())
    if declarations.is_nnx(target):
        return functools.partial(companions.part("jax.building").make, target, key)
    return target  # type: ignore[no-any-return]


@contextlib.contextmanager
def without_weights() -> Iterator[None]:
    """Within the block, build pretrained models without downloading their weights, if their library can."""
    token = _without_weights.set(True)
    try:
        yield
    finally:
        _without_weights.reset(token)


def built_to_be_restored(make: Callable[[], Any]) -> Any:
    """Return the group of models that `make` builds, to be overwritten by a checkpoint.

    They are built without weights, unless checkpoints contain only some of their values, such as those of adapters.
    """
    with without_weights():
        group = make()
    models = [item for item in vars(group).values() if hasattr(item, "named_parameters")]
    whole = all(dict(model.named_parameters()).keys() <= model.state_dict().keys() for model in models)
    return group if whole else make()


def declare(node: Any, key: str = "", **objects: Any) -> Any:
    """Build an object like `build`, with a Declaration in place of each torch Dataset."""
    return _build(node, key, lambda target, _: functools.partial(declarations.declare_call, target), objects)


def build_group(node: Any, key: str, context: Context) -> Any:
    """Build a group whose datasets are constructed when they are first read, within `context(name)`.

    If the group's constructor does more than store its datasets, all are constructed immediately.
    """
    try:
        group = declare_group(node, key, context)
    except (ConfigError, TypeError):
        return build(node, key)
    return build(node, key) if any(declarations.is_dataset(type(item)) for item in vars(group).values()) else group


def declare_group(node: Any, key: str, context: Context = lambda name: contextlib.nullcontext()) -> Any:
    """Build a group of datasets with a Declaration in place of each; arguments as for `build_group`."""
    cls = object_at(node["_target_"])

    def callee(target: Any, key: str) -> Any:
        if target is cls:
            return declarations.made_on_read(cls, context)
        if inspect.isroutine(target) or declarations.is_dataset(target):
            return functools.partial(declarations.Declaration, target)
        return functools.partial(declarations.declare_call, target)

    return _build(node, key, callee, {})


def _build(node: Any, key: str, callee: Callable[[Any, str], Any], objects: Mapping[str, Any]) -> Any:
    """Build an object; `callee` maps each target, and the key of its node, to the function to call."""
    if isinstance(node, list):
        return [_build(item, f"{key}[{index}]", callee, {}) for index, item in enumerate(node)]
    if not isinstance(node, dict):
        return node
    names = [name for name in node if name not in ("_target_", "_partial_")]
    arguments = {name: _build(node[name], f"{key}.{name}", callee, {}) for name in names}
    if "_target_" not in node:
        return arguments
    target = object_at(node["_target_"])
    args = arguments.pop("_args_", [])
    known = parameters(target) or []
    hints = {item.name: item.annotation for item in known if item.kind is not item.VAR_KEYWORD}
    args = [try_convert(value, item.annotation) for value, item in zip(args, known)] + args[len(known) :]  # noqa: B905
    kwargs = {name: try_convert(value, hints.get(name, Any)) for name, value in arguments.items()} | dict(objects)
    if node.get("_partial_"):
        return callee(functools.partial, key)(target, *args, **kwargs)
    try:
        made = callee(target, key)(*args, **kwargs)
    except USER_ERRORS as error:
        why = f"{type(error).__name__}: {full_message(error)}"
        raise ConfigError(f"{key}: {node['_target_']} cannot be built: {why}") from error
    observer.get()(key, made)
    return made


def build_cfg(node: Tree, base: type) -> Any:
    """Build the group `cfg`. Settings of the runtime's class `base` that the user's class lacks become attributes."""
    own, rest = split_cfg(node, base)
    cfg, settings = build(own, "cfg"), build(rest, "cfg")
    for item in dataclasses.fields(base):
        if not hasattr(cfg, item.name):
            object.__setattr__(cfg, item.name, getattr(settings, item.name))
    return cfg


def runtime_settings(node: Tree, base: Any) -> Tree:
    """Return a node of the runtime's settings in `cfg`, without values that name classes of the user."""
    settings: Tree = {"_target_": path_of(base)}
    node = _with_classes(node, base)
    for item in dataclasses.fields(base):
        value = node.get(item.name)
        if isinstance(item.default, Section) and isinstance(value, dict):
            settings[item.name] = runtime_settings(value, type(item.default))
        elif item.name in node and (item.name in OF_MODELS or not _names_code(value)):
            settings[item.name] = value
    return settings


def _with_classes(cfg: Tree, base: type) -> Tree:
    """Return the node `cfg` with the classes of the sections that it has for each model."""
    cfg = dict(cfg)
    for name, kind in OF_MODELS.items():
        if hasattr(base, name) and isinstance(nodes := cfg.get(name), dict):
            target = {"_target_": path_of(kind)}
            cfg[name] = {model: target | item if isinstance(item, dict) else item for model, item in nodes.items()}
    return cfg


def _names_code(value: Any) -> bool:
    """Return True if a value of `cfg` contains a `_target_`."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return (isinstance(value, dict) and "_target_" in value) or any(map(_names_code, items))


def split_cfg(node: Tree, base: type) -> tuple[Tree, Tree]:
    """Split the node `cfg` into the settings of the user's class and the runtime's settings that it lacks."""
    node = _with_classes(node, base)
    taken = {item.name for item in parameters(object_at(node["_target_"])) or []}
    rest = {item.name for item in dataclasses.fields(base)} - taken
    own = {name: value for name, value in node.items() if name not in rest}
    return own, {"_target_": path_of(base)} | {name: value for name, value in node.items() if name in rest}


def build_optimizers(
    node: Tree, models: Any, params_of: Callable[[str, Any], Iterable[Any]] = lambda name, model: model.parameters()
) -> Any:
    """Build the optimizers over the parameters of the models that `models.map_params_to_optimizers` assigns to them.

    Others, like partials and the transformations of Optax, take no parameters, and are built as in other groups.
    `params_of` returns the parameters, or parameter groups, of a model and its name.
    """
    modules = {name: module for name, module in vars(models).items() if hasattr(module, "parameters")}
    names = [name for name in node if name != "_target_" and _takes_params(node[name])]
    mapping = getattr(models, "map_params_to_optimizers", {})
    if problems := _mapping_problems(mapping, list(modules), names, type(models)):
        raise ConfigError("\n  ".join(problems))
    params: dict[str, list[Any]] = {name: [] for name in names}
    for model, optimizer in mapping.items():
        params[optimizer] += params_of(model, modules[model])
    others = {name: item for name, item in node.items() if name != "_target_" and name not in names}
    optimizers = build(others, "optimizers")
    for name in names:
        if not params[name]:
            raise ConfigError(f"optimizers.{name} trains nothing: its models have no parameters, or all are frozen")
        arguments = {key: value for key, value in node[name].items() if key != "params"}
        optimizers[name] = build(arguments, f"optimizers.{name}", params=params[name])
    return object_at(node["_target_"])(**optimizers)


def _takes_params(node: Any) -> bool:
    """Return True for the node of an optimizer over parameters; it may hide them in its `**options`."""
    if not isinstance(node, dict) or "_target_" not in node or node.get("_partial_"):
        return False
    items = parameters(object_at(node["_target_"]))
    return items is None or takes_any_keyword(items) or any(item.name == "params" for item in items)


def _mapping_problems(
    mapping: Mapping[str, str], models: Sequence[str], optimizers: Sequence[str], cls: type
) -> list[str]:
    owner = f"{cls.__name__}.map_params_to_optimizers"
    problems = []
    for model, optimizer in mapping.items():
        for kind, name, known in (("model", model, models), ("optimizer", optimizer, optimizers)):
            if name not in known:
                problems.append(f"{owner} names the {kind} {name!r}, which does not exist.{suggest(name, known)}")
    if problems:
        return problems
    idle = sorted(set(optimizers) - set(mapping.values()))
    return [f"optimizers.{name} trains no model; give it one in {owner}, or remove it" for name in idle]
