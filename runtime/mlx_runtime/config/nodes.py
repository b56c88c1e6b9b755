"""Constructors → nodes: all defaults of an experiment as the plain data that conf.yaml holds."""

import enum
import functools
import inspect
import typing
from pathlib import Path, PurePath
from typing import Any

import torch
import torch.utils.data

from mlx_runtime.config.declarations import Declaration
from mlx_runtime.config.expressions import Call, Recording, recorded_constant, recorded_default
from mlx_runtime.config.literals import Node, builtin, imported, refuse_reserved, restores, scalar
from mlx_runtime.config.signatures import (
    MISSING,
    Parameter,
    base_of,
    groups,
    is_factory,
    parameters,
    signature_of,
)
from mlx_runtime.config.targets import object_at, path_of
from mlx_runtime.errors import BindError, short_message

DUMMY_PARAMS = [torch.nn.Parameter(torch.zeros(1))]
"""Placeholder in `adam: Adam = Adam(DUMMY_PARAMS)`; a run passes the parameters of the mapped models instead."""

BASES = (
    torch.nn.Module,
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
    torch.utils.data.Dataset,
    torch.utils.data.IterableDataset,
    torch.Tensor,
    object,
)
"""An annotation with one of these accepts any subclass, so it does not describe an object."""

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class Description:
    """An experiment as nodes.

    Attributes:
        tree: nodes by the groups of the constructor: `cfg`, `models`, `datasets`, …
        notices: what the user should know, one line each.
    """

    def __init__(self, experiment: type) -> None:
        self.notices: list[str] = []
        self._home = experiment.__module__
        self._open: list[type] = []
        self._owners: dict[int, tuple[str, tuple[str, str], Any]] = {}
        self.tree = {name: self._group(cls, name) for name, cls in groups(experiment).items()}
        settings = self._constructor(base_of(experiment), "cfg")  # its own class may lack what the runtime reads
        self.tree["cfg"] |= {name: value for name, value in settings.items() if name not in self.tree["cfg"]}

    def of_class(self, path: str, key: str) -> Node | None:
        """Return the node of the class or function at a path with all its defaults; None if it cannot be imported."""
        try:
            target = object_at(path)
        except (ImportError, AttributeError):
            return None
        return self._constructor(target, key, path)

    def _group(self, cls: type, key: str) -> Node:
        _refuse_untyped(cls, key)
        node = self._constructor(cls, key)
        if key in ("losses", "metrics"):
            self.notices += _unrecorded(node, key)
        return node

    def _constructor(self, target: Any, key: str, path: str | None = None) -> Node:
        """Return the node of `target()` with all defaults written out; `path` overrides its own."""
        path = path or path_of(target)
        node: Node = {"_target_": path}
        for parameter in parameters(target) or []:
            if parameter.kind in _VARIADIC:
                continue
            value = self._default(target, path, parameter, f"{key}.{parameter.name}")
            if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
                node.setdefault("_args_", []).append(value)
            else:
                node[parameter.name] = value
        return node

    def _call(self, call: Call, recording: Recording, key: str) -> Node:
        """Return the node of a recorded call: its arguments, then the defaults of the others."""
        with recording.before(call):
            if call.function is functools.partial:
                inner = Call(call.args[0], call.args[1:], call.kwargs, call.result)
                path = _path(inner.function, recording, key)
                return {"_target_": path, "_partial_": True, **self._arguments(inner, recording, key)}
            path = _path(call.function, recording, key)
            signature = signature_of(call.function)
            try:
                bound = signature.bind(*call.args, **call.kwargs).arguments if signature else None
            except TypeError:  # the call succeeded, so this is not the signature of what was called
                bound = None
            if bound is None:
                return {"_target_": path, **self._arguments(call, recording, key)}
            return self._bound(call.function, path, bound, recording, key)

    def _bound(self, function: Any, path: str, bound: dict[str, Any], recording: Recording, key: str) -> Node:
        """Return the node of a call whose arguments are bound to the parameters of its signature."""
        items = parameters(function) or []
        node: Node = {"_target_": path}
        positional: list[Any] = []
        starred = any(item.kind is inspect.Parameter.VAR_POSITIONAL and bound.get(item.name) for item in items)
        for item in items:
            here = f"{key}.{item.name}"
            if item.kind is inspect.Parameter.VAR_POSITIONAL:
                positional += [self._value(value, Any, recording, here) for value in bound.get(item.name, ())]
            elif item.kind is inspect.Parameter.VAR_KEYWORD:
                for name, value in bound.get(item.name, {}).items():
                    refuse_reserved(name, f"{key}.{name}", "an argument")
                    node[name] = self._value(value, item.hint, recording, f"{key}.{name}")
            else:
                if item.name in bound:
                    self._inspect(path, item, here)
                    value = self._value(bound[item.name], item.hint, recording, here)
                else:
                    value = self._default(function, path, item, here)
                before_star = starred and item.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
                if item.kind is inspect.Parameter.POSITIONAL_ONLY or before_star:
                    positional.append(value)
                else:
                    node[item.name] = value
        return {**node, "_args_": positional} if positional else node

    def _arguments(self, call: Call, recording: Recording, key: str) -> Node:
        """Return the arguments of a call as they were passed, without defaults."""
        node = {name: self._value(value, Any, recording, f"{key}.{name}") for name, value in call.kwargs.items()}
        if call.args:
            items = enumerate(call.args)
            node["_args_"] = [self._value(value, Any, recording, f"{key}[{index}]") for index, value in items]
        return node

    def _default(self, target: Any, path: str, parameter: Parameter, key: str) -> Any:
        """Return a parameter's default as YAML. Its expression is read only if the value does not say enough."""
        self._inspect(path, parameter, key)
        if parameter.default is MISSING:
            return self._described_type(parameter.hint, key)
        try:
            try:
                return self._value(parameter.default, parameter.hint, Recording(), key)
            except BindError:
                recorded = recorded_default(target, parameter.name)
                if recorded is None:
                    raise
                value, recording = recorded
                return self._value(value, parameter.hint, recording, key)
        except BindError:
            raise
        except Exception as error:  # of a signature, an `__eq__`, or an expression that cannot be evaluated again
            why = f"{type(error).__name__}: {short_message(error)}"
            raise BindError(f"{key}: its default cannot be read: {why}") from error

    def _inspect(self, path: str, parameter: Parameter, key: str) -> None:
        """Refuse reserved names; report missing types in user code and objects shared by two defaults."""
        refuse_reserved(parameter.name, key, "an argument")
        if parameter.hint is MISSING and path.startswith("src."):
            self.notices.append(f"{key} has no type, so its value cannot be checked")
        default = parameter.default
        if is_factory(default):
            return
        if isinstance(default, torch.nn.Module) or (hasattr(default, "__dict__") and not callable(default)):
            here = (path, parameter.name)  # a class that is used twice has its own default twice
            owner = self._owners.setdefault(id(default), (key, here, default))
            if owner[1] != here:
                self.notices.append(f"{key} shares its default with {owner[0]}; in a run they are two objects")

    def _described_type(self, hint: Any, key: str) -> Any:
        """Return the value of a parameter without a default: the node of its class if that has one, else `???`."""
        if not _describes_itself(hint) or hint in self._open:
            return "???"
        self._open.append(hint)  # nodes of a tree that take nodes would never end
        try:
            return self._constructor(hint, key)
        except BindError as error:
            if str(error).startswith(key):
                raise
            return "???"  # not a class that can be imported
        finally:
            self._open.pop()

    def _value(self, value: Any, hint: Any, recording: Recording, key: str) -> Any:
        """Return a value as YAML, or raise a BindError that names the key. Constants of `src` are written as made."""
        try:
            return self._written(value, hint, recording, key)
        except BindError:
            constant = recorded_constant(value, self._home)
            if constant is None or constant[0] is value:
                raise
            return self._written(constant[0], hint, constant[1], key)

    def _written(self, value: Any, hint: Any, recording: Recording, key: str) -> Any:
        if value is DUMMY_PARAMS:
            return "???"
        if value is None or type(value) in (bool, int, float, str):
            return scalar(value, key)
        if isinstance(value, Declaration):
            return self._call(Call(value.target, value.args, value.kwargs, value), recording, key)
        if isinstance(value, enum.Enum):
            short = restores(value.name, hint, value)
            return value.name if short else imported(f"{path_of(type(value))}.{value.name}", value, key)
        if isinstance(value, Path) and restores(str(value), hint, value):
            return str(value)
        if type(value) in (list, tuple, dict):
            return self._container(value, hint, recording, key)
        if isinstance(value, torch.dtype):
            return imported(str(value), value, key)
        if (call := recording.call_of(value)) is not None:
            return self._call(call, recording, key)
        if isinstance(value, type) or inspect.isroutine(value):
            return imported(_path(value, recording, key), value, key)
        if (path := recording.name_of(value)) and path.partition(".")[0] != self._home.partition(".")[0]:
            return imported(path, value, key)  # a constant of a library, like datetime.timezone.utc
        if type(value) in (set, frozenset):
            items = [self._value(item, Any, Recording(), key) for item in sorted(value, key=repr)]
            return {"_target_": f"builtins.{type(value).__name__}", "_args_": [items]}
        return builtin(value, key)

    def _container(self, value: Any, hint: Any, recording: Recording, key: str) -> Any:
        if type(value) is dict:
            for name in value:
                if type(name) not in (str, int, float, bool):
                    raise BindError(f"{key}: a dictionary key {name!r} cannot be written to conf.yaml; use a string")
                refuse_reserved(name, key, "a dictionary key")
            return {name: self._value(item, Any, recording, f"{key}.{name}") for name, item in value.items()}
        items = [self._value(item, Any, recording, f"{key}[{index}]") for index, item in enumerate(value)]
        if type(value) is list or restores(items, hint, value):
            return items
        return {"_target_": "builtins.tuple", "_args_": [items]}


