"""Constructors → nodes: every default of an experiment, as the plain data that conf.yaml holds.

A *node* is a mapping with `_target_` (the class or function to call) and its arguments, in the language of Hydra's
`instantiate`. Values are plain YAML; what is not plain is a node again. What no YAML can say is refused by key.
"""

import enum
import functools
import inspect
import re
import typing
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
import torch.utils.data

from mlx_runtime.config import base_of
from mlx_runtime.declarations import Declaration
from mlx_runtime.errors import BindError, first_line
from mlx_runtime.signatures import (
    MISSING,
    Call,
    Calls,
    Parameter,
    convert,
    groups,
    is_factory,
    object_at,
    parameters,
    path_of,
    recorded_constant,
    recorded_default,
    signature_of,
)

DUMMY_PARAMS = [torch.nn.Parameter(torch.zeros(1))]
"""Stands for the parameters in `adam: Adam = Adam(DUMMY_PARAMS)`; at run time the mapped models' take its place."""

RESERVED = {"_target_", "_args_", "_partial_", "_recursive_", "_convert_"}

BASES = (
    torch.nn.Module,
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
    torch.utils.data.Dataset,
    torch.utils.data.IterableDataset,
    torch.Tensor,
    object,
)
"""An annotation with one of these says that any class below it will do."""

Node = dict[str, Any]


