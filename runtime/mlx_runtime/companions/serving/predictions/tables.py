"""Files of rows: Parquet, JSON lines, CSV and NumPy, read forward, a few rows at a time."""

import bisect
import contextlib
import itertools
import json
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
import pyarrow as pa
from pyarrow import csv, parquet

from mlx_runtime.companions.serving.schema import STRING, Column, RowError
from mlx_runtime.errors import UsageError, short_message, suggest
from mlx_runtime.storage.local import open_regular

LINE_BYTES = 256 << 20
"""Maximum length of a line of JSON."""

CSV_BYTES = 1 << 20
"""Bytes of a CSV file that are parsed at a time."""

Values = Sequence[Any] | np.ndarray
"""Values of a column, one per row: an array (rows, ...), or a list."""


class RowFile(Protocol):
    """An open file of rows."""

    def read(self, start: int, count: int) -> tuple[int, dict[str, Values]]:
        """Return the number of rows from `start` on, at most `count`, and their values. `start` never decreases."""
        ...

    def total(self) -> int | None:
        """Return the number of rows, or an estimate of it; None if it is unknown."""
        ...

    def close(self) -> None:
        """Close the file."""


def open_rows(path: Path, columns: Sequence[Column], keep: Sequence[str], size: int) -> RowFile:
    """Open a file of rows for reading some of its columns, `size` rows at a time.

    Raises:
        UsageError: it cannot be read, is not of the type in its name, or lacks a column.
    """
    kinds = {".parquet": ParquetRows, ".csv": CsvRows, ".npy": NumpyRows, ".npz": NumpyRows}
    kind: Any = kinds.get(path.suffix.lower(), JsonRows)
    with file_errors(path, kind.title):
        file: RowFile = kind(path, columns, keep, size)
        return file


@contextlib.contextmanager
def file_errors(path: Path, title: str) -> Iterator[None]:
    """Translate errors of libraries that read a file."""
    try:
        yield
    except UsageError:
        raise
    except (ValueError, EOFError, zipfile.BadZipFile, pa.ArrowException) as error:
        raise UsageError(f"{path} is not a valid {title}: {short_message(error)}") from error
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or short_message(error)}") from error


def refuse_missing(path: Path, found: Sequence[str], columns: Sequence[Column], keep: Sequence[str]) -> None:
    """Raise UsageError if a file lacks columns that predict reads, or that are to be kept, or has one of them twice."""
    known = f"its columns are {', '.join(found) or 'none'}"
    if missing := [column for column in columns if column.name not in found]:
        raise UsageError(f"{path} lacks {', '.join(f'{item.name} ({item.text})' for item in missing)}; {known}")
    for name in keep:
        if name not in found:
            raise UsageError(f"{path} lacks {name}, named by --keep.{suggest(name, found)}")
    for name in (*(column.name for column in columns), *keep):
        if (count := found.count(name)) > 1:
            raise UsageError(f"{path} has {count} columns {name}; rename or remove the others")


class _Batches:
    """Rows of successive Arrow record batches."""

    def __init__(self, batches: Iterator[pa.RecordBatch], position: int = 0) -> None:
        self.position = position
        self._batches, self._rest = batches, None

    def take(self, start: int, count: int) -> pa.Table | None:
        """Return up to `count` rows from `start` on; None at the end."""
        found = []
        while count:
            if self._rest is None or not len(self._rest):
                self._rest = next(self._batches, None)
                if self._rest is None:
                    break
            skipped = min(start - self.position, len(self._rest))
            part = self._rest.slice(skipped, count)
            self._rest = self._rest.slice(skipped + len(part))
            self.position += skipped + len(part)
            if len(part):
                found.append(part)
                start, count = self.position, count - len(part)
        return pa.Table.from_batches(found) if found else None


