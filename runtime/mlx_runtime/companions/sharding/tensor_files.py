"""Files of tensors in the format of safetensors: a header in JSON with names, types and positions, then plain bytes.

They are written and read as streams, which the library `safetensors` cannot do: it needs all tensors in memory, and
a file on this machine.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch

from mlx_runtime.errors import MlxError
from mlx_runtime.storage.documents import COUNT, from_json, list_of, mapping_with, one_of

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Types of tensors by their names in the format."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class _Writable(Protocol):
    def write(self, data: memoryview, /) -> object: ...


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a type; raise MlxError if the format has none."""
    if dtype not in _NAMES:
        raise MlxError(f"tensors of {dtype} cannot be stored in the safetensors format")
    return _NAMES[dtype]


def size_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def content(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, without copying them."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def write_header(
    file: _Writable, entries: Mapping[str, tuple[Sequence[int], torch.dtype]], **metadata: str
) -> list[int]:
    """Write the header of a file with these tensors. Return the position of each; their bytes must follow in order."""
    header: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    offsets, end = [], 0
    for name, (shape, dtype) in entries.items():
        begin, end = end, end + size_bytes(shape, dtype)
        header[name] = {"dtype": dtype_name(dtype), "shape": list(shape), "data_offsets": [begin, end]}
        offsets.append(begin)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(memoryview(len(text).to_bytes(8, "little") + text))
    return [8 + len(text) + offset for offset in offsets]


def write(file: _Writable, tensors: Mapping[str, torch.Tensor], **metadata: str) -> list[int]:
    """Write a whole file with tensors on the CPU. Return the position of each."""
    starts = write_header(file, {name: (item.shape, item.dtype) for name, item in tensors.items()}, **metadata)
    write_content(file, tensors.values())
    return starts


def write_content(file: _Writable, tensors: Iterable[torch.Tensor]) -> None:
    """Write the bytes of tensors on the CPU."""
    for tensor in tensors:
        file.write(content(tensor.contiguous()))


def read(content: bytes) -> dict[str, torch.Tensor]:
    """Return the tensors in the content of a whole file. Raises ValueError if it is damaged."""
    size = int.from_bytes(content[:8], "little")
    if not 0 < size <= len(content) - 8:
        raise ValueError(f"its header has {size:,} bytes of {len(content):,}")
    entry = mapping_with({"dtype": one_of(*DTYPES), "shape": list_of(COUNT), "data_offsets": list_of(COUNT)})
    header = from_json(content[8 : 8 + size], {})
    header.pop("__metadata__", None)
    data, tensors = memoryview(content)[8 + size :], {}
    for name, item in header.items():
        if not entry.fits(item) or len(item) < 3:
            raise ValueError(f"its header describes {name!r:.100} in another form")
        dtype, (begin, end) = DTYPES[item["dtype"]], (*item["data_offsets"], -1, -1)[:2]
        if min(item["shape"], default=0) < 0 or not 0 <= begin <= end <= len(data):
            raise ValueError(f"{name!r:.100} lies outside of the file")
        if end - begin != size_bytes(item["shape"], dtype):
            raise ValueError(
                f"{name!r:.100} has {end - begin:,} bytes in place of {size_bytes(item['shape'], dtype):,}"
            )
        part = bytearray(data[begin:end])
        flat = torch.frombuffer(part, dtype=dtype) if part else torch.empty(0, dtype=dtype)
        tensors[name] = flat.reshape(item["shape"])
    return tensors