class Description:
    """An experiment as nodes.

    Attributes:
        tree: by the groups of its constructor: `cfg`, `models`, `datasets`, …
        notices: what a person should know, one line each.
    """

    def __init__(self, experiment: type) -> None:
        self.notices: list[str] = []
        self._home = experiment.__module__
        self._open: list[type] = []
        self._keys_of: dict[int, tuple[str, tuple[str, str], Any]] = {}
        self.tree = {name: self._group(cls, name) for name, cls in groups(experiment).items()}
        settings = self._constructor(base_of(experiment), "cfg")  # its class may lack what the runtime reads
        self.tree["cfg"] |= {name: value for name, value in settings.items() if name not in self.tree["cfg"]}

    def of_class(self, path: str, key: str) -> Node | None:
        """The node of a class or function by its path, all defaults; None when it cannot be imported."""
        try:
            target = object_at(path)
        except (ImportError, AttributeError):
            return None
        return self._constructor(target, key, path)

    def _group(self, cls: type, key: str) -> Node:
        for name, value in vars(cls).items():
            declared = (
                name.startswith("_") or name == "map_params_to_optimizers" or name in inspect.get_annotations(cls)
            )
            plain = isinstance(value, type | property | classmethod | staticmethod) or inspect.isroutine(value)
            if not declared and not plain and type(value) not in (bool, int, float, str, tuple, list, dict):
                kind = (value.target if isinstance(value, Declaration) else type(value)).__name__
                raise BindError(f"{key}.{name} has no type, so it would be left out; write {name}: {kind} = ...")
        node = self._constructor(cls, key)
        if key in ("losses", "metrics"):
            self._look_for_unrecorded(node, key)
        return node

    def _look_for_unrecorded(self, group: Node, key: str) -> None:
        """Notice members of `Losses` and `Metrics` that have no value over all rows of all workers to record."""
        from torchmetrics import Metric, MetricCollection

        for name, value in group.items():
            path = value.get("_target_") if isinstance(value, dict) and "_partial_" not in value else None
            target = object_at(path) if path else None
            if isinstance(target, type) and not issubclass(target, Metric | MetricCollection):
                self.notices.append(
                    f"{key}.{name} is a {target.__name__}, not a TorchMetrics Metric, so its values are not recorded; "
                    f'record them with self.log({{"train/{name}": value}}), or average them in a MeanMetric of Metrics'
                )

    def _constructor(self, target: Any, key: str, path: str | None = None) -> Node:
        """A node for `target()` with every default written out.

        Args:
            target: a class or function.
            key: of the node.
            path: that leads to the target; None means where it says it lives.
        """
        path = path or path_of(target)
        node: Node = {"_target_": path}
        for parameter in parameters(target) or []:
            here = f"{key}.{parameter.name}"
            if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
                continue
            self._look_at(path, parameter, here)
            value = self._default(target, parameter, here)
            if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
                node.setdefault("_args_", []).append(value)
            else:
                node[parameter.name] = value
        return node

    def _look_at(self, path: str, parameter: Parameter, key: str) -> None:
        """Notice what will surprise: no type in the user's own code, one object shared by two defaults."""
        if parameter.name in RESERVED:
            raise BindError(f"{key}: an argument cannot be named {parameter.name}; conf.yaml uses that word itself")
        if parameter.hint is MISSING and path.startswith("src."):
            self.notices.append(f"{key} has no type, so its value cannot be checked")
        default = parameter.default
        if is_factory(default):
            return
        if isinstance(default, torch.nn.Module) or (hasattr(default, "__dict__") and not callable(default)):
            here = (path, parameter.name)  # a class that is used twice shows its own default twice
            known = self._keys_of.setdefault(id(default), (key, here, default))
            if known[1] != here:
                self.notices.append(f"{key} shares its default with {known[0]}; in a run they are two objects")

    def _call(self, call: Call, calls: Calls, key: str) -> Node:
        """A node for one recorded call: the arguments given, then the defaults of the others."""
        with calls.inside(call):
            return self._described(call, calls, key)

    def _described(self, call: Call, calls: Calls, key: str) -> Node:
        if call.function is functools.partial:
            inner = Call(call.args[0], call.args[1:], call.kwargs, call.result)
            return {
                "_target_": _path(inner.function, calls, key),
                "_partial_": True,
                **self._given(inner, calls, key),
            }
        path = _path(call.function, calls, key)
        node: Node = {"_target_": path}
        known = parameters(call.function)
        signature = signature_of(call.function)
        if known is None or signature is None:  # a C type that does not tell its parameters
            return node | self._given(call, calls, key)
        try:
            bound = signature.bind(*call.args, **call.kwargs).arguments
        except TypeError:  # the call went well, so the signature is not that of what is called
            return node | self._given(call, calls, key)
        positional: list[Any] = []
        variadic = any(item.kind is inspect.Parameter.VAR_POSITIONAL and bound.get(item.name) for item in known)
        for item in known:
            here = f"{key}.{item.name}"
            if item.kind is inspect.Parameter.VAR_POSITIONAL:
                positional += [self._value(value, Any, calls, here) for value in bound.get(item.name, ())]
                continue
            if item.kind is inspect.Parameter.VAR_KEYWORD:
                for name, value in bound.get(item.name, {}).items():
                    if name in RESERVED:
                        raise BindError(f"{here}: an argument cannot be named {name}; conf.yaml uses that word itself")
                    node[name] = self._value(value, item.hint, calls, f"{key}.{name}")
                continue
            self._look_at(path, item, here)
            if item.name in bound:
                value = self._value(bound[item.name], item.hint, calls, here)
            else:
                value = self._default(call.function, item, here)
            before_star = variadic and item.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
            if item.kind is inspect.Parameter.POSITIONAL_ONLY or before_star:
                positional.append(value)
            else:
                node[item.name] = value
        return {**node, "_args_": positional} if positional else node

    def _given(self, call: Call, calls: Calls, key: str) -> Node:
        """The arguments of a call as they were given, without defaults."""
        node = {name: self._value(value, Any, calls, f"{key}.{name}") for name, value in call.kwargs.items()}
        if call.args:
            node["_args_"] = [
                self._value(value, Any, calls, f"{key}[{index}]") for index, value in enumerate(call.args)
            ]
        return node

    def _default(self, target: Any, parameter: Parameter, key: str) -> Any:
        """The default of one parameter as YAML; its expression is only read when the value does not say enough."""
        if parameter.default is MISSING:
            return self._of_type(parameter.hint, key)
        try:
            try:
                return self._value(parameter.default, parameter.hint, Calls(), key)
            except BindError:
                recorded = recorded_default(target, parameter.name)
                if recorded is None:
                    raise
                value, calls = recorded
                return self._value(value, parameter.hint, calls, key)
        except BindError:
            raise
        except Exception as error:  # of a signature, an `__eq__` or an expression that cannot be evaluated again
            raise BindError(
                f"{key}: its default cannot be read: {type(error).__name__}: {first_line(error)}"
            ) from error

    def _of_type(self, hint: Any, key: str) -> Any:
        """An argument without a default: a class to make objects of with its own defaults, else `???`."""
        if not _describes_itself(hint) or hint in self._open:
            return "???"
        self._open.append(hint)  # a tree whose nodes take nodes would have no end
        try:
            return self._constructor(hint, key)
        except BindError as error:
            if str(error).startswith(key):
                raise
            return "???"  # not a class that can be imported
        finally:
            self._open.pop()

    def _value(self, value: Any, hint: Any, calls: Calls, key: str) -> Any:
        """One value as YAML, or a BindError that names the key. A constant of the user's is written as it was made."""
        try:
            return self._written(value, hint, calls, key)
        except BindError:
            constant = recorded_constant(value, self._home)
            if constant is None or constant[0] is value:
                raise
            return self._written(constant[0], hint, constant[1], key)

    def _written(self, value: Any, hint: Any, calls: Calls, key: str) -> Any:
        if value is DUMMY_PARAMS:
            return "???"
        if value is None or type(value) in (bool, int, float, str):
            return self._scalar(value, key)
        if isinstance(value, Declaration):
            return self._call(Call(value.target, value.args, value.kwargs, value), calls, key)
        if isinstance(value, enum.Enum):
            if _restored(value.name, hint, value):
                return value.name
            return _imported(f"{path_of(type(value))}.{value.name}", value, key)
        if isinstance(value, Path) and _restored(str(value), hint, value):
            return str(value)
        if type(value) in (list, tuple):
            items = [self._value(item, Any, calls, f"{key}[{index}]") for index, item in enumerate(value)]
            if type(value) is list or _restored(items, hint, value):
                return items
            return {"_target_": "builtins.tuple", "_args_": [items]}
        if type(value) is dict:
            return self._mapping(value, calls, key)
        if isinstance(value, torch.dtype):
            return _imported(str(value), value, key)
        if (call := calls.of(value)) is not None:
            return self._call(call, calls, key)
        if isinstance(value, type) or inspect.isroutine(value):
            return _imported(_path(value, calls, key), value, key)
        if (path := calls.path_of(value)) and path.partition(".")[0] != self._home.partition(".")[0]:
            return _imported(path, value, key)  # a constant of a library, like datetime.timezone.utc
        return self._builtin(value, key)

    def _scalar(self, value: Any, key: str) -> Any:
        if value == "???":
            raise BindError(f"{key}: the default '???' means a missing value in conf.yaml; choose another")
        if isinstance(value, str):  # not to be read as an interpolation: \${, and each backslash before it twice
            return re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + "\\${", value)
        return value

    def _mapping(self, value: dict[Any, Any], calls: Calls, key: str) -> Node:
        for name in value:
            if type(name) not in (str, int, float, bool):
                raise BindError(f"{key}: a dictionary key {name!r} cannot be written to conf.yaml; use a string")
            if name in RESERVED:
                raise BindError(f"{key}: a dictionary key cannot be {name!r}; conf.yaml uses that word itself")
        return {name: self._value(item, Any, calls, f"{key}.{name}") for name, item in value.items()}

    def _builtin(self, value: Any, key: str) -> Node:
        """Plain values that YAML has no word for."""
        if type(value) in (set, frozenset):
            items = [self._value(item, Any, Calls(), key) for item in sorted(value, key=repr)]
            return {"_target_": f"builtins.{type(value).__name__}", "_args_": [items]}
        if type(value) is bytes:
            return {"_target_": "builtins.bytes.fromhex", "_args_": [value.hex()]}
        if type(value) is complex:
            return {"_target_": "builtins.complex", "_args_": [value.real, value.imag]}
        if isinstance(value, np.generic) and type(value.item()) in (bool, int, float, str):
            return {"_target_": path_of(type(value)), "_args_": [value.item()]}
        name = key.rpartition(".")[2]
        raise BindError(
            f"{key}: the default {value!r:.80} cannot be written to conf.yaml. Write it in the signature as a "
            f"constructor call, like `{name}: {type(value).__name__} = {type(value).__name__}(...)`"
        )


