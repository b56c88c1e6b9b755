"""Constructors → conf.yaml: write down every default of an experiment, keeping what the user edited.

A *node* is a mapping with `_target_` (the class or function to call) and its arguments. Values are plain YAML;
what is not plain is a node again. Reading conf.yaml back is `loading`'s work.
"""

import enum
import functools
import inspect
import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.scalarstring import DoubleQuotedScalarString

from mlx_runtime.errors import BindError
from mlx_runtime.layout import write_atomic
from mlx_runtime.signatures import (
    MISSING,
    Call,
    Parameter,
    convert,
    groups,
    object_at,
    parameters,
    path_of,
    recorded_default,
)

DUMMY_PARAMS = [torch.nn.Parameter(torch.zeros(1))]
"""Stands for the parameters in `adam: Adam = Adam(DUMMY_PARAMS)`; at run time the mapped models' take its place."""

HEADER = """\
# Every setting of this experiment: the source of truth for `mlx train run`.
# Written by `mlx train bind` from the defaults in src/. Edit freely: binding again keeps your values and comments,
# adds new arguments and drops removed ones. ??? must be filled in (the `params` of an optimizer excepted).
"""

Node = dict[str, Any]


@dataclass
class Changes:
    """What a bind did to the file, as full keys."""

    added: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """One line per key that a person should know of."""
        return [
            *(f"added    {key}" for key in self.added),
            *(f"dropped  {key} (no longer an argument)" for key in self.dropped),
            *(f"kept     {key} (your value; the code's default differs)" for key in self.kept),
        ]


def describe(experiment: type) -> dict[str, Node]:
    """The whole experiment as nodes, by the groups of its constructor: `cfg`, `models`, `datasets`, …

    Raises:
        BindError: a group without a type, or a default that YAML cannot re-create.
    """
    return {name: _constructor_node(cls, name) for name, cls in groups(experiment).items()}


def write(path: Path, tree: dict[str, Node]) -> Changes:
    """Write or update conf.yaml, atomically.

    Raises:
        BindError: the present file is not YAML.
    """
    yaml = YAML()
    yaml.width = 120
    yaml.representer.add_representer(
        type(None), lambda writer, _: writer.represent_scalar("tag:yaml.org,2002:null", "null")
    )
    yaml.indent(mapping=2, sequence=4, offset=2)
    changes = Changes()
    if path.exists():
        try:
            old = yaml.load(path.read_text(encoding="utf-8"))
        except Exception as error:  # ruamel raises many kinds, all meaning the same to the user
            raise BindError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
        merged = old if isinstance(old, CommentedMap) else CommentedMap()
        _merge(merged, tree, "", changes)
        header = ""
    else:
        merged, header = _quoted(tree), HEADER
    stream = io.StringIO()
    yaml.dump(merged, stream)
    write_atomic(path, header + stream.getvalue())
    return changes


def _constructor_node(target: Any, key: str) -> Node:
    """A node for `target()` with every default written out; an argument without a default is `???`."""
    node: Node = {"_target_": path_of(target)}
    for parameter in parameters(target) or []:
        if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            continue
        node[parameter.name] = _default_value(target, parameter, f"{key}.{parameter.name}")
    return node


def _call_node(call: Call, calls: dict[int, Call], key: str) -> Node:
    """A node for one recorded call: the arguments given, then the defaults of the others."""
    if call.function is functools.partial:
        inner = Call(call.args[0], call.args[1:], call.kwargs, call.result)
        return {"_target_": path_of(inner.function), "_partial_": True, **_given(inner, calls, key)}
    node: Node = {"_target_": path_of(call.function)}
    known = parameters(call.function)
    if known is None:  # a C type that does not tell its parameters
        return node | _given(call, calls, key)
    bound = inspect.signature(call.function).bind(*call.args, **call.kwargs).arguments
    positional: list[Any] = []
    variadic = any(item.kind is inspect.Parameter.VAR_POSITIONAL and bound.get(item.name) for item in known)
    for item in known:
        here = f"{key}.{item.name}"
        if item.kind is inspect.Parameter.VAR_POSITIONAL:
            positional += [_value(value, item.hint, calls, here) for value in bound.get(item.name, ())]
        elif item.kind is inspect.Parameter.VAR_KEYWORD:
            node |= {name: _value(value, item.hint, calls, here) for name, value in bound.get(item.name, {}).items()}
        else:
            if item.name in bound:
                value = _value(bound[item.name], item.hint, calls, here)
            else:
                value = _default_value(call.function, item, here)
            before_star = variadic and item.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
            if item.kind is inspect.Parameter.POSITIONAL_ONLY or before_star:
                positional.append(value)
            else:
                node[item.name] = value
    return {**node, "_args_": positional} if positional else node


