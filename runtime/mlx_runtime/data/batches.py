"""Batches from samples of a dataset: by its `ray_map_batches` or `collate`, or by key if they are dicts."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from operator import length_hint
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from mlx_runtime.distributed.collectives import lost_peer
from mlx_runtime.errors import DatasetError, MlxError, WorkerLostError, note, short_message

Batch = dict[str, Any]
"""Tensors (rows, ...) by name, and any other values that `ray_map_batches` returns, like a list of strings."""

PAD = "Pad them with a `collate` of the dataset, like DataCollatorWithPadding(tokenizer), or return equal shapes"

_NUMBERS = (bool, int, float, complex, np.generic)


class AdoptedDataset:
    """A dataset made by this package from an object of the user, its `owner`, whose attributes it has."""

    owner: Any


def owner_of(dataset: Any) -> Any:
    """Return the user's object that a dataset comes from."""
    return dataset.owner if isinstance(dataset, AdoptedDataset) else dataset


class BatchReader:
    """Reads samples of a map-style dataset and stacks them. Streams use only `stack`.

    A dataset stacks its own samples if it has `ray_map_batches({"item": samples})` or `collate(samples)`. Otherwise
    they are dicts, whose values are stacked by key.

    An exception in user code gets a note that names the dataset and the sample.
    """

    def __init__(self, dataset: Any, name: str) -> None:
        self.dataset, self.name = dataset, name

    def read(self, rows: Sequence[int]) -> Batch:
        """Return a batch of these rows."""
        remaining = iter(rows)
        try:
            if hasattr(self.dataset, "__getitems__"):
                samples = self.dataset.__getitems__(rows)
            else:
                samples = list(map(self.dataset.__getitem__, remaining))  # the fastest loop in Python
        except Exception as error:
            count = len(rows) - length_hint(remaining)
            which = f"sample {rows[count - 1]}" if count else f"samples {rows[0]} …"
            note(error, f"while reading {which} of datasets.{self.name}")
            raise
        return self.stack(samples, rows)

    def stack(self, samples: list[Any], rows: Sequence[int] | None = None) -> Batch:
        """Return a batch of samples; `rows` are their numbers. Raises DatasetError if it is not valid."""
        rows = range(len(samples)) if rows is None else rows
        method = "ray_map_batches" if hasattr(self.dataset, "ray_map_batches") else "collate"
        function = getattr(self.dataset, method, None)
        if function is None:
            return _tensors(stack(samples, rows, self.name), len(samples), f"datasets.{self.name}: rows are")
        try:
            batch = function({"item": samples} if method == "ray_map_batches" else samples)
        except Exception as error:
            note(error, f"in {method}, while stacking {len(samples)} samples of datasets.{self.name}")
            raise
        return _tensors(batch, len(samples), f"datasets.{self.name}: {method} returned")


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
                f"datasets.{name}: row {number} has the keys {[*row]}, but row {numbers[0]} has {[*rows[0]]}; "
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


def _tensors(batch: Any, rows: int, subject: str) -> Batch:
    """Return a batch with numbers as tensors of shape (rows, ...). Other values, like strings and nested lists, remain.

    Raises DatasetError, with a message that begins with `subject`, if it is not a mapping or the row counts differ.
    """
    if not isinstance(batch, Mapping) or not batch:
        kind = "nothing" if batch in (None, {}) else type(batch).__name__
        raise DatasetError(f"{subject} {kind}; it must return {{name: tensor}}")
    made = {}
    for key, value in batch.items():
        if not isinstance(key, str):
            raise DatasetError(f"{subject} a tensor named {key!r}; names must be strings")
        tensor = _as_tensor(value)
        made[key] = value if tensor is None else tensor
        if tensor is not None and tensor.shape[:1] != (rows,):
            raise DatasetError(
                f"{subject} {key!r} of shape {tuple(tensor.shape)} for {rows} samples; "
                "its first dimension must be the number of samples"
            )
        if tensor is None and isinstance(value, list | tuple | np.ndarray) and len(value) != rows:
            raise DatasetError(
                f"{subject} {key!r} with {len(value)} items for {rows} samples; it must have one for each"
            )
    return made


