"""Predictions as files: parts of a few thousand rows, joined to Parquet, JSON lines, CSV or NumPy."""

import json
import math
import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from pyarrow import csv, parquet

from mlx_runtime.companions.serving.predictions.tables import is_number, values_of
from mlx_runtime.companions.serving.predictor import as_array
from mlx_runtime.errors import MlxError, UsageError, short_message

ROW_GROUP_BYTES = 16 << 20
"""Size of the row groups of a Parquet file, in memory."""

OUTPUT = b"output"
"""Metadata of the columns that predict has returned; other columns are copies of the input."""


def table_of(outputs: Mapping[str, Sequence[Any]], kept: Mapping[str, Sequence[Any]]) -> pa.Table:
    """Return a table of some rows.

    Args:
        outputs: per name, the outputs of successive batches: tensors (rows, ...), or lists of a tensor per row.
        kept: per name, the values of successive batches, as tensors, arrays or lists.
    """
    columns = {name: _output(pieces) for name, pieces in outputs.items()}
    fields = [pa.field(name, array.type, metadata={OUTPUT: b""}) for name, array in columns.items()]
    for name, pieces in kept.items():
        if name in columns:
            raise UsageError(f"predict returns a column {name}, too; leave it out of --keep")
        columns[name] = _kept(name, pieces)
        fields.append(pa.field(name, columns[name].type))
    return pa.Table.from_arrays(list(columns.values()), schema=pa.schema(fields))


def _output(pieces: Sequence[Any]) -> pa.Array:
    if all(isinstance(piece, torch.Tensor) for piece in pieces) and len({piece.shape[1:] for piece in pieces}) == 1:
        return array_of(as_array(torch.cat(list(pieces))))
    arrays = [as_array(row) for piece in pieces for row in piece]
    kind = pa.from_numpy_dtype(np.result_type(*arrays))
    for _ in range(arrays[0].ndim):
        kind = pa.list_(kind)
    return pa.array([array.tolist() for array in arrays], kind)


def _kept(name: str, pieces: Sequence[Any]) -> pa.Array:
    if all(isinstance(piece, torch.Tensor | np.ndarray) for piece in pieces):
        return _output([torch.as_tensor(piece) for piece in pieces])
    try:
        return pa.array([item for piece in pieces for item in (piece if isinstance(piece, list) else piece.tolist())])
    except pa.ArrowException as error:
        raise UsageError(f"--keep {name}: its values have no common type: {short_message(error)}") from error


def array_of(array: np.ndarray) -> pa.Array:
    """Return an array (rows, ...) as numbers, lists of a fixed size, or, with more dimensions, fixed-shape tensors."""
    flat, shape = pa.array(array.reshape(-1)), array.shape[1:]
    if not shape:
        return flat
    size = math.prod(shape)
    if not size:
        return pa.array(array.tolist(), pa.list_(flat.type) if len(shape) == 1 else None)
    lists = pa.FixedSizeListArray.from_arrays(flat, size)
    if len(shape) == 1:
        return lists
    return pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(flat.type, shape), lists)


def write_part(path: Path, table: pa.Table) -> None:
    """Write a part, whole or not at all."""
    temporary = path.with_name(f".{path.name}")
    with temporary.open("wb") as file:
        with pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def rows_of_part(path: Path) -> int | None:
    """Return the number of rows of a part; None if it is damaged."""
    try:
        with path.open("rb") as file:
            reader = pa.ipc.open_file(file)
            return int(sum(reader.get_batch(number).num_rows for number in range(reader.num_record_batches)))
    except (pa.ArrowException, OSError):
        return None


def refuse_columns(schema: pa.Schema, output: Path) -> None:
    """Raise UsageError if files of this suffix cannot hold the columns."""
    suffix = output.suffix.lower()
    if suffix == ".npy" and len(schema) != 1:
        raise UsageError(f"{output} holds one column, but there are {', '.join(schema.names)}; write .npz or .parquet")
    for field in schema:
        if suffix == ".csv" and (_shape(field.type) or pa.types.is_nested(field.type)):
            raise UsageError(f"{output}: a field of CSV cannot hold {field.name}, {_text(field.type)}; write .parquet")
        if suffix in (".npy", ".npz") and not is_number(field.type.value_type if _shape(field.type) else field.type):
            raise UsageError(f"{output}: NumPy cannot hold {field.name}, {_text(field.type)}; write .parquet")


def _shape(kind: pa.DataType) -> tuple[int, ...]:
    if isinstance(kind, pa.FixedShapeTensorType):
        return tuple(kind.shape)
    return (kind.list_size,) if pa.types.is_fixed_size_list(kind) else ()


def _value_type(kind: pa.DataType) -> pa.DataType:
    while hasattr(kind, "value_type"):
        kind = kind.value_type
    return kind


