"""States of the members of a group (`models`, `optimizers`, `tools`, …), collected and restored.

A state consists of plain values, which can be loaded from a checkpoint without running code.
"""

import collections
import contextlib
import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeGuard, cast

import numpy as np
import torch

from mlx_runtime import companions
from mlx_runtime.distributed.wrapping import is_sharded, unwrap
from mlx_runtime.errors import ConfigError, StorageError, short_message
from mlx_runtime.runs import metric_states
from mlx_runtime.storage.local import IrregularError

State = dict[str, Any]

_DICTS = (dict, collections.OrderedDict, collections.Counter)
"""Types of mappings that are preserved when loading with `weights_only=True`."""

_FACTORIES = {item.__name__: item for item in (bool, dict, float, int, list, set, str)}
"""Factories of the defaultdicts that attributes of tools may be."""

SPECIAL = "mlx_runtime.special"
"""Key of the dict `{key: [kind, ...]}` instead of a value of an attribute; see `_encoded`."""


FROZEN = "mlx_runtime.frozen"
"""Key of the dict `{key: SHA-256}` instead of a parameter that its constructor builds; see `cfg.tuning`."""


class DamagedError(ConfigError):
    """A file of a checkpoint is missing or damaged."""


def damage(path: str, reason: object) -> DamagedError:
    return DamagedError(f"{path} is damaged: {reason}")


