"""Plain values: what loading a checkpoint gives back without running code."""

import collections
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

_DICTS = (dict, collections.OrderedDict, collections.Counter)
"""Mappings that keep their type when they are loaded with `weights_only=True`."""


def plain(value: Any) -> Any:
    """Return a value as loading gives it back; tensors are not copied.

    Raises:
        TypeError: A checkpoint cannot hold it.
    """
    if value is None or type(value) in (bool, int, float, complex, str, bytes):
        return value
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in (list, tuple):
        return type(value)(plain(item) for item in value)
    if isinstance(value, dict):
        kind = type(value) if type(value) in _DICTS else dict
        return kind({plain(key): plain(item) for key, item in value.items()})
    raise TypeError


def plain_entries(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the entries that a checkpoint can hold, and the names of the others."""
    kept, left_out = {}, []
    for name, value in values.items():
        try:
            kept[name] = plain(value)
        except TypeError:
            left_out.append(name)
    return kept, left_out


def copied(value: Any) -> Any:
    """Return a copy of plain values on the CPU, which training does not change."""
    return _map_tensors(value, lambda tensor: tensor.detach().to("cpu", copy=True))


def moved(value: Any, device: torch.device) -> Any:
    """Return plain values with their tensors on a device."""
    return _map_tensors(value, lambda tensor: tensor.to(device))


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among plain values."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors(item)


def _map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict) and type(value) in _DICTS:
        return type(value)({key: _map_tensors(item, change) for key, item in value.items()})
    if type(value) in (list, tuple):
        return type(value)(_map_tensors(item, change) for item in value)
    return value