class ParquetRows:
    """Rows of a Parquet file."""

    title = "Parquet file"

    def __init__(self, path: Path, columns: Sequence[Column], keep: Sequence[str], size: int) -> None:
        self._path, self._size = path, size
        self._stream = open_regular(str(path))
        self._file = parquet.ParquetFile(self._stream)
        refuse_missing(path, self._file.schema_arrow.names, columns, keep)
        self._names = list(dict.fromkeys([*(column.name for column in columns), *keep]))
        sizes = [self._file.metadata.row_group(number).num_rows for number in range(self._file.num_row_groups)]
        self._starts: list[int] = [0, *itertools.accumulate(sizes)]
        self._batches = self._from(0)

    def read(self, start: int, count: int) -> tuple[int, dict[str, Values]]:
        with file_errors(self._path, self.title):
            if self._group(start) > self._group(self._batches.position):
                self._batches = self._from(self._group(start))
            table = self._batches.take(start, count)
        if table is None:
            return 0, {}
        return len(table), {name: values_of(table[name].combine_chunks()) for name in self._names}

    def total(self) -> int:
        return self._starts[-1]

    def close(self) -> None:
        self._stream.close()

    def _group(self, row: int) -> int:
        return bisect.bisect_right(self._starts, row) - 1

    def _from(self, group: int) -> _Batches:
        groups = list(range(group, self._file.num_row_groups))
        batches = self._file.iter_batches(self._size, row_groups=groups, columns=self._names, use_threads=False)
        return _Batches(iter(batches), self._starts[min(group, len(self._starts) - 1)])


class CsvRows:
    """Rows of a CSV file with a header. Numbers are those of columns that predict reads; other values are texts."""

    title = "CSV file"

    def __init__(self, path: Path, columns: Sequence[Column], keep: Sequence[str], size: int) -> None:
        self._path, self._file, self._rows = path, open_regular(str(path)), 0
        self._bytes = path.stat().st_size
        with open_regular(str(path)) as file:
            header = csv.open_csv(file, csv.ReadOptions(block_size=CSV_BYTES)).schema.names
        refuse_missing(path, header, columns, keep)
        for column in columns:
            if column.shape:
                raise UsageError(f"{path}: a field of CSV cannot hold {column.name}, {column.text}; use Parquet")
        self._types = {column.name: column.dtype for column in columns}
        self._names = list(dict.fromkeys([*self._types, *keep]))
        texts = csv.ConvertOptions(column_types=dict.fromkeys(header, pa.string()), include_columns=self._names)
        reading, parsing = csv.ReadOptions(block_size=CSV_BYTES), csv.ParseOptions(newlines_in_values=True)
        self._batches = _Batches(csv.open_csv(self._file, reading, parsing, texts))

    def read(self, start: int, count: int) -> tuple[int, dict[str, Values]]:
        with file_errors(self._path, self.title):
            table = self._batches.take(start, count)
        if table is None:
            return 0, {}
        self._rows = self._batches.position
        texts = {name: table[name].combine_chunks() for name in self._names}
        return len(table), {name: _parsed(array, self._types.get(name, STRING)) for name, array in texts.items()}

    def total(self) -> int | None:
        return int(self._rows * self._bytes / self._file.tell()) if self._rows else None

    def close(self) -> None:
        self._file.close()


def _parsed(texts: pa.Array, dtype: str) -> Values:
    """Return the numbers in texts; values that are no numbers remain texts, which the schema refuses."""
    if dtype == STRING:
        unchanged: list[str] = texts.to_pylist()
        return unchanged
    kind = pa.float64() if "float" in dtype else pa.bool_() if dtype == "bool" else pa.int64()
    try:
        return np.array(texts.cast(kind))
    except pa.ArrowInvalid:
        return [_number(text) for text in texts.to_pylist()]


def _number(text: str) -> Any:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return {"true": True, "false": False}.get(text.lower(), text)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        raise ValueError(f"it has one of the columns {', '.join(row)} twice")
    return row


class JsonRows:
    """Rows of a file of JSON objects, one per line. Empty lines are no rows."""

    title = "file of JSON lines"

    def __init__(self, path: Path, columns: Sequence[Column], keep: Sequence[str], size: int) -> None:
        self._path, self._file, self._position = path, open_regular(str(path)), 0
        self._bytes, self._columns, self._keep = path.stat().st_size, {column.name: column for column in columns}, keep

    def read(self, start: int, count: int) -> tuple[int, dict[str, Values]]:
        values: dict[str, list[Any]] = {name: [] for name in (*self._columns, *self._keep)}
        rows = 0
        while rows < count and (line := self._line()):
            self._position += 1
            if self._position > start:
                row = self._row(line, self._position - 1)
                for name, items in values.items():
                    items.append(row.get(name))
                rows += 1
        return rows, dict(values)

    def total(self) -> int | None:
        return int(self._position * self._bytes / self._file.tell()) if self._position else None

    def close(self) -> None:
        self._file.close()

    def _line(self) -> bytes:
        """Return the next line that is not empty; nothing at the end."""
        with file_errors(self._path, self.title):
            while line := self._file.readline(LINE_BYTES):
                if line.strip():
                    if len(line) == LINE_BYTES:
                        raise ValueError(f"row {self._position} is longer than {LINE_BYTES >> 20} MiB")
                    return line
        return b""

    def _row(self, line: bytes, number: int) -> dict[str, Any]:
        at = f"{self._path}: row {number}"
        try:
            row = json.loads(line, object_pairs_hook=_unique)
        except RecursionError:
            raise RowError(f"{at} is nested too deeply") from None
        except ValueError as error:
            raise RowError(f"{at} is not JSON: {short_message(error)}") from None
        if not isinstance(row, dict):
            raise RowError(f"{at} is a {type(row).__name__}; expected a JSON object with the columns of the row")
        for name, column in self._columns.items():
            if name not in row:
                raise RowError(f"{at}: {name} is missing; expected {column.text}")
        return row