def _given(call: Call, calls: dict[int, Call], key: str) -> Node:
    """The arguments of a call as they were given, without defaults."""
    node: Node = {name: _value(value, Any, calls, f"{key}.{name}") for name, value in call.kwargs.items()}
    if call.args:
        node["_args_"] = [_value(value, Any, calls, f"{key}[{index}]") for index, value in enumerate(call.args)]
    return node


def _default_value(target: Any, parameter: Parameter, key: str) -> Any:
    """The default of one parameter as YAML; its expression is only read when the value does not say enough."""
    if parameter.default is MISSING:
        return "???"
    try:
        return _value(parameter.default, parameter.hint, {}, key)
    except BindError:
        recorded = recorded_default(target, parameter.name)
        if recorded is None:
            raise
        value, calls = recorded
        return _value(value, parameter.hint, calls, key)


def _value(value: Any, hint: Any, calls: dict[int, Call], key: str) -> Any:
    """One value as YAML, or a BindError that names the key."""
    if value is DUMMY_PARAMS:
        return "???"
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, enum.Enum):
        if _restored(value.name, hint, value):
            return value.name
        return _imported(f"{path_of(type(value))}.{value.name}")
    if isinstance(value, Path) and _restored(str(value), hint, value):
        return str(value)
    if type(value) is list:
        return [_value(item, Any, calls, f"{key}[{index}]") for index, item in enumerate(value)]
    if type(value) is tuple:
        items = [_value(item, Any, calls, f"{key}[{index}]") for index, item in enumerate(value)]
        return items if _restored(list(value), hint, value) else {"_target_": "builtins.tuple", "_args_": [items]}
    if type(value) is dict and all(isinstance(name, str) for name in value):
        return {name: _value(item, Any, calls, f"{key}.{name}") for name, item in value.items()}
    if isinstance(value, torch.dtype):
        return _imported(str(value))
    if id(value) in calls:
        return _call_node(calls[id(value)], calls, key)
    if isinstance(value, type) or inspect.isroutine(value):
        try:
            return _imported(path_of(value))
        except BindError as error:
            raise BindError(f"{key}: {error}") from None
    raise BindError(
        f"{key}: the default {value!r:.80} cannot be written to conf.yaml. Write it in the signature as a "
        f"constructor call, like `{key.rpartition('.')[2]}: {type(value).__name__} = {type(value).__name__}(...)`"
    )


def _restored(plain: Any, hint: Any, value: Any) -> bool:
    """Whether loading turns `plain` back into exactly `value` because of the annotation."""
    if hint in (Any, MISSING):
        return False
    try:
        again = convert(plain, hint)
    except TypeError:
        return False
    return type(again) is type(value) and bool(again == value)


def _imported(path: str) -> Node:
    return {"_target_": "hydra_zen.funcs.get_obj", "path": path}


def _merge(old: CommentedMap, new: Node, key: str, changes: Changes) -> None:
    """Bring a mapping of the file up to date with the code, in place, so that comments stay where they are."""
    for name, value in new.items():
        here = f"{key}.{name}".lstrip(".")
        if name not in old:
            old[name] = _quoted(value)
            changes.added.append(here)
        elif _is_node(value) and isinstance(old[name], CommentedMap):
            if old[name].get("_target_") == value["_target_"]:
                _merge(old[name], value, here, changes)
            else:
                changes.kept.append(f"{here}._target_")  # another class: its arguments are the user's
        elif old[name] != value:
            changes.kept.append(here)
    open_ended = "_target_" in new and _takes_any_keyword(new["_target_"])
    for name in [name for name in old if name not in new]:
        if not open_ended and not str(name).startswith("_"):
            del old[name]
            changes.dropped.append(f"{key}.{name}".lstrip("."))


def _takes_any_keyword(path: str) -> bool:
    return any(item.kind is inspect.Parameter.VAR_KEYWORD for item in parameters(object_at(path)) or [])


def _is_node(value: Any) -> bool:
    return isinstance(value, dict) and "_target_" in value


def _quoted(value: Any) -> Any:
    """Ready for the YAML writer: strings that YAML 1.1 would read as something else get quotes."""
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