@contextlib.contextmanager
def io_errors(path: str) -> Iterator[None]:
    """Translate errors of a block that reads a file of a checkpoint, and raises ValueError if the file has changed.

    Raises:
        DamagedError: the file is missing or has changed.
        StorageError: the storage does not answer.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise damage(path, "there is no such file") from error
    except IrregularError as error:
        raise damage(path, error.strerror) from error
    except OSError as error:
        raise StorageError(f"cannot read {path}: {short_message(error)}") from error
    except ValueError as error:
        raise damage(path, short_message(error)) from error


adapters: list[Callable[[Any, Any, str], Any]] = []
"""Functions of companions that return an object with the state of one of another library, or None; see `stateful`."""


def stateful(item: Any, owner: Any, name: str) -> Any:
    """Return the object whose `state_dict` is the state of an item: itself, or the one of an adapter.

    `owner` is the group or the experiment that has the item as its attribute `name`.
    """
    return next((made for adapt in adapters if (made := adapt(item, owner, name)) is not None), item)


class UnreadTensor:
    """A tensor of a loaded state whose content has not been read yet; see `shards.StoredTensor`."""


def members(group: Any, kind: type = object) -> dict[str, Any]:
    """Return the members of a group that are of one kind, by name, without private attributes."""
    found = vars(group).items() if group is not None else ()
    return {name: value for name, value in found if not name.startswith("_") and isinstance(value, kind)}


def state_of(group: Any, hidden: Collection[str] = ()) -> tuple[State, list[str]]:
    """Return the states of members, and the names of attributes that cannot be saved, like `stopper.history`.

    Attributes with one of the `hidden` secrets of the config are left out, because constructors set them again.
    """
    states: State = {}
    left_out: list[str] = []
    for name, item in members(group).items():
        member = stateful(item, group, name)
        if metric_states.is_metric(member):
            try:
                states[name] = plain(metric_states.state_of(member))
            except TypeError:
                left_out.append(name)
        elif hasattr(member, "state_dict"):
            states[name], unsafe = plain_entries(unwrap(member).state_dict())
            left_out += [f"{name}.state_dict()[{key!r}]" for key in unsafe]
        elif _has_state(member):
            kept = {key: item for key, item in vars(member).items() if not (isinstance(item, str) and item in hidden)}
            states[name], unsafe = _encoded(type(member).__name__, kept)
            left_out += [f"{name}.{attribute}" for attribute in unsafe]
    return states, left_out


def load_into(
    group: Any,
    saved: Mapping[str, Any],
    title: str,
    *,
    only: set[str] | None = None,
    moved: Mapping[str, torch.device] | None = None,
    owned: bool = False,
) -> list[str]:
    """Restore the members of a group from saved states. Return a line for each member that was not restored.

    Raise ConfigError if a state does not fit, or if the title is `models` or `optimizers` and a member has no
    counterpart. `only` names the members to restore. `moved` maps attributes to the devices of their tensors, like
    `{"ema.shadow": cuda:0}`; others stay on the CPU. States are copied unless the members may keep them (`owned`).
    """
    wanted = {*members(group), *saved} if only is None else only
    found = {name: stateful(item, group, name) for name, item in members(group).items() if name in wanted}
    present = {name: item for name, item in found.items() if _has_state(item)}
    saved = {name: state for name, state in saved.items() if name in wanted}
    unmatched = sorted(set(present) ^ set(saved))
    if unmatched and title in ("models", "optimizers"):
        sides = ", ".join(f"{name} ({'only in the code' if name in present else 'only there'})" for name in unmatched)
        raise ConfigError(
            f"the checkpoint does not fit: {title} {sides}. Restore with the code that saved it, or load only "
            "weights with cfg.transfer"
        )
    for name in sorted(set(present) & set(saved)):
        devices = {key.removeprefix(f"{name}."): device for key, device in (moved or {}).items()}
        planned = _planned_steps(present[name])
        try:
            _load_member(present[name], saved[name] if owned else copy.deepcopy(saved[name]), devices)
            for scheduler, steps in planned:
                if scheduler.total_steps < steps:
                    raise ValueError(
                        f"{type(scheduler).__name__} ends after {scheduler.total_steps} steps, and the loop makes it "
                        f"for {steps}; resume with the former cfg.num_epochs and number of workers, or start a new run"
                    )
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            detail = " ".join(str(error).split())
            where = "self" if title == "own" else title
            cure = "; cfg.transfer loads only weights" * (title == "optimizers")
            raise ConfigError(
                f"{where}.{name} in the checkpoint does not fit the config: {detail:.300}{cure}"
            ) from error
    return [f"{title}.{name} is new: the checkpoint has no state for it" for name in unmatched if name in present]


def _planned_steps(item: Any) -> list[tuple[Any, int]]:
    """Return the schedulers in an object that have a fixed number of steps, like OneCycleLR, with that number."""
    steps, parts = getattr(item, "total_steps", None), getattr(item, "_schedulers", None)
    inner = [found for part in parts for found in _planned_steps(part)] if isinstance(parts, list | tuple) else []
    return [(item, steps), *inner] if isinstance(steps, int) else inner


def lacks_weights(models: Mapping[str, Any]) -> bool:
    """Return True if the saved states of models lack frozen weights, which constructors must load."""
    items = (item for state in models.values() for item in state.values())
    return any(isinstance(item, dict) and item.keys() == {FROZEN} for item in items)


def merge_ranks(states_of_ranks: Sequence[Mapping[str, Any]], group: Any) -> State:
    """Merge the states of metrics on several ranks, by name, without those of metrics that cannot be merged."""
    states: State = {}
    for name, member in members(group).items():
        saved = [rank[name] for rank in states_of_ranks if name in rank]
        if saved and not metric_states.is_metric(member):
            states[name] = saved[0]
        elif saved and metric_states.is_mergeable(member):
            try:
                states[name] = metric_states.merge_states(member, saved)
            except KeyError:  # saved with other parts, so it cannot be loaded
                states[name] = saved[0]
    return states


def on_device(group: Any) -> list[str]:
    """Return the attributes of plain tools with tensors on a GPU, like `ema.shadow`."""
    return [
        f"{name}.{attribute}"
        for name, member in members(group).items()
        if not hasattr(member, "state_dict") and _has_state(member)
        for attribute, value in vars(member).items()
        if any(tensor.device.type != "cpu" for tensor in tensors(value))
    ]


def _load_member(member: Any, saved: State, devices: Mapping[str, torch.device]) -> None:
    if metric_states.is_metric(member):
        metric_states.load_state(member, saved)
    elif hasattr(member, "load_state_dict"):
        if lacks_weights({"": saved}):
            saved = companions.part("surgery.tuning").filled(saved, unwrap(member).state_dict())
        unwrap(member).load_state_dict(saved)
    else:
        for key, item in decoded(saved, devices).items():
            if _is_trained(trained := getattr(member, key, None)) and _shape(trained) == _shape(item):
                trained.data.copy_(item)  # in place, because an optimizer may hold it
            else:
                setattr(member, key, item)


def _is_trained(value: Any) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.is_leaf and value.requires_grad and not is_sharded(value)


def _has_state(member: Any) -> bool:
    return hasattr(member, "state_dict") or (hasattr(member, "__dict__") and not isinstance(member, type))


def _shape(value: Any) -> Any:
    return tuple(value.shape) if hasattr(value, "shape") else type(value).__name__


def plain(value: Any) -> Any:
    """Return a value in the form in which it will be loaded, without copying tensors; TypeError if it cannot be."""
    if value is None or type(value) in (bool, int, float, complex, str, bytes):
        return value
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, np.generic) and not isinstance(value.item(), np.generic):
        return plain(value.item())  # np.longdouble has no other type, and np.datetime64 is a date
    if type(value) in (list, tuple):
        return type(value)(plain(item) for item in value)
    if isinstance(value, dict):
        kind = type(value) if type(value) in _DICTS else dict
        return kind({plain(key): plain(item) for key, item in value.items()})
    raise TypeError


def plain_entries(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the entries that can be saved in a checkpoint, and the names of the others."""
    kept, left_out = {}, []
    for name, value in values.items():
        try:
            kept[name] = plain(value)
        except TypeError:
            left_out.append(name)
    return kept, left_out


