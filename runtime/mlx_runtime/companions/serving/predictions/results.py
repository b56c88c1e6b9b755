"""Predictions as files: a part per block of rows, joined to Parquet or JSON lines."""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from pyarrow import parquet

from mlx_runtime.companions.serving.predictions.tables import values_of
from mlx_runtime.companions.serving.predictor import as_array
from mlx_runtime.errors import MlxError, UsageError, short_message
from mlx_runtime.storage.files import finite

ROW_GROUP_BYTES = 16 << 20
"""Size of the row groups of a Parquet file, in memory."""


def table_of(outputs: Mapping[str, Any], kept: Mapping[str, pa.Array]) -> pa.Table:
    """Return a table of some rows.

    Args:
        outputs: tensors (rows, ...), or lists of a tensor per row, by name.
        kept: columns of the input.
    """
    for name in kept:
        if name in outputs:
            raise UsageError(f"predict returns a column {name}, too; leave it out of --keep")
    return pa.table({name: array_of(value) for name, value in outputs.items()} | dict(kept))


def array_of(rows: torch.Tensor | Sequence[torch.Tensor]) -> pa.Array:
    """Return rows as numbers, lists of a fixed size, or, with more dimensions, fixed-shape tensors.

    Rows of different shapes become nested lists.
    """
    if not isinstance(rows, torch.Tensor) or not rows[:1].numel():
        arrays = [as_array(row) for row in rows]
        kind = pa.from_numpy_dtype(np.result_type(*arrays))
        for _ in range(arrays[0].ndim):
            kind = pa.list_(kind)
        return pa.array([array.tolist() for array in arrays], kind)
    flat, shape = pa.array(as_array(rows).reshape(-1)), rows.shape[1:]
    if not shape:
        return flat
    lists = pa.FixedSizeListArray.from_arrays(flat, math.prod(shape))
    if len(shape) == 1:
        return lists
    return pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(flat.type, shape), lists)


def kept_array(name: str, values: torch.Tensor | Sequence[Any]) -> pa.Array:
    """Return a column of a batch that is copied to the output."""
    try:
        return array_of(values) if isinstance(values, torch.Tensor) else pa.array(values)
    except pa.ArrowException as error:
        raise UsageError(f"--keep {name}: its values have no common type: {short_message(error)}") from error


def write_part(path: Path, tables: Sequence[pa.Table]) -> None:
    """Write the rows of a block, whole or not at all."""
    temporary, schema = path.with_name(f".{path.name}"), common_schema([table.schema for table in tables])
    with temporary.open("wb") as file:
        with pa.ipc.new_file(file, schema) as writer:
            for table in tables:
                writer.write_table(_converted(table, schema))
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def common_schema(schemas: Sequence[pa.Schema]) -> pa.Schema:
    """Return the schema of all rows, in which outputs whose shape differs between rows are nested lists."""
    first = schemas[0]
    if odd := next((item for item in schemas if item.names != first.names), None):
        raise MlxError(
            f"predict returned {', '.join(first.names)} for some rows, and {', '.join(odd.names)} for others"
        )
    fields = []
    for name in first.names:
        kinds = list(dict.fromkeys(item.field(name).type for item in schemas))
        if len(kinds) > 1:
            kinds = list(dict.fromkeys(map(_lists, kinds)))
        if len(kinds) > 1:
            raise MlxError(f"{name} is {kinds[0]} for some rows, and {kinds[1]} for others")
        fields.append(pa.field(name, kinds[0]))
    return pa.schema(fields)


def _lists(kind: pa.DataType) -> pa.DataType:
    """Return the type of lists of any length that can hold the values of a type."""
    if isinstance(kind, pa.FixedShapeTensorType):
        depth = len(kind.shape)
    elif pa.types.is_fixed_size_list(kind):
        depth = 1
    else:
        return kind
    made = kind.value_type
    for _ in range(depth):
        made = pa.list_(made)
    return made


def _converted(table: pa.Table, schema: pa.Schema) -> pa.Table:
    columns = []
    for field in schema:
        column = table[field.name].combine_chunks()
        columns.append(column if column.type == field.type else pa.array(_plain(column), field.type))
    return pa.Table.from_arrays(columns, schema=schema)


def _plain(column: pa.Array) -> list[Any]:
    values = values_of(column)
    return list(values.tolist() if isinstance(values, np.ndarray) else column.to_pylist())


def join(parts: Sequence[Path], output: Path, temporary: Path) -> list[str]:
    """Write parts to one file, in order, and publish it. Return the names of its columns."""
    schema = common_schema([_opened(part).schema for part in parts])
    tables = (_converted(_opened(part).read_all(), schema) for part in parts)
    with temporary.open("wb") as file:
        if output.suffix.lower() == ".parquet":
            _write_parquet(file, schema, tables)
        else:
            _write_json(file, tables)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(output)
    return list(schema.names)


def _opened(part: Path) -> Any:
    return pa.ipc.open_file(pa.OSFile(str(part)))


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


def _write_json(file: Any, tables: Iterator[pa.Table]) -> None:
    for table in tables:
        columns = [_plain(column.combine_chunks()) for column in table.columns]
        for values in zip(*columns, strict=True):
            row = dict(zip(table.column_names, values, strict=True))
            try:
                line = json.dumps(row, ensure_ascii=False, allow_nan=False, default=str)
            except ValueError:
                line = json.dumps(finite(row), ensure_ascii=False, default=str)
            file.write(f"{line}\n".encode())
