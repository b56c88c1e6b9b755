"""Batches from rows that are dicts: numbers of the same shape are stacked, other values become lists, an item per row.

Errors name the number of a row that does not match the others.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from mlx_runtime.errors import DatasetError

_NUMBERS = (bool, int, float, complex, np.generic)

PAD = "Pad them with a `collate` of the dataset, like DataCollatorWithPadding(tokenizer), or return equal shapes"


def stack(rows: Sequence[Any], numbers: Sequence[int], name: str) -> dict[str, Any]:
    """Return a batch of rows that are dicts with the same keys: {key: tensor (rows, ...), or a list}.

    Args:
        rows: Rows of the dataset.
        numbers: Number of each row, for errors.
        name: Name of the dataset in `Datasets`, for errors.

    Raises:
        DatasetError: Rows are not dicts, or differ in their keys or shapes.
    """
    for number, row in zip(numbers, rows, strict=True):
        if not isinstance(row, Mapping):
            raise DatasetError(
                f"datasets.{name} has no ray_map_batches, and row {number} is a {type(row).__name__}. Return a dict, "
                'or add a static method that stacks samples: ray_map_batches({"item": [sample, ...]}) -> '
                "{name: tensor (n, ...)}"
            )
        if row.keys() != rows[0].keys():
            raise DatasetError(
                f"datasets.{name}: row {number} has {_keys_of(row)}, but row {numbers[0]} has {_keys_of(rows[0])}; "
                "return the same keys for all rows, or add a `collate`"
            )
    batch = {}
    for key in rows[0]:
        values = [row[key] for row in rows]
        column = _column(values)
        if column is None:
            index = next((index for index, value in enumerate(values) if _shape(value) != _shape(values[0])), 0)
            shapes = [_shape(values[index]), _shape(values[0])]
            raise DatasetError(
                f"datasets.{name}: row {numbers[index]} has {key!r} of shape {shapes[0]}, but row {numbers[0]} has "
                f"{shapes[1]}. {PAD}"
            )
        batch[key] = column
    return batch


def culprit(collate: Callable[[list[Any]], Any], rows: Sequence[Any], numbers: Sequence[int]) -> str | None:
    """Describe the row that a function cannot collate, alone or with the first; None if only all rows together fail."""

    def fails(*some: Any) -> bool:
        try:
            collate(list(some))
        except Exception:
            return True
        return False

    for number, row in zip(numbers, rows, strict=True):
        if fails(row):
            return f"row {number}"
    for number, row in zip(numbers, rows, strict=True):
        if fails(rows[0], row):
            return f"row {number} together with row {numbers[0]}"
    return None


def _column(values: list[Any]) -> torch.Tensor | list[Any] | None:
    """Return the values of one key as a tensor, unchanged if they are not numbers, or None if the shapes differ."""
    first = values[0]
    if not isinstance(first, (torch.Tensor, np.ndarray, list, tuple, *_NUMBERS)):
        return values
    try:
        if isinstance(first, torch.Tensor):
            return torch.stack(values)
        column = torch.as_tensor(np.stack(values) if isinstance(first, np.ndarray) else values)
        if column.numel() or len({_shape(value) for value in values}) == 1:
            return column
        return None  # the first list is empty: torch would ignore the others
    except (TypeError, ValueError, RuntimeError, OverflowError):
        shapes = {_shape(value) for value in values}
        return values if None in shapes or len(shapes) == 1 else None


def _shape(value: Any) -> tuple[int, ...] | None:
    """Return the shape of an array of numbers; None for other values, like strings or lists of different lengths."""
    try:
        return tuple(torch.as_tensor(value).shape)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


def _keys_of(row: Mapping[str, Any]) -> str:
    return ", ".join(map(str, row)) or "nothing"
