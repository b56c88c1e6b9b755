"""Rows and answers as Arrow IPC streams. Only types whose size in memory follows from that of the body are read."""

import io
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from mlx_runtime.companions.serving.http.negotiation import BodyError
from mlx_runtime.companions.serving.predictions.tables import is_list, is_number, values_of

DICTIONARY_BATCH, RECORD_BATCH = 2, 3
"""Types of messages with values, in the flatbuffers of Arrow: https://arrow.apache.org/docs/format/Columnar.html"""

COMPRESSION = 3
"""Position of the field `compression` in their header."""


def read(body: bytes, limit: Callable[[int], None]) -> "pa.Table":
    """Return the table of a stream, checked. Calls `limit` with its number of rows before they are read.

    Raises:
        BodyError: it is not a stream, damaged, or compressed.
    """
    try:
        rows = 0
        for message in pa.ipc.MessageReader.open_stream(body):
            header = _header(message.metadata.to_pybytes())
            if header is not None:
                rows += header[0]
                limit(rows)
                if header[1]:
                    raise BodyError("compressed Arrow streams are not read; write it without compression")
        table = pa.ipc.open_stream(body).read_all()
        table.validate(full=True)
    except BodyError:
        raise
    except Exception as error:  # a damaged stream raises many types
        raise BodyError("the body is not an Arrow IPC stream, or is damaged") from error
    limit(table.num_rows)
    return table


def _header(data: bytes) -> tuple[int, bool] | None:
    """Return the number of rows in a message with values, and True if it is compressed; None for other messages."""
    message = struct.unpack_from("<I", data)[0]
    kind, batch = _field(data, message, 1), _field(data, message, 2)
    if kind is None or data[kind] not in (DICTIONARY_BATCH, RECORD_BATCH):
        return None
    if data[kind] == DICTIONARY_BATCH and batch is not None:
        batch = _field(data, _target(data, batch), 1)
    if batch is None:
        return None
    table = _target(data, batch)
    length = _field(data, table, 0) if data[kind] == RECORD_BATCH else None
    rows = 0 if length is None else max(0, struct.unpack_from("<q", data, length)[0])
    return rows, _field(data, table, COMPRESSION) is not None


def _target(data: bytes, field: int) -> int:
    """Return the position of the table that a field of a flatbuffer refers to."""
    return field + int(struct.unpack_from("<I", data, field)[0])


def _field(data: bytes, table: int, number: int) -> int | None:
    """Return the position of a field in a table of a flatbuffer, or None if the table does not have it."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    if vtable < 0 or 4 + 2 * number >= struct.unpack_from("<H", data, vtable)[0]:
        return None
    offset = struct.unpack_from("<H", data, vtable + 4 + 2 * number)[0]
    return table + offset if offset else None


def values(name: str, column: "pa.ChunkedArray", limit: int) -> Any:
    """Return the values of a column; see `values_of`.

    Raises:
        BodyError: it has another type, or more than `limit` values other than numbers, which become objects of Python.
    """
    kind = column.type
    while isinstance(kind, pa.FixedShapeTensorType) or is_list(kind):
        kind = kind.value_type
    if not (is_number(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise BodyError(f"{name} has the type {column.type!s:.60}; expected numbers, strings or lists of numbers")
    array = items = column.combine_chunks()
    while isinstance(items.type, pa.FixedShapeTensorType) or is_list(items.type):
        items = getattr(items, "storage", items).flatten()
        if len(items) > limit and not is_number(items.type):
            raise BodyError(f"{name} has {len(items):,} lists or strings, of at most {limit:,}; send fewer rows", 413)
    return values_of(array)


def write(rows: Sequence[Any]) -> bytes:
    """Return answers as a stream: a column for each output, and `error` if a row has failed."""
    names = list(dict.fromkeys(name for row in rows if not isinstance(row, Exception) for name in row))
    columns = {name: _column([None if isinstance(row, Exception) else row[name] for row in rows]) for name in names}
    if any(isinstance(row, Exception) for row in rows):
        columns["error"] = pa.array([str(row) if isinstance(row, Exception) else None for row in rows], pa.string())
    table = pa.table(columns)
    file = io.BytesIO()
    with pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    return file.getvalue()


def _column(items: Sequence[Any]) -> Any:
    kept = [np.asarray(item) for item in items if item is not None]
    if len(kept) == len(items) and kept[0].ndim and kept[0].size and len({item.shape for item in kept}) == 1:
        array = np.stack(kept)
        flat = pa.array(array.reshape(-1))
        for size in reversed(array.shape[1:]):
            flat = pa.FixedSizeListArray.from_arrays(flat, size)
        return flat
    kind = pa.from_numpy_dtype(kept[0].dtype)
    for _ in range(kept[0].ndim):
        kind = pa.list_(kind)
    return pa.array([None if item is None else np.asarray(item).tolist() for item in items], kind)
