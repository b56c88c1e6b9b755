"""The values of a checkpoint: plain data and tensors, from models and arrays of NumPy, JAX and TensorFlow."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from mlx_runtime.distributed.wrapping import unwrap
from mlx_runtime.errors import MlxError
from mlx_runtime.runs.checkpoints.groups import plain_entries


def checkpoint_values(state: Mapping[str, Any], title: str, error: type[MlxError]) -> dict[str, Any]:
    """Return values that a checkpoint can hold, with the `state_dict` of objects that have one.

    Args:
        state: values by name.
        title: how the user has passed a value, like `save_checkpoint({}=...)`.
        error: raised if a checkpoint cannot hold one of the values.
    """
    given = {name: unwrap(item) for name, item in state.items()}
    given = {name: item.state_dict() if hasattr(item, "state_dict") else item for name, item in given.items()}
    values, unsafe = plain_entries(as_tensors(given))
    if unsafe:
        kind = type(given[unsafe[0]]).__name__
        raise error(
            f"{title.format(unsafe[0])} is of type {kind}, which a checkpoint cannot hold; it takes numbers, text, "
            "tensors, arrays, lists and dicts of these, and objects with a state_dict"
        )
    return values


def as_tensors(value: Any) -> Any:
    """Return plain values with each array among them copied into a tensor on the CPU; others stay as they are."""
    if type(value) in (dict, OrderedDict):
        return type(value)((key, as_tensors(item)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(map(as_tensors, value))
    if isinstance(value, torch.Tensor | np.generic | type) or not hasattr(value, "__array__"):
        return value
    array = np.array(value)  # a copy, which training does not change
    try:
        return torch.from_numpy(array)
    except TypeError:
        if array.dtype.name == "bfloat16":  # of ml_dtypes, which torch does not know
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return value  # objects or text, which `plain_entries` reports