def _encoded(title: str, values: Mapping[str, Any]) -> tuple[State, list[str]]:
    """Return attributes as plain values, from which `decoded` makes equal ones, and the names of the others.

    Plain values lack some types, and lose what several attributes share. Therefore, `{SPECIAL: [kind, ...]}` stands for

        ["numpy", type, value]                          a scalar of NumPy
        ["defaultdict", name of the factory, items]     with one of `_FACTORIES`, or None
        ["same", number]                                a list, dict or tensor that occurs earlier

    where lists, dicts and tensors are numbered in the order in which they first occur.

    Raises:
        ConfigError: a value would be restored as something else.
    """
    kept: State = {}
    left_out = []
    numbers: dict[Any, int] = {}
    memory: dict[Any, list[range]] = {}
    for name, value in values.items():
        encoder = _Encoder(f"{title}.{name}", dict(numbers), {start: [*spans] for start, spans in memory.items()})
        try:
            kept[name] = encoder.encode(value, attribute=True)
        except TypeError:
            left_out.append(name)
        else:
            numbers, memory = encoder.numbers, encoder.memory
    return kept, left_out


class _Encoder:
    """Encodes one attribute; see `_encoded`.

    Attributes:
        numbers: Number of each list, dict and tensor so far, by its identity.
        memory: Addresses of the tensors so far, by the start of their memory.
    """

    def __init__(self, title: str, numbers: dict[Any, int], memory: dict[Any, list[range]]) -> None:
        self._title, self.numbers, self.memory = title, numbers, memory

    def encode(self, value: Any, *, attribute: bool = False) -> Any:
        """Return a plain value, or raise TypeError if it cannot be saved."""
        if _is_trained(value) and not attribute:
            raise TypeError  # an optimizer may hold it, and would not know another tensor
        if isinstance(value, list | dict | torch.Tensor):
            if (identity := _identity(value)) in self.numbers:
                return {SPECIAL: ["same", self.numbers[identity]]}
            self.numbers[identity] = len(self.numbers)
        if isinstance(value, torch.Tensor):
            self._refuse_overlap(value)
            return value.detach()
        if isinstance(value, np.generic):
            if value.dtype.kind not in "biufcSU":
                raise TypeError
            return {SPECIAL: ["numpy", value.dtype.str, plain(value)]}
        if type(value) in (list, tuple):
            return type(value)(self.encode(item) for item in value)
        if not isinstance(value, dict):
            return plain(value)
        items = {plain(key): self.encode(item) for key, item in value.items()}
        if type(value) in _DICTS:
            return type(value)(items)
        factory = getattr(value, "default_factory", None)
        if type(value) is collections.defaultdict and factory in (None, *_FACTORIES.values()):
            return {SPECIAL: ["defaultdict", factory and factory.__name__, items]}
        kind = f"{type(value).__name__}, whose factory" if factory is not None else f"{type(value).__name__}, which"
        raise ConfigError(
            f"{self._title} contains a {kind} a checkpoint cannot restore; save it in a state_dict of the class"
        )

    def _refuse_overlap(self, tensor: torch.Tensor) -> None:
        if _address(tensor) == 0:
            return
        span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        own = range(tensor.data_ptr(), tensor.data_ptr() + span * tensor.element_size())
        others = self.memory.setdefault((tensor.device, tensor.untyped_storage().data_ptr()), [])
        if any(own.start < other.stop and other.start < own.stop for other in others):
            raise ConfigError(
                f"{self._title} is a view of another tensor of the tool, which a checkpoint cannot restore; clone it, "
                "or save it in a state_dict of the class"
            )
        others.append(own)


