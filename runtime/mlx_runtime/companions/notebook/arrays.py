"""Arrays of NumPy, JAX and TensorFlow in a checkpoint, which holds tensors."""

from collections import OrderedDict
from typing import Any

import numpy as np
import torch


def as_tensors(value: Any) -> Any:
    """Return plain values with each array among them copied into a tensor on the CPU; others stay as they are."""
    if type(value) in (dict, OrderedDict):
        return type(value)((key, as_tensors(item)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(map(as_tensors, value))
    if isinstance(value, torch.Tensor | np.generic | type) or not hasattr(value, "__array__"):
        return value
    array = np.array(value)  # a copy, which training does not change
    if array.dtype.name == "bfloat16":  # of ml_dtypes, which torch does not know
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    try:
        return torch.from_numpy(array)
    except TypeError:  # of objects or text, which `plain_entries` reports
        return value