class NumpyRows:
    """Rows of one array (.npy), or of several by column (.npz). Arrays of objects, which hold code, are refused."""

    title = "NumPy file"

    def __init__(self, path: Path, columns: Sequence[Column], keep: Sequence[str], size: int) -> None:
        self._path, self._stream = path, open_regular(str(path))
        if path.suffix.lower() == ".npy":
            if len(columns) != 1 or keep:
                names = ", ".join(dict.fromkeys([*(column.name for column in columns), *keep]))
                raise UsageError(f"{path} holds one column, but {names} are needed; use .npz")
            self._arrays = {columns[0].name: _Array(self._stream)}
        else:
            archive = zipfile.ZipFile(self._stream)
            members = [name.removesuffix(".npy") for name in archive.namelist()]
            refuse_missing(path, members, columns, keep)
            wanted = dict.fromkeys([*(column.name for column in columns), *keep])
            self._arrays = {name: _Array(archive.open(f"{name}.npy")) for name in wanted}
        counts = {name: array.rows for name, array in self._arrays.items()}
        if len({*counts.values()}) > 1:
            raise UsageError(f"{path}: columns have different numbers of rows: {counts}")

    def read(self, start: int, count: int) -> tuple[int, dict[str, Values]]:
        with file_errors(self._path, self.title):
            values = {name: array.read(start, count) for name, array in self._arrays.items()}
        return len(next(iter(values.values()))), values

    def total(self) -> int:
        return next(iter(self._arrays.values())).rows

    def close(self) -> None:
        self._stream.close()


class _Array:
    """An array in a file, read forward. Mapping it would count as memory of this process."""

    def __init__(self, file: IO[bytes]) -> None:
        version = np.lib.format.read_magic(file)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"its format has version {version}")
        header: Any = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, self._dtype = header(file)
        if self._dtype.kind not in "biufUSM" or (self._dtype.kind == "f" and self._dtype.itemsize > 8):
            raise ValueError(f"it holds {self._dtype}; save numbers or texts")
        if not shape or min(shape) < 0 or (fortran and len(shape) > 1):
            raise ValueError("save an array (rows, ...) in C order: numpy.ascontiguousarray")
        self.rows = int(shape[0])
        self._shape, self._file, self._position = shape[1:], file, 0
        self._row_bytes = int(np.prod(self._shape, dtype=np.int64)) * self._dtype.itemsize

    def read(self, start: int, count: int) -> Values:
        count = max(0, min(count, self.rows - start))
        if count:
            self._file.seek((start - self._position) * self._row_bytes, 1)
            self._position = start + count
        content = self._file.read(count * self._row_bytes)
        if len(content) < count * self._row_bytes:
            raise ValueError("it is cut off")
        array = np.frombuffer(bytearray(content), self._dtype).reshape(count, *self._shape)
        if self._dtype.kind in "USM":
            texts: list[Any] = array.astype(str).tolist()
            return texts
        return array.astype(self._dtype.newbyteorder("="), copy=False)


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


def checked(values: Mapping[str, Values], columns: Sequence[Column], path: Path, start: int) -> dict[str, Any]:
    """Return the columns of rows as tensors (rows, ...), or as a list of one value per row if shapes differ.

    Raises:
        RowError: a row does not fit its column. The message names the file, the row and the column.
    """
    batch: dict[str, Any] = {}
    for column in columns:
        items = values[column.name]
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
                raise RowError(f"{path}: row {number}: {error}") from None
    return batch