def _refuse_untyped(cls: type, key: str) -> None:
    """Refuse members of a group without an annotation, which dataclasses leave out of their constructor."""
    annotated = inspect.get_annotations(cls)
    for name, value in vars(cls).items():
        if name.startswith("_") or name == "map_params_to_optimizers" or name in annotated:
            continue
        code = isinstance(value, type | property | classmethod | staticmethod) or inspect.isroutine(value)
        if not code and type(value) not in (bool, int, float, str, tuple, list, dict):
            kind = (value.target if isinstance(value, Declaration) else type(value)).__name__
            raise BindError(f"{key}.{name} has no type, so it would be left out; write {name}: {kind} = ...")


def _unrecorded(group: Node, key: str) -> list[str]:
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
    """Return True if an annotation is a class that conf.yaml can spell out, unlike `int`, `Path` or a base class."""
    if not isinstance(hint, type) or typing.get_args(hint) or hint in BASES or inspect.isabstract(hint):
        return False
    if hint.__module__ == "builtins" or issubclass(hint, PurePath | enum.Enum):
        return False
    if issubclass(hint, int | float | str | bytes | tuple | list | dict | set | frozenset):
        return False
    return not getattr(hint, "_is_protocol", False) and parameters(hint) is not None


def _path(thing: Any, recording: Recording, key: str) -> str:
    """Return the path of a class or function, or else the name by which the default's expression called it."""
    try:
        return path_of(thing)
    except BindError as error:
        path = recording.name_of(thing)
        if path is None:
            raise BindError(f"{key}: {error}") from None
        return path
