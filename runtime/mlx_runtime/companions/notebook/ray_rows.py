"""The rows of a Dataset of Ray Data that workers cannot read by themselves, as a torch Dataset."""

import contextlib
import sys
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from mlx_runtime.companions import part
from mlx_runtime.data.batches import dataset_error
from mlx_runtime.errors import UsageError
from mlx_runtime.storage.files import size_text

MOST_BYTES = 1_000_000_000
"""Maximum size of the rows in memory, because every worker loads them."""

BATCH_ROWS = 4096

CURE = "convert it with map_batches, or drop it with drop_columns"

Column = torch.Tensor | list[str]
"""Values of all rows."""


class RayRows(Dataset[dict[str, Any]]):
    """Rows as dicts of tensors and text, by column.

    Args:
        columns: at least one column; all have the same number of rows.
    """

    def __init__(self, columns: dict[str, Column]) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {name: column[row] for name, column in self.columns.items()}


def read_rows(dataset: Any, title: str) -> RayRows:
    """Read a Dataset of Ray Data into the memory of this process, in its order.

    Args:
        dataset: the Dataset.
        title: its name in errors, like `dataset['val']`.

    Raises:
        DatasetError: it cannot be read.
        UsageError: it has no rows or too many, or a column has other values than numbers of one shape and text.
    """
    part("ray.streams").keep_order(dataset.context)
    parts: dict[str, list[Any]] = {}
    size_bytes = 0
    try:
        for batch in dataset.iter_batches(batch_size=BATCH_ROWS, batch_format="numpy"):
            size_bytes += sum(_size_bytes(array) for array in batch.values())
            if size_bytes > MOST_BYTES:
                cure = "write it to files with write_parquet(path), and pass ray.data.read_parquet(path)"
                raise UsageError(
                    f"{title} has more than {size_text(MOST_BYTES)}, the maximum for rows in memory; {cure}"
                )
            for name, array in batch.items():
                parts.setdefault(name, []).append(array)
    except UsageError:
        raise
    except Exception as error:  # of Ray, or of user code
        raise dataset_error(error, f"{title} cannot be read") from error
    if not parts:
        raise UsageError(f"{title} has no rows")
    columns = {name: _column(arrays, f"{title}: column {name!r}") for name, arrays in parts.items()}
    rows = max(map(len, columns.values()))
    for name, column in columns.items():
        if len(column) < rows:
            raise UsageError(f"{title}: column {name!r} has {len(column)} values in {rows} rows; {CURE}")
    return RayRows(columns)


def _size_bytes(array: "np.ndarray[Any, Any]") -> int:
    values = array if array.dtype == object else ()
    return array.nbytes + sum(getattr(value, "nbytes", 0) or sys.getsizeof(value) for value in values)


def _column(arrays: "list[np.ndarray[Any, Any]]", title: str) -> Column:
    kinds = {str(array.dtype) for array in arrays}
    if any(array.dtype.kind not in "biufc" for array in arrays):
        values = [value for array in arrays for value in array]
        if all(isinstance(value, str) for value in values):
            return values
        kinds = {type(value).__name__ for value in values}
        arrays = [np.asarray(value)[None] for value in values]  # lists may have one shape
    with contextlib.suppress(TypeError, ValueError):
        return torch.from_numpy(np.concatenate(arrays))
    raise UsageError(f"{title} holds {', '.join(sorted(kinds))}, neither numbers of one shape nor text; {CURE}")
