"""Bodies of requests and answers: rows in JSON, checked as whole columns."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson
import torch
from starlette.exceptions import HTTPException

from mlx_runtime.companions.serving.predictor import part_of
from mlx_runtime.companions.serving.schema import STRING, Column, RowError, Schema
from mlx_runtime.data.batches import Batch
from mlx_runtime.errors import short_message

MAX_VALUES = 4 << 20
"""Values of a body, of which a list or object counts as four, because it takes that much longer to make."""

BODY_HINT = 'send {"rows": [{column: value, ...}, ...]}; GET /example returns such a body'


@dataclass(eq=False)
class Part:
    """Rows of a request that have equal shapes, as a batch."""

    batch: Batch
    numbers: Sequence[int]  # of its rows in the request

    @property
    def shapes(self) -> tuple[Any, ...]:
        """Shape of one row of each column. Parts with equal shapes can be computed in one batch."""
        return tuple(item.shape[1:] if isinstance(item, torch.Tensor) else None for item in self.batch.values())


def parse(schema: Schema, body: bytes, max_rows: int, max_batch: int) -> tuple[list[Part], list[Any]]:
    """Return the rows of a body in parts of at most `max_batch`, and the error of each row, None if it fits the schema.

    Rows are checked a column at a time, and one by one only if that fails, to find those at fault.

    Raises:
        HTTPException: the body has another form, or has too many rows.
    """
    rows = rows_in(body)
    if len(rows) > max_rows:
        raise HTTPException(413, f"{len(rows):,} rows; a request may have {max_rows:,}")
    try:
        batch = _columns_of(schema, rows)
    except RowError:
        batches, errors = schema.batches(rows, max_batch)
        return [Part(batch, numbers) for numbers, batch in batches], errors
    numbers = range(len(rows))
    starts = range(0, len(rows), max_batch)
    parts = [Part(part_of(batch, start, max_batch), numbers[start : start + max_batch]) for start in starts]
    return parts, [None] * len(rows)


def _columns_of(schema: Schema, rows: list[Any]) -> Batch:
    known = {*schema.names, *schema.ignored}
    if not all(isinstance(row, dict) and row.keys() <= known for row in rows):
        raise RowError("a row has another form")
    batch: dict[str, Any] = {}
    for column in schema.columns:
        try:
            values = [row[column.name] for row in rows]
        except KeyError as error:
            raise RowError(f"{column.name} is missing") from error
        if column.dtype != STRING:
            batch[column.name] = Column(column.name, column.dtype, (None, *column.shape)).tensor(values)
        elif all(isinstance(value, str) for value in values):
            batch[column.name] = values
        else:
            raise RowError("a value is not a string")
    return batch


def rows_in(body: bytes) -> list[Any]:
    """Return the rows in a body. Raises HTTPException if it has another form, or too many values."""
    values = body.count(b",") + 4 * (body.count(b"[") + body.count(b"{"))  # also counts marks in strings
    if values > MAX_VALUES:
        limit = f"of at most {MAX_VALUES:,}; send fewer rows"
        raise HTTPException(413, f"the body has {values:,} values (lists count as four), {limit}")
    try:
        document = orjson.loads(body)
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"the body is not JSON: {short_message(error)}; {BODY_HINT}") from error
    if not isinstance(document, dict) or document.keys() != {"rows"} or not isinstance(document["rows"], list):
        raise HTTPException(400, f"the body has another form; {BODY_HINT}")
    rows: list[Any] = document["rows"]
    return rows


def answer(rows: Sequence[Any]) -> bytes:
    """Return the JSON of outputs and errors; NaN and infinity become null.

    A row at a time, because orjson lets no other thread run while it writes.
    """
    outputs = [{"error": short_message(row)} if isinstance(row, Exception) else row for row in rows]
    return b'{"outputs":[%s]}' % b",".join(orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY) for row in outputs)
