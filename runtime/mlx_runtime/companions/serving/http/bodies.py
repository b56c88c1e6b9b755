"""Bodies of requests and answers: rows in JSON, `.npy` or Arrow, checked as whole columns."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mlx_runtime.companions.serving.http.negotiation import JSON, NPY, BodyError
from mlx_runtime.companions.serving.schema import STRING, Column, RowError, Schema
from mlx_runtime.data.batches import Batch
from mlx_runtime.errors import short_message

MAX_NPY_HEADER = 10_000

MAX_LISTS = 1 << 20
"""Lists and strings of a body in Arrow that become objects of Python: up to 1 µs each, for which others wait."""

MAX_VALUES = 4 << 20
"""Values of a body in JSON, of which a list or object counts as four, because it takes that much longer to make."""

BODY_HINT = 'send {"rows": [{column: value, ...}, ...]}; GET /example returns such a body'


@dataclass(eq=False)
class Part:
    """Rows of a request that have equal shapes, as a batch."""

    batch: Batch
    rows: int
    numbers: Sequence[int]  # of its rows in the request
    answer: Any = None  # arrays (rows, ...) by output, or a list with the outputs or the error of each row

    @property
    def shapes(self) -> tuple[Any, ...]:
        """Shape of one row of each column. Parts with equal shapes can be computed in one batch."""
        return tuple(item.shape[1:] if isinstance(item, torch.Tensor) else None for item in self.batch.values())


class RowParser:
    """Turns the rows of requests into parts.

    Rows are checked a column at a time, and one by one only if that fails, to find those at fault.
    """

    def __init__(self, schema: Schema, max_rows: int) -> None:
        self._schema, self._max_rows = schema, max_rows
        self._columns = [Column(item.name, item.dtype, (None, *item.shape)) for item in schema.columns]
        self._known = {*schema.names, *schema.ignored}

    def parse(self, body: bytes, kind: str) -> tuple[list[Part], list[Any]]:
        """Return the parts of a request, and the error of each row, None for rows that fit the schema.

        Raises:
            BodyError: the body is not of its type, or has too many rows.
        """
        if kind == JSON:
            rows = json_rows(body)
            self._limit(len(rows))
            try:
                return self._parts(self._columns_of(rows), len(rows))
            except RowError:
                return self._one_by_one(rows)
        columns, count = (self._npy if kind == NPY else self._arrow)(body)
        try:
            return self._parts(columns, count)
        except RowError:
            return self._one_by_one([{name: column[row] for name, column in columns.items()} for row in range(count)])

    def _limit(self, rows: int) -> None:
        if rows > self._max_rows:
            raise BodyError(f"{rows:,} rows; a request may have {self._max_rows:,}", 413)

    def _columns_of(self, rows: list[Any]) -> Mapping[str, Any]:
        for row in rows:
            if not isinstance(row, dict) or not row.keys() <= self._known:
                raise RowError("a row has another form")
        try:
            return {column.name: [row[column.name] for row in rows] for column in self._columns}
        except KeyError as error:
            raise RowError("a column is missing") from error

    def _parts(self, columns: Mapping[str, Any], rows: int) -> tuple[list[Part], list[Any]]:
        batch: dict[str, Any] = {}
        for column in self._columns:
            values = columns[column.name]
            if column.dtype != STRING:
                batch[column.name] = column.tensor(values)
            elif all(isinstance(value, str) for value in values):
                batch[column.name] = values
            else:
                raise RowError("a value is not a string")
        return [Part(batch, rows, range(rows))] if rows else [], [None] * rows

    def _one_by_one(self, rows: Sequence[Any]) -> tuple[list[Part], list[Any]]:
        batches, errors = self._schema.batches(rows, self._max_rows)
        return [Part(batch, len(numbers), numbers) for numbers, batch in batches], errors

    def _npy(self, body: bytes) -> tuple[Mapping[str, Any], int]:
        if len(self._columns) != 1:
            names = ", ".join(self._schema.names)
            raise BodyError(f"an .npy file holds one column, and this model reads {names}; send JSON or Arrow", 415)
        array = npy_array(body)
        self._limit(len(array))
        return {self._columns[0].name: array}, len(array)

    def _arrow(self, body: bytes) -> tuple[Mapping[str, Any], int]:
        from mlx_runtime.companions.serving.http import arrow

        table = arrow.read(body, self._limit)
        for name in table.column_names:
            if name not in self._known:
                raise BodyError(f"there is no column {name!a:.60}; this model reads {', '.join(self._schema.names)}")
        for name in self._schema.names:
            if table.column_names.count(name) != 1:
                raise BodyError(f"the column {name} is missing, or occurs more than once")
        try:
            return {
                name: arrow.values(name, table.column(name), MAX_LISTS) for name in self._schema.names
            }, table.num_rows
        except (ValueError, TypeError, OverflowError, MemoryError) as error:  # ArrowInvalid is a ValueError
            raise BodyError(f"a column cannot be read: {short_message(error)}") from error


def json_rows(body: bytes) -> list[Any]:
    """Return the rows in a JSON body. Raises BodyError if it has another form."""
    import orjson

    values = body.count(b",") + 4 * (body.count(b"[") + body.count(b"{"))  # also counts marks in strings
    if values > MAX_VALUES:
        found = f"{values:,} values in JSON (lists count as four), of at most {MAX_VALUES:,}"
        raise BodyError(f"{found}; send fewer rows, or Arrow or .npy", 413)
    try:
        document = orjson.loads(body)
    except (ValueError, RecursionError) as error:
        raise BodyError(f"the body is not JSON: {short_message(error)}; {BODY_HINT}") from error
    if not isinstance(document, dict) or document.keys() != {"rows"} or not isinstance(document["rows"], list):
        raise BodyError(f"the body has another form; {BODY_HINT}")
    rows: list[Any] = document["rows"]
    return rows


def npy_array(body: bytes) -> "np.ndarray[Any, Any]":
    """Return the array in an `.npy` file, (rows, ...). Raises BodyError if it is not one of numbers."""
    file = io.BytesIO(body)
    try:
        version = np.lib.format.read_magic(file)
        readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        shape, fortran, dtype = readers[version](file, MAX_NPY_HEADER)
    except Exception as error:  # literal_eval of a hostile header raises many types
        raise BodyError(f"the body is not an .npy file: {short_message(error)}") from error
    if dtype.kind not in "biuf" or dtype.itemsize > 8:
        raise BodyError(f"the .npy file holds {dtype!s:.60}; expected numbers")
    if not shape or any(type(size) is not int or size < 0 for size in shape) or len(shape) > 32:
        raise BodyError("the .npy file holds no rows; expected an array (rows, ...)")
    count, size = 1, len(body) - file.tell()
    for length in shape:
        count *= length
    if count * dtype.itemsize != size:
        raise BodyError(f"the .npy file holds {size:,} bytes of numbers; its header says {count * dtype.itemsize:,}")
    flat = np.frombuffer(body, dtype, count, file.tell())
    array = flat.reshape(shape, order="F" if fortran else "C")
    return np.array(array, dtype.newbyteorder("="), order="C")


def in_rows(parts: Sequence[Part], errors: Sequence[Any]) -> list[Any]:
    """Return the outputs of each row by name, or the error that it caused."""
    rows = list(errors)
    for part in parts:
        if isinstance(part.answer, list):
            for number, answer in zip(part.numbers, part.answer, strict=True):
                rows[number] = answer
            continue
        names = part.answer.keys()
        for number, values in zip(part.numbers, zip(*part.answer.values(), strict=True), strict=True):
            rows[number] = dict(zip(names, values, strict=True))
    return rows


def json_answer(rows: Sequence[Any]) -> bytes:
    """Return the JSON of answers; NaN and infinity become null."""
    import orjson

    outputs = [{"error": short_message(row)} if isinstance(row, Exception) else row for row in rows]
    return bytes(orjson.dumps({"outputs": outputs}, option=orjson.OPT_SERIALIZE_NUMPY))


def npy_answer(rows: Sequence[Any], output: str | None) -> bytes:
    """Return one output of all rows as an `.npy` file. Raises BodyError if that is not possible."""
    names = list(rows[0]) if rows else []
    name = names[0] if output is None and len(names) == 1 else output
    if name not in names:
        raise BodyError(f"an .npy file holds one output; add ?output= with one of {', '.join(names)}", 406)
    try:
        array = np.stack([row[name] for row in rows])
    except ValueError as error:
        raise BodyError("outputs of rows of different lengths do not stack; ask for JSON or Arrow", 406) from error
    file = io.BytesIO()
    np.lib.format.write_array(file, array, allow_pickle=False)
    return file.getvalue()