def _describes_itself(hint: Any) -> bool:
    """Whether an annotation names a class that conf.yaml can spell out, unlike `int`, `Path` or a base class."""
    if not isinstance(hint, type) or typing.get_args(hint) or hint in BASES or inspect.isabstract(hint):
        return False
    plain = issubclass(
        hint, bool | int | float | str | bytes | tuple | list | dict | set | frozenset | PurePath | enum.Enum
    )
    protocol = getattr(hint, "_is_protocol", False)
    return not (plain or protocol or hint.__module__ == "builtins" or parameters(hint) is None)


def _restored(plain: Any, hint: Any, value: Any) -> bool:
    """Whether loading turns `plain` back into exactly `value` because of the annotation."""
    if hint in (Any, MISSING):
        return False
    try:
        again = convert(plain, hint)
    except TypeError:
        return False
    return _alike(again, value)


def _alike(first: Any, second: Any) -> bool:
    """Equal, with equal types all the way down: 1 is not True, (1,) is not [1]."""
    if type(first) is not type(second):
        return False
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(_alike, first, second))
    return bool(first == second)


def _path(thing: Any, calls: Calls, key: str) -> str:
    """The path of a class or function: where it says it lives, else as the default's expression called it."""
    try:
        return path_of(thing)
    except BindError as error:
        path = calls.path_of(thing)
        if path is None:
            raise BindError(f"{key}: {error}") from None
        return path


def _imported(path: str, value: Any, key: str) -> Node:
    try:
        found = object_at(path)
    except (ImportError, AttributeError):
        found = None
    if found is not value and not (inspect.ismethod(value) and found == value):
        raise BindError(f"{key}: {value!r} cannot be imported as {path}; give it a name at the top of a module")
    return {"_target_": "hydra_zen.funcs.get_obj", "path": path}
