"""Messages between workers: plain values as JSON, followed by the contents of their tensors.

Unlike unpickling, decoding never runs code, because others may have access to the network between workers.
"""

import base64
import collections
import json
import math
from typing import Any

import torch

_DICTS = {"dict": dict, "OrderedDict": collections.OrderedDict, "Counter": collections.Counter}

_DTYPES = {str(item).removeprefix("torch."): item for item in vars(torch).values() if isinstance(item, torch.dtype)}
_NAMES = {item: name for name, item in _DTYPES.items()}
_OF_NUMPY = (torch.float16, torch.float32, torch.float64)  # types that NumPy has as well


def encode(value: Any) -> bytes:
    """Encode a value: numbers, text, bytes and tensors, in lists, tuples, and dicts with any of these as keys.

    Raises:
        TypeError: It contains another type.
    """
    tensors: list[torch.Tensor] = []
    text = json.dumps(_describe(value, tensors), separators=(",", ":")).encode()
    return b"".join((len(text).to_bytes(8, "big"), text, *map(_content, tensors)))


def decode(message: bytes) -> Any:
    """Decode a message, with its tensors on the CPU.

    Raises:
        ValueError: It is not a message.
    """
    data = memoryview(message)
    end = 8 + int.from_bytes(data[:8], "big")
    try:
        value, position = _value(json.loads(bytes(data[8:end])), data, end)
    except (TypeError, KeyError, AttributeError, RuntimeError, RecursionError) as error:
        raise ValueError(f"not a message: {error}") from error
    if position != len(data):
        raise ValueError(f"not a message: it has {len(data):,} bytes of {position:,}")
    return value


def _describe(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return a value for JSON, with types that JSON lacks as `{type: content}`."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return {"tensor": [_NAMES[value.dtype], list(value.shape)]}
    if isinstance(value, list):
        return [_describe(item, tensors) for item in value]
    if type(value) is tuple:
        return {"tuple": [_describe(item, tensors) for item in value]}
    if type(value).__name__ in _DICTS:
        return {type(value).__name__: [[_describe(part, tensors) for part in item] for item in value.items()]}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    raise TypeError(f"{type(value).__name__} objects cannot be sent to other workers: {value!r:.80}")


def _content(tensor: torch.Tensor) -> bytes:
    if tensor.dtype.is_floating_point and tensor.dtype not in _OF_NUMPY:
        tensor = tensor.view(torch.int16 if tensor.dtype.itemsize == 2 else torch.uint8)
    return tensor.numpy(force=True).tobytes()


def _value(described: Any, data: memoryview, position: int) -> tuple[Any, int]:
    """Return a value, and the position after the contents of its tensors in the message."""
    if isinstance(described, list):
        items = []
        for item in described:
            value, position = _value(item, data, position)
            items.append(value)
        return items, position
    if not isinstance(described, dict):
        return described, position
    ((kind, content),) = described.items()
    if kind == "tensor":
        name, shape = content
        end = position + math.prod(shape) * _DTYPES[name].itemsize
        if end > len(data):
            raise ValueError(f"not a message: it has {len(data):,} bytes of {end:,}")
        if end == position:
            return torch.empty(shape, dtype=_DTYPES[name]), end
        return torch.frombuffer(bytearray(data[position:end]), dtype=_DTYPES[name]).reshape(shape), end
    if kind == "bytes":
        return base64.b64decode(content), position
    if kind == "complex":
        return complex(*content), position
    items, position = _value(content, data, position)
    return tuple(items) if kind == "tuple" else _DICTS[kind](dict(items)), position
