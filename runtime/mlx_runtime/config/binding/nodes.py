"""Constructors → nodes: all defaults of an experiment as plain data for conf.yaml."""

import enum
import functools
import inspect
import typing
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
import torch.utils.data

from mlx_runtime.config.binding.equality import unlike
from mlx_runtime.config.binding.expressions import Call, Recording, record_constant, record_default
from mlx_runtime.config.building import DUMMY_PARAMS
from mlx_runtime.config.constructors.declarations import Declaration, is_jax_array, is_nnx
from mlx_runtime.config.constructors.signatures import (
    MISSING,
    PASSED,
    base_of,
    convert,
    groups,
    is_factory,
    parameters,
)
from mlx_runtime.config.constructors.targets import import_problem, object_at, path_of
from mlx_runtime.config.interpolation import escape
from mlx_runtime.errors import BindError, short_message
from mlx_runtime.sections import Section

Node = dict[str, Any]
"""A mapping with `_target_`, the class or function to call, and its arguments, as Hydra's `instantiate` takes it."""

RESERVED = {"_target_", "_args_", "_partial_", "_recursive_", "_convert_"}
"""Keys with a special meaning in a node."""

GET_OBJ = "hydra_zen.funcs.get_obj"
"""Target of a node that is a class, function or constant itself."""

BASES = (
    torch.nn.Module,
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
    torch.utils.data.Dataset,
    torch.utils.data.IterableDataset,
    torch.Tensor,
    object,
)
"""Base classes whose annotation accepts any subclass, so that it does not describe an object."""