def _text(kind: pa.DataType) -> str:
    shape = _shape(kind)
    return f"{_value_type(kind)} ({', '.join(map(str, shape))}{',' * (len(shape) == 1)})" if shape else str(kind)


def join(parts: Sequence[Path], output: Path, temporary: Path) -> list[str]:
    """Write parts to one file, in order, and publish it. Return the names of its columns."""
    schema = _common_schema(parts)
    refuse_columns(schema, output)
    tables = (_read(part, schema) for part in parts)
    with temporary.open("wb") as file:
        match output.suffix.lower():
            case ".parquet":
                _write_parquet(file, schema, tables)
            case ".csv":
                _write_csv(file, schema, tables)
            case ".npy":
                _write_array(file, schema, schema.names[0], parts)
            case ".npz":
                _write_npz(file, schema, parts)
            case _:
                _write_json(file, schema, tables)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(output)
    return list(schema.names)


def _common_schema(parts: Sequence[Path]) -> pa.Schema:
    found = []
    for part in parts:
        with part.open("rb") as file:
            found.append(pa.ipc.open_file(file).schema)
    if odd := next((item for item in found if item.names != found[0].names), None):
        raise MlxError(
            f"predict returned {', '.join(found[0].names)} for some rows, and {', '.join(odd.names)} for others"
        )
    fields = []
    for name in found[0].names:
        kinds = list(dict.fromkeys(item.field(name).type for item in found))
        if len(kinds) > 1 and found[0].field(name).metadata:
            kinds = list(dict.fromkeys(_lists(kind) for kind in kinds))
            if len(kinds) > 1:
                raise MlxError(f"predict returned {name} as {kinds[0]} for some rows, and as {kinds[1]} for others")
        try:
            one = pa.unify_schemas([pa.schema({name: kind}) for kind in kinds], promote_options="permissive")
        except pa.ArrowException as error:
            raise UsageError(f"--keep {name}: its values have no common type: {short_message(error)}") from error
        fields.append(one.field(name))
    return pa.schema(fields)


def _lists(kind: pa.DataType) -> pa.DataType:
    """Return the type of lists of any length that can hold the values of a type."""
    depth, inner = len(_shape(kind)), _value_type(kind)
    if not depth:
        return kind
    for _ in range(depth):
        inner = pa.list_(inner)
    return inner


def _read(part: Path, schema: pa.Schema) -> pa.Table:
    with part.open("rb") as file:
        table = pa.ipc.open_file(file).read_all()
    columns = []
    for field in schema:
        column = table[field.name].combine_chunks()
        if column.type != field.type:
            column = column.cast(field.type) if not _shape(column.type) else pa.array(_plain(column), field.type)
        columns.append(column)
    return pa.Table.from_arrays(columns, schema=schema)


def _plain(column: pa.Array) -> list[Any]:
    values = values_of(column)
    return list(values.tolist() if isinstance(values, np.ndarray) else column.to_pylist())


def _write_parquet(file: Any, schema: pa.Schema, tables: Iterator[pa.Table]) -> None:
    with parquet.ParquetWriter(file, schema) as writer:
        group: list[pa.Table] = []
        for table in tables:
            group.append(table)
            if sum(item.nbytes for item in group) >= ROW_GROUP_BYTES:
                writer.write_table(pa.concat_tables(group))
                group = []
        if group:
            writer.write_table(pa.concat_tables(group))


def _write_csv(file: Any, schema: pa.Schema, tables: Iterator[pa.Table]) -> None:
    with csv.CSVWriter(file, schema) as writer:
        for table in tables:
            writer.write_table(table)


def _write_json(file: Any, schema: pa.Schema, tables: Iterator[pa.Table]) -> None:
    for table in tables:
        columns = [_finite(column.combine_chunks()) for column in table.columns]
        for row in zip(*columns, strict=True):
            line = json.dumps(
                dict(zip(schema.names, row, strict=True)), ensure_ascii=False, allow_nan=False, default=str
            )
            file.write(f"{line}\n".encode())


def _finite(column: pa.Array) -> list[Any]:
    """Return plain values, with None in place of NaN and infinity, which JSON lacks."""
    values = _plain(column)
    try:
        json.dumps(values, allow_nan=False, default=str)
    except ValueError:
        return [_without_nan(value) for value in values]
    return values


def _without_nan(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _write_npz(file: Any, schema: pa.Schema, parts: Sequence[Path]) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name in schema.names:
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                _write_array(member, schema, name, parts)


def _write_array(file: Any, schema: pa.Schema, name: str, parts: Sequence[Path]) -> None:
    kind = schema.field(name).type
    rows = sum(rows_of_part(part) or 0 for part in parts)
    dtype = np.dtype((kind.value_type if _shape(kind) else kind).to_pandas_dtype())
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (rows, *_shape(kind))}
    np.lib.format.write_array_header_2_0(file, header)
    for part in parts:
        file.write(np.asarray(values_of(_read(part, schema)[name].combine_chunks()), dtype).tobytes())