def _address(tensor: torch.Tensor) -> int:
    """Return the address of the first element; 0 for sparse, sharded and empty tensors, and those without memory."""
    return tensor.data_ptr() if tensor.layout is torch.strided and not is_sharded(tensor) and tensor.numel() else 0


def _identity(value: Any) -> Any:
    """Return a key that is equal for the same list or dict, and for equal views of the same memory."""
    if not isinstance(value, torch.Tensor) or _address(value) == 0:
        return id(value)
    signs = value.is_conj(), value.is_neg()  # of the elements, which are applied when these are read
    return value.device, _address(value), value.dtype, value.shape, value.stride(), signs


def decoded(saved: State, devices: Mapping[str, torch.device] = MappingProxyType({})) -> State:
    """Return attributes from their plain values, with their tensors on these devices, or else on the CPU."""
    made: list[Any] = []  # lists, dicts and tensors, by number

    def decode(value: Any, device: torch.device) -> Any:
        special = isinstance(value, dict) and value.keys() == {SPECIAL}
        kind, *rest = cast("list[Any]", value[SPECIAL] if special else [None])
        if kind == "same":
            return made[rest[0]]
        if kind == "numpy":
            return np.dtype(rest[0]).type(rest[1])
        if type(value) is tuple:
            return tuple(decode(item, device) for item in value)
        if isinstance(value, torch.Tensor | UnreadTensor):
            made.append(value.to(device) if isinstance(value, torch.Tensor) else value)
        elif isinstance(value, list):
            items: list[Any] = []
            made.append(items)
            items.extend(decode(item, device) for item in value)
            return items
        elif isinstance(value, dict):
            entries: Any = collections.defaultdict(_FACTORIES.get(rest[0])) if kind else type(value)()
            made.append(entries)
            for key, item in (rest[1] if kind else value).items():
                entries[key] = decode(item, device)
            return entries
        else:
            return value
        return made[-1]

    cpu = torch.device("cpu")
    return {name: decode(item, devices.get(name, cpu)) for name, item in saved.items()}


def copy_to_cpu(value: Any) -> Any:
    """Return a copy of plain values on the CPU, which training does not change."""
    return map_tensors(value, lambda tensor: tensor.detach().to("cpu", copy=True))


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among plain values."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors(item)


def map_tensors(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return plain values with `change` applied to each tensor, even an unread one."""
    if isinstance(value, torch.Tensor | UnreadTensor):
        return change(value)
    if type(value) in _DICTS:
        return type(value)({key: map_tensors(item, change) for key, item in value.items()})
    if type(value) in (list, tuple):
        return type(value)(map_tensors(item, change) for item in value)
    return value