class Description:
    """An experiment as nodes, by the groups of its constructor (`cfg`, `models`, …), with notices for the user.

    `defaults` contains the default and the type of each member of a group, by full key.
    """

    def __init__(self, experiment: type) -> None:
        self.tree: dict[str, Node] = {}
        self.defaults: dict[str, tuple[Any, Any]] = {}
        self.notices: list[str] = []
        self._home = experiment.__module__
        self._open: list[type] = []
        self._owners: dict[int, tuple[str, tuple[str, str], Any]] = {}
        for name, cls in groups(experiment).items():
            _refuse_untyped(cls, name)
            self.tree[name] = self._node(cls, path_of(cls), {}, Recording(), name)
            if name in ("losses", "metrics"):
                self.notices += _unrecorded_notices(self.tree[name], name)
        base = base_of(experiment)
        settings = self._node(base, path_of(base), {}, Recording(), "cfg")  # the user's class may lack some
        self.tree["cfg"] |= {name: value for name, value in settings.items() if name not in self.tree["cfg"]}

    def of_class(self, path: str, key: str) -> Node:
        """Return the node of the class or function at a path, with all defaults."""
        if not isinstance(path, str):
            raise BindError("it is not the dotted path of a class or function")
        try:
            target = object_at(path)
        except (ImportError, AttributeError) as error:
            raise BindError(f"it {import_problem(error)}") from error
        return self._node(target, path, {}, Recording(), key)

    def _call(self, call: Call, recording: Recording, key: str) -> Node:
        """Return the node of a recorded call: its arguments, then the defaults of the others."""
        function, args = call.function, call.args
        if partial := function is functools.partial:
            function, args = args[0], args[1:]
        with recording.before(call):
            path = _path(function, recording, key)
            items = None if partial else parameters(function)
            try:
                bound = None if items is None else inspect.Signature(items).bind(*args, **call.kwargs)
            except TypeError:  # the call succeeded, so the signature is wrong
                bound = None
            if bound is not None:
                return self._node(function, path, bound.arguments, recording, key)
            node: Node = {"_target_": path} | ({"_partial_": True} if partial else {})  # arguments without defaults
            node |= {name: self._value(item, Any, recording, f"{key}.{name}") for name, item in call.kwargs.items()}
            positional = [self._value(item, Any, recording, f"{key}[{index}]") for index, item in enumerate(args)]
            return {**node, "_args_": positional} if positional else node

    def _node(self, target: Any, path: str, given: Mapping[str, Any], recording: Recording, key: str) -> Node:
        """Return the node of a call, with the defaults of the parameters for which no argument was given."""
        node: Node = {"_target_": path}
        positional: list[Any] = []
        items = parameters(target) or []
        starred = any(item.kind is item.VAR_POSITIONAL and given.get(item.name) for item in items)
        for item in items:
            here = f"{key}.{item.name}"
            if item.kind is item.VAR_POSITIONAL:
                positional += [self._value(value, Any, recording, here) for value in given.get(item.name, ())]
            elif item.kind is item.VAR_KEYWORD:
                for name, value in given.get(item.name, {}).items():
                    _refuse_reserved(name, f"{key}.{name}", "an argument")
                    node[name] = self._value(value, item.annotation, recording, f"{key}.{name}")
            else:
                self._inspect(path, item, here)
                if item.name in given:
                    value = self._value(given[item.name], item.annotation, recording, here)
                elif item.default is PASSED:
                    continue
                elif item.default is MISSING or path.partition(".")[0] == self._home.partition(".")[0]:
                    value = self._default(target, item, here)
                else:  # of a library, whose other defaults stay what they are
                    try:
                        value = self._default(target, item, here)
                    except BindError:
                        continue
                    if is_nnx(target) and isinstance(value, dict) and value.get("_target_") == GET_OBJ:
                        continue  # the functions and types that its layers share
                if item.kind is item.POSITIONAL_ONLY or (starred and item.kind is item.POSITIONAL_OR_KEYWORD):
                    positional.append(value)
                else:
                    node[item.name] = value
        return {**node, "_args_": positional} if positional else node

    def _default(self, target: Any, parameter: inspect.Parameter, key: str) -> Any:
        """Return a parameter's default as YAML. Its expression is read only if the value alone is not enough."""
        default, hint = parameter.default, parameter.annotation
        if default is MISSING:
            return self._described_type(hint, key)
        try:
            try:
                value = self._value(default, hint, Recording(), key)
            except BindError:
                recorded = record_default(target, parameter.name)
                if recorded is None:
                    raise
                value = self._value(recorded[0], hint, recorded[1], key)
                default = recorded[0] if is_factory(default) else default
        except BindError:
            raise
        except Exception as error:  # from a signature, an `__eq__`, or an expression that cannot be evaluated again
            why = f"{type(error).__name__}: {short_message(error)}"
            raise BindError(f"{key}: its default cannot be read: {why}") from error
        if key.count(".") == 1:
            self.defaults.setdefault(key, (default, hint))
        return value

    def _inspect(self, path: str, parameter: inspect.Parameter, key: str) -> None:
        """Refuse reserved names; report missing types in user code and objects shared by two defaults."""
        _refuse_reserved(parameter.name, key, "an argument")
        if parameter.annotation is MISSING and path.startswith("src."):
            self.notices.append(f"{key} has no type, so its value cannot be checked")
        default = parameter.default
        if is_factory(default) or isinstance(default, Section):
            return
        made = isinstance(default, torch.nn.Module | Declaration)
        if made or (hasattr(default, "__dict__") and not callable(default)):
            here = (path, parameter.name)  # a class that is used twice has the same default twice
            owner = self._owners.setdefault(id(default), (key, here, default))
            if owner[1] != here:
                self.notices.append(f"{key} shares its default with {owner[0]}; in a run they are two objects")

    def _described_type(self, hint: Any, key: str) -> Any:
        """Return the value of a parameter without a default: the node of its class, or `???` if it has none."""
        if not _describes_itself(hint) or hint in self._open:
            return "???"
        try:
            path = path_of(hint)
        except BindError:
            return "???"
        self._open.append(hint)  # classes that take objects of their own class would never end
        node = self._node(hint, path, {}, Recording(), key)
        self._open.pop()
        return node

    def _value(self, value: Any, hint: Any, recording: Recording, key: str) -> Any:
        """Return a value as YAML, or raise a BindError with the key. Constants of `src` are written as calls."""
        try:
            return self._write_value(value, hint, recording, key)
        except BindError:
            constant = record_constant(value, self._home)
            if constant is None or constant[0] is value:
                raise
            return self._write_value(constant[0], hint, constant[1], key)

    def _write_value(self, value: Any, hint: Any, recording: Recording, key: str) -> Any:
        if value is DUMMY_PARAMS:
            return "???"
        if is_jax_array(value):
            raise BindError(f"{key}: JAX computes this array while src is imported; compute it in a function instead")
        if type(value) is str:
            if value == "???":
                raise BindError(f"{key}: the default '???' means a missing value in conf.yaml; choose another")
            return escape(value)
        if value is None or type(value) in (bool, int, float):
            return value
        if isinstance(value, Declaration):
            return self._call(Call(value.target, value.args, value.kwargs, value), recording, key)
        if isinstance(value, enum.Enum):
            short = _restores(value.name, hint, value)
            return value.name if short else _import_node(f"{path_of(type(value))}.{value.name}", value, key)
        if isinstance(value, Path) and _restores(str(value), hint, value):
            return str(value)
        if type(value) is dict:
            for name in value:
                if type(name) not in (str, int, float, bool):
                    raise BindError(f"{key}: a dictionary key {name!r} cannot be written to conf.yaml; use a string")
                _refuse_reserved(name, key, "a dictionary key")
            return {name: self._value(item, Any, recording, f"{key}.{name}") for name, item in value.items()}
        if type(value) in (list, tuple):
            items = [self._value(item, Any, recording, f"{key}[{index}]") for index, item in enumerate(value)]
            plain = type(value) is list or _restores(items, hint, value)
            return items if plain else {"_target_": "builtins.tuple", "_args_": [items]}
        if isinstance(value, torch.dtype):
            return _import_node(str(value), value, key)
        if id(value) in recording.calls:
            return self._call(recording.calls[id(value)], recording, key)
        if isinstance(value, type) or inspect.isroutine(value):
            return _import_node(_path(value, recording, key), value, key)
        if (path := recording.name_of(value)) and path.partition(".")[0] != self._home.partition(".")[0]:
            return _import_node(path, value, key)  # a constant of a library, like datetime.timezone.utc
        if type(value) in (set, frozenset):
            items = [self._value(item, Any, Recording(), key) for item in sorted(value, key=repr)]
            return {"_target_": f"builtins.{type(value).__name__}", "_args_": [items]}
        if isinstance(value, np.generic) and type(value.item()) in (bool, int, float, str):
            return {"_target_": path_of(type(value)), "_args_": [value.item()]}
        name, kind = key.rpartition(".")[2], type(value).__name__
        raise BindError(
            f"{key}: the default {value!r:.80} cannot be written to conf.yaml. "
            f"Write it in the signature as a constructor call, like `{name}: {kind} = {kind}(...)`"
        )


