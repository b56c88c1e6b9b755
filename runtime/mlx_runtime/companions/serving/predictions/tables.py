"""Rows of files that pyarrow reads: Parquet, JSON lines and CSV, read forward, a few rows at a time."""

import contextlib
import io
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow import csv, parquet
from pyarrow.json import ParseOptions, ReadOptions, read_json

from mlx_runtime.companions.serving.schema import STRING, Column, RowError
from mlx_runtime.data.batches import Batch
from mlx_runtime.errors import UsageError, short_message, suggest

LINES_BYTES = 1 << 20
"""Bytes of JSON that are parsed at a time, in whole lines."""

Values = Sequence[Any] | np.ndarray
"""Values of a column, one per row: an array (rows, ...), or a list."""


class Rows(NamedTuple):
    """Successive rows."""

    size: int
    columns: Batch  # those that predict reads; a list of values if rows differ in shape
    kept: Mapping[str, pa.Array]  # those that are copied to the output


NO_ROWS = Rows(0, {}, {})


class FileRows:
    """The rows of a file, or of the Parquet files in a folder.

    Args:
        path: a file of Parquet, JSON lines or CSV, or a folder.
        columns: columns to read, and the types of their values.
        keep: names of further columns to read.
        size: rows to decode at a time.

    Raises:
        UsageError: it cannot be read, is not of the type in its name, or lacks a column.
    """

    def __init__(self, path: Path, columns: Sequence[Column], keep: Sequence[str], size: int) -> None:
        self.title, self._path, self._size, self._columns, self._keep = str(path), path, size, columns, keep
        self._file = path  # the one of a folder that is being read
        self._names = list(dict.fromkeys([*(column.name for column in columns), *keep]))
        self._start = self._position = 0
        self._rest: Any = ()
        self._batches = self._scan()
        self._refill()

    def _refill(self) -> None:
        """Decode the next rows, if there are any."""
        try:
            self._rest = next(self._batches, ())
        except UsageError:
            raise
        except (ValueError, OSError) as error:  # pa.ArrowInvalid is a ValueError
            raise UsageError(f"cannot read {self._file}: {short_message(error)}") from error

    def read(self, start: int, count: int) -> Rows:
        """Return the rows from `start` on: `count`, or fewer at the end. `start` never decreases.

        Raises:
            RowError: a row does not fit its column. The message names the file, the row and the column.
        """
        first = self._start = start
        found = []
        while count:
            if not len(self._rest):
                self._refill()
            if not len(self._rest):
                break
            skipped = min(start - self._position, len(self._rest))
            part = self._rest.slice(skipped, count)
            self._rest = self._rest.slice(skipped + len(part))
            self._position += skipped + len(part)
            if len(part):
                found.append(part)
                start, count = self._position, count - len(part)
        if not found:
            return NO_ROWS
        try:
            tables = [pa.Table.from_batches([part]) for part in found]
            table = pa.concat_tables(tables, promote_options="permissive").combine_chunks()
        except pa.ArrowException as error:
            raise UsageError(f"{self._path}: values of a column have no common type: {short_message(error)}") from error
        kept = {name: table[name].chunk(0) for name in self._keep}
        return Rows(len(table), self._checked(table, first), kept)

    def _checked(self, table: pa.Table, start: int) -> Batch:
        """Return the columns of rows as tensors (rows, ...), or as a list of one value per row if shapes differ."""
        batch: Batch = {}
        for column in self._columns:
            items = values_of(table[column.name].chunk(0))
            whole = Column(column.name, column.dtype, (len(items), *column.shape))
            if column.dtype != STRING:
                with contextlib.suppress(RowError):  # found again below, with its row
                    batch[column.name] = whole.tensor(items)
                    continue
            rows = batch[column.name] = []
            for number, item in enumerate(items, start):
                try:
                    rows.append(column.tensor(item))
                except RowError as error:
                    raise RowError(f"{self._path}: row {number}: {error}") from None
        return batch

    def _scan(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows. Those of Parquet begin with the row group of `_start`."""
        types = {column.name: _type_of(column) for column in self._columns}
        for file in files_of(self._path):
            self._file = file
            match file.suffix.lower():
                case ".csv":
                    yield from self._scan_csv(file, types)
                case ".parquet":
                    yield from self._scan_parquet(parquet.ParquetFile(file))
                case _:
                    yield from self._scan_lines(file, types)

    def _scan_csv(self, file: Path, types: dict[str, pa.DataType]) -> Iterator[pa.RecordBatch]:
        self._refuse_lacking(header := csv.open_csv(file).schema.names)
        if nested := next((column for column in self._columns if column.shape), None):
            field = f"{nested.name}, {nested.text}"
            raise UsageError(f"{file}: a field of CSV cannot hold {field}; use Parquet")
        texts = dict.fromkeys(self._names, pa.string()) | types
        reading = csv.ReadOptions(use_threads=False)  # errors have the number of the row
        parsing = csv.ParseOptions(newlines_in_values=True)
        converting = csv.ConvertOptions(column_types=texts, include_columns=self._names)
        try:
            yield from filter(len, csv.open_csv(file, reading, parsing, converting))
        except pa.ArrowException as error:
            message = re.sub(r"column #(\d+)", lambda found: f"column {header[int(found[1])]}", short_message(error))
            raise UsageError(f"cannot read {file}: {message}") from error

    def _scan_lines(self, file: Path, types: dict[str, pa.DataType]) -> Iterator[pa.RecordBatch]:
        """Yield the rows, parsed a few lines at a time: pyarrow.json.open_json reads a gigabyte ahead."""
        parsing, number = ParseOptions(pa.schema(types), unexpected_field_behavior="ignore"), 0
        found: list[str] = []  # in the first lines
        with file.open("rb") as stream:
            while lines := stream.readlines(LINES_BYTES):
                first, rows = number + 1, []
                for number, line in enumerate(lines, first):
                    if line.strip():
                        rows.append(_object(line, f"{file}: line {number}"))
                content = b"".join(lines)
                reading = ReadOptions(use_threads=False, block_size=len(content) + 1)
                if rows:
                    if not found:
                        self._refuse_lacking(found := list(dict.fromkeys(name for row in rows for name in row)))
                    try:
                        table = read_json(io.BytesIO(content), reading, parsing)
                    except pa.ArrowException as error:
                        raise UsageError(f"{file}: {short_message(error)}, counted from line {first}") from error
                    for name in self._names[len(types) :]:  # those to keep: pyarrow would infer dates from texts
                        table = table.append_column(name, kept_array(name, [row.get(name) for row in rows]))
                    yield from table.to_batches()

    def _scan_parquet(self, file: parquet.ParquetFile) -> Iterator[pa.RecordBatch]:
        """Yield the rows, decoded a few at a time: pyarrow.dataset would decode whole row groups."""
        self._refuse_lacking(file.schema_arrow.names)
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if self._position + rows <= self._start:
                self._position += rows
            else:
                batches = file.iter_batches(self._size, row_groups=[group], columns=self._names, use_threads=False)
                yield from map(_without_dictionaries, batches)

    def _refuse_lacking(self, found: Sequence[str]) -> None:
        """Raise UsageError if a file lacks a column, or has one of them twice."""
        if missing := [column for column in self._columns if column.name not in found]:
            lacking = ", ".join(f"{item.name} ({item.text})" for item in missing)
            raise UsageError(f"{self._file} lacks {lacking}; its columns are {', '.join(found) or 'none'}")
        for name in self._names:
            if (count := found.count(name)) == 0:
                raise UsageError(f"{self._file} lacks {name}, named by --keep.{suggest(name, found)}")
            if count > 1:
                raise UsageError(f"{self._file} has {count} columns {name}; rename or remove the others")


def files_of(path: Path) -> list[Path]:
    """Return the files of a path: itself, or the Parquet files in a folder, without hidden ones."""
    if not path.is_dir():
        return [path]
    found = sorted(filter(Path.is_file, path.rglob("*.parquet")))
    return [file for file in found if not any(part[0] in "._" for part in file.relative_to(path).parts)]


def kept_array(name: str, values: Sequence[Any], kind: pa.DataType | None = None) -> pa.Array:
    """Return the values of a column that is copied to the output."""
    try:
        return pa.array(values, kind)
    except (ValueError, TypeError, OverflowError) as error:  # those of Arrow are ValueErrors and TypeErrors
        raise UsageError(f"--keep {name}: its values have no common type: {short_message(error)}") from error


def _object(line: bytes, title: str) -> dict[str, Any]:
    """Return the object in a line of JSON. pyarrow does not check this first: `null` crashes it (26.0)."""
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{title} is not JSON: {short_message(error)}") from error
    if not isinstance(row, dict):
        raise UsageError(f"{title} is not a JSON object")
    return row


def _without_dictionaries(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a batch with values in place of dictionaries, which differ between batches."""
    kinds = [kind.value_type if pa.types.is_dictionary(kind) else kind for kind in batch.schema.types]
    return batch.cast(pa.schema(list(zip(batch.schema.names, kinds, strict=True))))


def _type_of(column: Column) -> pa.DataType:
    """Return the type that texts are parsed as. Whether the values fit the column is checked later."""
    kinds = {STRING: pa.string(), "bool": pa.bool_()}
    kind = kinds.get(column.dtype, pa.float64() if "float" in column.dtype else pa.int64())
    for _ in column.shape:
        kind = pa.list_(kind)
    return kind


def values_of(array: pa.Array) -> Values:
    """Return an Arrow array as an array (rows, ...), or as a list if rows are null or differ in shape."""
    kind = array.type
    if array.null_count:
        rows = values_of(array.filter(array.is_valid()))
        present = iter(rows.tolist() if isinstance(rows, np.ndarray) and rows.ndim == 1 else rows)
        return [next(present) if valid else None for valid in array.is_valid().to_pylist()]
    if isinstance(kind, pa.FixedShapeTensorType):
        items = values_of(array.storage.flatten())
        tensors = np.asarray(items, None if isinstance(items, np.ndarray) else object).reshape(-1, *kind.shape)
        if kind.permutation:
            tensors = tensors.transpose(0, *(axis + 1 for axis in kind.permutation))
        return tensors if isinstance(items, np.ndarray) else list(tensors.tolist())
    if is_list(kind):
        items, lengths = values_of(array.flatten()), array.value_lengths().to_numpy()
        if isinstance(items, np.ndarray) and len({*lengths.tolist()}) == 1:
            return items.reshape(len(array), lengths[0], *items.shape[1:])
        ends = lengths.cumsum().tolist()
        return [items[start:end] for start, end in itertools.pairwise([0, *ends])]
    if is_number(kind):
        return np.array(array.to_numpy(zero_copy_only=False))
    return list(array.to_pylist())


def is_list(kind: pa.DataType) -> bool:
    """Return True for lists of any or a fixed length."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def is_number(kind: pa.DataType) -> bool:
    """Return True for integers, floating-point numbers and booleans."""
    return bool(pa.types.is_floating(kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind))
