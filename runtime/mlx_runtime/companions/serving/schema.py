"""The inputs of `predict`: the columns of a batch, the checks of rows, and example rows."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

import numpy as np
import torch

from mlx_runtime.data.batches import Batch, dtype_name
from mlx_runtime.errors import UsageError, suggest
from mlx_runtime.storage.documents import COUNT, TEXT, list_of, mapping_of, mapping_with, misfit

DOCUMENT = {
    "columns": mapping_of(mapping_with({"dtype": TEXT, "shape": list_of(COUNT.or_null())}, needs=("dtype", "shape"))),
    "ignored": list_of(TEXT),
}
"""Types of the fields in the document of a schema."""

STRING = "string"
"""The type of a column of texts."""

OTHERS = {str, bytes, dict, NoneType}
"""Types of values in lists that are no tensors."""

TYPES = {
    name: getattr(torch, name)
    for name in ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
}
"""Types of tensors in the columns of a schema."""


class RowError(UsageError):
    """A row does not fit the schema. The message names the column, the value and what was expected."""


@dataclass(frozen=True)
class Column:
    """A column of the batches that `predict` reads."""

    name: str
    dtype: str  # like `float32`, or `string`
    shape: tuple[int | None, ...] = ()  # of one row; None for a dimension that varies

    @property
    def text(self) -> str:
        """Description for messages, like `float32 (1, 8, 8)`."""
        sizes = ", ".join("any" if size is None else str(size) for size in self.shape)
        return f"{self.dtype} ({sizes}{',' if len(self.shape) == 1 else ''})" if self.shape else self.dtype

    def tensor(self, value: Any) -> torch.Tensor | str:
        """Return the value of one row, a tensor of `shape`, or a string.

        Raises:
            RowError: it has another type or shape, is out of range, or is not finite.
        """
        if self.dtype == STRING:
            if not isinstance(value, str):
                raise RowError(f"{self.name} is {_shown(value)}; expected a string")
            return value
        wanted = TYPES[self.dtype]
        try:
            given = value if isinstance(value, torch.Tensor) else _tensor_of(value)
        except RowError as error:
            raise RowError(f"{self.name}{error}; expected {self.text}") from None
        except ValueError:
            raise RowError(f"{self.name} has lists of different lengths; expected {self.text}") from None
        except (TypeError, RuntimeError, OverflowError):
            raise RowError(f"{self.name} is {_shown(value)}; expected {self.text}") from None
        shape = tuple(given.shape)
        if len(shape) != len(self.shape) or any(
            size is not None and size != own for size, own in zip(self.shape, shape, strict=True)
        ):
            raise RowError(f"{self.name} has shape {shape}; expected {self.text}")
        return self._converted(given, wanted)

    def _converted(self, given: torch.Tensor, wanted: torch.dtype) -> torch.Tensor:
        kinds = [(item.is_complex, item.is_floating_point, item != torch.bool) for item in (given.dtype, wanted)]
        if given.numel() and kinds[0] > kinds[1]:  # would lose its fraction or its value
            raise RowError(f"{self.name} is {dtype_name(given)}; expected {self.text}")
        made = given.to(wanted)
        if wanted.is_floating_point:
            # The sum is finite only if all numbers are, and takes a fifth of the time.
            if not math.isfinite(made.sum()) and not torch.isfinite(made).all():
                raise RowError(f"{self.name} holds NaN or infinity; expected finite numbers")
        elif given.dtype not in (wanted, torch.bool) and not torch.equal(made.to(given.dtype), given):
            limits = torch.iinfo(wanted)
            raise RowError(f"{self.name} holds numbers outside of {self.dtype}: {limits.min} … {limits.max}")
        return made


@dataclass(frozen=True)
class Schema:
    """The columns that `predict` reads.

    Attributes:
        columns: Columns that each row must have.
        ignored: Names of other columns of the dataset, like labels, which rows may have.
        examples: Example rows as a batch, with the columns only; empty without examples.
    """

    columns: tuple[Column, ...]
    ignored: tuple[str, ...] = ()
    examples: Mapping[str, Any] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.columns)

    @property
    def text(self) -> str:
        """Description for messages, like `image: float32 (1, 8, 8), text: string`."""
        return ", ".join(f"{column.name}: {column.text}" for column in self.columns)

    @classmethod
    def of_batch(cls, batch: Batch, shapes: Mapping[str, Sequence[Sequence[int]]] | None = None) -> "Schema":
        """Return the schema of a batch, whose rows become the examples.

        Args:
            batch: tensors (rows, ...) and lists of strings, by column.
            shapes: further shapes of rows, by column; a dimension in which they differ varies.
        """
        columns = []
        for name, value in batch.items():
            if not isinstance(value, torch.Tensor):
                columns.append(Column(name, STRING))
                continue
            seen = [tuple(value.shape[1:]), *map(tuple, (shapes or {}).get(name, ()))]
            seen = [shape for shape in seen if len(shape) == value.ndim - 1]
            shape = tuple(sizes[0] if len({*sizes}) == 1 else None for sizes in zip(*seen, strict=True))
            columns.append(Column(name, dtype_name(value), shape))
        return cls(tuple(columns), (), dict(batch))

    def narrowed(self, names: Sequence[str]) -> "Schema":
        """Return the schema with only these columns; the others are ignored."""
        kept = tuple(column for column in self.columns if column.name in names)
        left_out = tuple(column.name for column in self.columns if column.name not in names)
        examples = {name: value for name, value in self.examples.items() if name in names}
        return Schema(kept, (*self.ignored, *left_out), examples)

    def row(self, row: Any) -> dict[str, torch.Tensor | str]:
        """Check one row. Return its columns: tensors of their shapes, and strings.

        Raises:
            RowError: it lacks a column, has an unknown one, or a value that does not fit.
        """
        if not isinstance(row, Mapping):
            raise RowError(f"the row is {_shown(row)}; expected a mapping with {self.text}")
        for name in row:
            if name not in self.names and name not in self.ignored:
                raise RowError(f"there is no column {name!r:.60}.{suggest(str(name)[:60], self.names)}")
        for column in self.columns:
            if column.name not in row:
                raise RowError(f"{column.name} is missing; expected {column.text}")
        return {column.name: column.tensor(row[column.name]) for column in self.columns}

    def batches(self, rows: Sequence[Any], limit: int) -> tuple[list[tuple[list[int], Batch]], list[Any]]:
        """Check rows one by one, and group those of equal shapes.

        Return batches of at most `limit` rows, each with its row numbers, and the error of each row, None if it fits.
        """
        checked: dict[int, dict[str, Any]] = {}
        errors: list[RowError | None] = [None] * len(rows)
        groups: dict[tuple[Any, ...], list[int]] = {}
        for number, row in enumerate(rows):
            try:
                values = checked[number] = self.row(row)
            except RowError as error:
                errors[number] = error
                continue
            groups.setdefault(tuple(getattr(value, "shape", None) for value in values.values()), []).append(number)
        parts = [
            numbers[start : start + limit] for numbers in groups.values() for start in range(0, len(numbers), limit)
        ]
        return [(numbers, self.stack([checked[number] for number in numbers])) for numbers in parts], errors

    def stack(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        """Return a batch of checked rows with equal shapes."""
        return {
            column.name: [row[column.name] for row in rows]
            if column.dtype == STRING
            else torch.stack([row[column.name] for row in rows])
            for column in self.columns
        }

    def example_rows(self) -> list[dict[str, Any]]:
        """Return the example rows as plain values: lists, numbers and strings by column."""
        size = min((len(value) for value in self.examples.values()), default=0)
        plain = {name: value if isinstance(value, list) else value.tolist() for name, value in self.examples.items()}
        return [{name: values[number] for name, values in plain.items()} for number in range(size)]

    def document(self) -> dict[str, Any]:
        """Return the schema as plain values, without examples."""
        columns = {column.name: {"dtype": column.dtype, "shape": list(column.shape)} for column in self.columns}
        return {"columns": columns, "ignored": list(self.ignored)}

    @classmethod
    def from_document(cls, document: Any, examples: Batch | None = None) -> "Schema":
        """Return the schema of a document. Raises ValueError, with one line, if it has another form."""
        if problem := misfit(document, DOCUMENT, needs=("columns",)):
            raise ValueError(problem)
        columns = []
        for name, item in document["columns"].items():
            if item["dtype"] not in (*TYPES, STRING):
                raise ValueError(
                    f"columns.{name}.dtype is {item['dtype']!a:.40}, not one of {', '.join(TYPES)}, {STRING}"
                )
            columns.append(Column(name, item["dtype"], tuple(item["shape"])))
        return cls(tuple(columns), tuple(document.get("ignored", ())), examples or {})


def _tensor_of(value: Any) -> torch.Tensor:
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.kind not in "biuf":
            raise TypeError
        return torch.from_numpy(np.asarray(value, order="C"))  # np.ascontiguousarray would make scalars vectors
    if not isinstance(value, list | tuple | bool | int | float):
        raise TypeError
    if isinstance(value, float):
        return torch.tensor(value, dtype=torch.float64)
    _refuse_others(value)
    array = np.asarray(value)  # faster than torch for nested lists
    if array.dtype in (object, np.uint64) and all(isinstance(item, int | float | np.uint64) for item in array.flat):
        raise RowError(" holds integers outside of int64")
    if array.dtype.kind not in "biuf":
        raise TypeError
    return torch.from_numpy(array)


def _refuse_others(value: Any) -> None:
    """Raise RowError for strings, mappings and None in nested lists, with the position of one, like `[0][3]`.

    NumPy would store all strings with the length of the longest one.
    """
    level = [value]
    while not (kinds := {*map(type, level)}) & OTHERS:
        if not kinds or kinds - {list, tuple}:
            return
        level = [*itertools.chain.from_iterable(level)]
    position, item = _other_in(value)
    raise RowError(f"{position if len(position) <= 40 else position[:40] + '…'} is {_shown(item)}")


def _other_in(value: Any) -> tuple[str, Any]:
    """Return the position of a string, mapping or None in nested lists, and itself; no position if there is none."""
    for number, item in enumerate(value):
        if type(item) in OTHERS:
            return f"[{number}]", item
        if isinstance(item, list | tuple) and (found := _other_in(item))[0]:
            return f"[{number}]{found[0]}", found[1]
    return "", None


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, list | tuple | dict | np.ndarray):
        return f"a {type(value).__name__}"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return f"{value!r:.60}"