def _refuse_reserved(name: Any, key: str, kind: str) -> None:
    if name in RESERVED:
        raise BindError(f"{key}: {kind} cannot be named {name}, which is reserved in conf.yaml")


def _refuse_untyped(cls: type, key: str) -> None:
    """Refuse members of a group without an annotation, because dataclasses leave them out of the constructor."""
    annotated = inspect.get_annotations(cls)
    for name, value in vars(cls).items():
        if name.startswith("_") or name == "map_params_to_optimizers" or name in annotated:
            continue
        code = isinstance(value, type | property | classmethod | staticmethod) or inspect.isroutine(value)
        if not code and type(value) not in (bool, int, float, str, tuple, list, dict):
            kind = (value.target if isinstance(value, Declaration) else type(value)).__name__
            raise BindError(f"{key}.{name} has no type, so it would be left out; write {name}: {kind} = ...")


def _unrecorded_notices(group: Node, key: str) -> list[str]:
    """Return a notice for each member of `Losses` or `Metrics` whose values are not recorded automatically."""
    from torchmetrics import Metric, MetricCollection

    notices = []
    for name, value in group.items():
        path = value.get("_target_") if isinstance(value, dict) and "_partial_" not in value else None
        target = object_at(path) if path else None
        if isinstance(target, type) and not issubclass(target, Metric | MetricCollection):
            notices.append(
                f"{key}.{name} is a {target.__name__}, not a TorchMetrics Metric, so its values are not recorded; "
                f'record them with self.log({{"train/{name}": value}}), or average them in a MeanMetric of Metrics'
            )
    return notices


def _describes_itself(hint: Any) -> bool:
    """Return True if an annotation is a class with a node in conf.yaml, unlike `int`, `Path` or a base class."""
    if not isinstance(hint, type) or typing.get_args(hint) or hint in (MISSING, *BASES) or inspect.isabstract(hint):
        return False
    if hint.__module__ == "builtins" or getattr(hint, "_is_protocol", False):
        return False
    plain = (PurePath, enum.Enum, int, float, str, bytes, tuple, list, dict, set, frozenset)
    return not issubclass(hint, plain) and parameters(hint) is not None


def _path(thing: Any, recording: Recording, key: str) -> str:
    """Return the path of a class or function, or else its name in the default's expression."""
    try:
        return path_of(thing)
    except BindError as error:
        path = recording.name_of(thing)
        if path is None:
            raise BindError(f"{key}: {error}") from None
        return path


def _import_node(path: str, value: Any, key: str) -> Node:
    """Return the node of a class, function or constant itself, as hydra-zen writes it."""
    try:
        there = object_at(path)
    except (ImportError, AttributeError):
        there = None
    if there is not value and not (inspect.ismethod(value) and there == value):
        raise BindError(f"{key}: {value!r} cannot be imported as {path}; give it a name at the top level of a module")
    return {"_target_": GET_OBJ, "path": path}


def _restores(text: Any, hint: Any, value: Any) -> bool:
    """Return True if loading converts `text` back to exactly `value` because of the annotation."""
    if hint in (Any, MISSING):
        return False
    try:
        converted = convert(text, hint)
    except TypeError:
        return False
    return unlike(value, lambda: converted) is None