def _as_tensor(value: Any) -> torch.Tensor | None:
    """Return a tensor, an array of numbers or a flat list of numbers as a tensor; None for other values."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, list | tuple):
        flat = all(isinstance(item, _NUMBERS) or (isinstance(item, torch.Tensor) and not item.ndim) for item in value)
    else:
        flat = isinstance(value, (*_NUMBERS, np.ndarray))
    try:
        return torch.as_tensor(value) if flat else None
    except (TypeError, ValueError, RuntimeError):
        return None  # strings, dates, numbers that are too large


def move_tensors(batch: Batch, move: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
    """Return a batch with `move` applied to its tensors. Other values are unchanged."""
    return {key: move(value) if isinstance(value, torch.Tensor) else value for key, value in batch.items()}


class DeviceCopies:
    """Copies batches to a GPU on a separate stream, so that a copy need not wait for earlier steps.

    Work submitted to the current stream after a call waits for the copy.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._waited: Any = None  # stream that has waited for all copies so far

    def __call__(self, batch: Batch) -> Batch:
        """Return a batch with all tensors on the device."""
        current = torch.cuda.current_stream(self._device)
        tensors = [item for item in batch.values() if isinstance(item, torch.Tensor)]
        copied = [item for item in tensors if item.device.type == self._device.type]  # before, as part of a chunk
        with torch.cuda.stream(self._stream):
            moved = {
                name: item.pin_memory().to(self._device, non_blocking=True)  # copying from pageable memory would block
                for name, item in batch.items()
                if isinstance(item, torch.Tensor) and item.device.type == "cpu"
            }
        if moved or (copied and current != self._waited):
            current.wait_stream(self._stream)
            self._waited = current
        for tensor in (*copied, *moved.values()):
            tensor.record_stream(current)  # not to reuse its memory before the steps that read it
        return move_tensors(batch | moved, lambda item: item.to(self._device))


@cache
def device_copies(device: torch.device) -> DeviceCopies:
    """Return the one object that copies batches to a GPU, shared by all datasets."""
    return DeviceCopies(device)


def rows_of(dataset: Any, name: str) -> int:
    """Return the number of rows in a dataset. Raises DatasetError if it has no length."""
    if hasattr(dataset, "to_reader"):
        rows: int = dataset.to_reader().rows()
        return rows
    try:
        return len(dataset)
    except (TypeError, ValueError, NotImplementedError) as error:
        cls = type(owner_of(dataset)).__name__
        cure = getattr(dataset, "length_cure", "give it __len__, the number of rows in one pass")
        raise DatasetError(f"datasets.{name}: {cls} has no length; {cure}") from error


def row_lengths(dataset: Any, lengths: Any, name: str) -> torch.Tensor:
    """Return the length of each row of a dataset, (rows,) int64.

    Args:
        dataset: a map-style dataset.
        lengths: its attribute `group_by_length`: a number per row, a function that returns them, or the name of a
            column of a Hugging Face dataset.
        name: its name in `Datasets`.

    Raises:
        DatasetError: the lengths are not one number per row.
    """
    title = f"datasets.{name}: its attribute group_by_length"
    if isinstance(dataset, IterableDataset) or hasattr(dataset, "to_ray"):
        raise DatasetError(f"{title} has no effect on a stream, whose rows come in their own order; remove it")
    if isinstance(lengths, str) and hasattr(dataset, "lengths_of"):
        lengths = dataset.lengths_of(lengths, title)
    try:
        made = torch.as_tensor(lengths() if callable(lengths) else lengths).long()
    except (TypeError, ValueError, RuntimeError) as error:
        raise DatasetError(f"{title} is a {type(lengths).__name__}; it must be one number per row") from error
    rows = rows_of(dataset, name)
    if made.shape != (rows,):
        raise DatasetError(f"{title} has shape {tuple(made.shape)}; it must be one number for each of {rows} rows")
    return made


def dtype_name(column: torch.Tensor) -> str:
    """Return the name of a tensor's type, like `float32`."""
    return str(column.dtype).removeprefix("torch.")


def check(cls: type, key: str) -> None:
    """Check before a run that a dataset class, at a key in conf.yaml, can be read, or raise DatasetError."""
    if any(callable(getattr(cls, name, None)) for name in ("to_ray", "to_hf", "to_reader")):
        return
    method = "__iter__" if issubclass(cls, IterableDataset) else "__getitem__"
    if getattr(cls, method, None) in (None, Dataset.__getitem__):
        raise DatasetError(f"{key}: {cls.__name__} has no {method}, which returns its samples")
    if issubclass(cls, IterableDataset) and "__len__" not in dir(cls):
        raise DatasetError(
            f"{key}: {cls.__name__} is an IterableDataset without __len__; "
            "every worker must know how many samples one pass has"
        )


_LOST_READER = "DataLoader worker (pid"
"""Beginning of torch's RuntimeErrors about a reading process that was killed."""


def dataset_error(error: BaseException, what: str) -> MlxError:
    """Return the MlxError for an exception of another process: raised by user code, or a lost process."""
    if lost_peer(error) or str(error).startswith(_LOST_READER):
        return WorkerLostError(f"{what}: {short_message(error)}")
    cause = error
    while not isinstance(cause, MlxError):
        inner = getattr(cause, "cause", None) or cause.__cause__
        if not isinstance(inner, BaseException):
            break
        cause = inner
    if isinstance(cause, MlxError):
        return cause
    notes = "".join(f" ({text})" for text in getattr(cause, "__notes__", []))
    return DatasetError(f"{what}: {type(cause).__name__}: {short_message(cause)}{notes}")
