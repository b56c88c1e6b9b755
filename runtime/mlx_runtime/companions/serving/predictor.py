"""`Predictor`: answers rows and batches with the `predict` of an experiment, or with an exported program."""

import os
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import mlx_runtime
from mlx_runtime.companions.serving.schema import RowError, Schema
from mlx_runtime.data.batches import Batch, dtype_name, move_tensors
from mlx_runtime.errors import USER_ERRORS, MlxError, short_message

Outputs = dict[str, torch.Tensor]
"""Tensors (rows, ...) by name, on the CPU."""

CPU = torch.device("cpu")

LIBRARIES = (
    str(Path(os.__file__).parent),
    str(Path(torch.__file__).parents[1]),
    str(Path(mlx_runtime.__file__).parent),
    "<frozen",
)
"""Folders with code that users do not edit."""


class PredictError(MlxError):
    """`predict` raised an exception, or returned something that is not a row of outputs for each row."""


class Predictor:
    """Answers rows and batches. Calls from several threads wait for each other.

    Args:
        function: returns outputs `{name: tensor (rows, ...)}` of a batch.
        schema: the columns that it reads.
        title: name of the model for messages and servers, like `digits/run_003 epoch_0018`.
        device: device that batches are moved to.
        max_rows: rows per call of the function; more rows are split.
    """

    def __init__(
        self,
        function: Callable[[Batch], Any],
        schema: Schema,
        title: str,
        device: torch.device = CPU,
        max_rows: int = 256,
    ) -> None:
        self.schema, self.title, self.device, self.max_rows = schema, title, device, max_rows
        self._function = function
        self._calling = threading.Lock()

    def __repr__(self) -> str:
        return f"<Predictor {self.title} on {self.device}, reads {self.schema.text}>"

    def __call__(self, rows: Sequence[Mapping[str, Any]] | Mapping[str, Any]) -> Outputs:
        """Return the outputs for rows, (rows, ...) each, in their order.

        Args:
            rows: a list of rows, each a mapping of columns to values, or a batch: a mapping of columns to tensors,
                arrays or lists with one item per row. Columns that `predict` does not read may be missing.

        Raises:
            RowError: a row does not fit the schema.
            PredictError: `predict` failed, or rows of different shapes have outputs of different shapes.
        """
        answers = self.answer(as_rows(rows, self.schema))
        for number, answer in enumerate(answers):
            if isinstance(answer, Exception):
                raise type(answer)(f"row {number}: {answer}") from answer
        try:
            return {name: torch.stack([answer[name] for answer in answers]) for name in answers[0]} if answers else {}
        except RuntimeError as error:
            raise PredictError(f"outputs of rows of different lengths do not stack: {short_message(error)}") from error

    def answer(self, rows: Sequence[Any]) -> list[Any]:
        """Return the outputs of each row by name, without a dimension for rows, or the error that it caused.

        If a batch fails, its rows are answered one by one, so that a row does not spoil the others.
        """
        batches, answers = self.schema.batches(rows, self.max_rows)
        for numbers, batch in batches:
            for number, answer in zip(numbers, self.answer_batch(batch, len(numbers)), strict=True):
                answers[number] = answer
        return answers

    def answer_batch(self, batch: Batch, rows: int) -> list[Any]:
        """Return the outputs of each row of a checked batch, or the error that it caused."""
        try:
            outputs = self.predict(batch, rows)
        except PredictError as error:
            if rows == 1:
                return [error]
            return [answer for number in range(rows) for answer in self.answer_batch(part_of(batch, number, 1), 1)]
        return [{name: value[number] for name, value in outputs.items()} for number in range(rows)]

    def predict(self, batch: Batch, rows: int | None = None) -> Outputs:
        """Return the outputs of a batch on the CPU; `rows` is its number of rows.

        Raises:
            PredictError: `predict` raised an exception, or returned something else than rows of outputs.
        """
        count = rows_in(batch) if rows is None else rows
        with self._calling, torch.no_grad():
            try:
                outputs = self._function(move_tensors(batch, lambda item: item.to(self.device)))
            except USER_ERRORS as error:
                raise PredictError(f"predict failed: {user_line(error)}") from error
            return checked_outputs(outputs, count)


def user_line(error: BaseException) -> str:
    """Return `ValueError: the message (src/experiment.py:91)`, with the innermost line outside of libraries."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(LIBRARIES)]
    where = f" ({'/'.join(Path(frames[-1].filename).parts[-2:])}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {short_message(error)}{where}"


def checked_outputs(outputs: Any, rows: int) -> Outputs:
    """Return the outputs of `predict` on the CPU. Raises PredictError if they are not rows of outputs."""
    wanted = "it must return {name: tensor (rows, ...)}"
    if not isinstance(outputs, Mapping) or not outputs:
        raise PredictError(f"predict returned {type(outputs).__name__}; {wanted}")
    for name, value in outputs.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise PredictError(f"predict returned {name!r} of type {type(value).__name__}; {wanted}")
        if value.shape[:1] != (rows,):
            raise PredictError(f"predict returned {name!r} of shape {tuple(value.shape)} for {rows} rows; {wanted}")
    return {name: value.detach().to("cpu") for name, value in outputs.items()}


def as_array(output: torch.Tensor) -> np.ndarray:
    """Return an output as a contiguous array; bfloat16, which NumPy lacks, as float32."""
    if output.is_complex():
        raise PredictError(
            f"predict returned {dtype_name(output)}, which files and HTTP answers cannot hold; use torch.view_as_real"
        )
    return (output.float() if output.dtype == torch.bfloat16 else output).contiguous().numpy()


def as_rows(rows: Any, schema: Schema) -> Sequence[Any]:
    """Return a list of rows, even for a batch."""
    if not isinstance(rows, Mapping):
        return list(rows)
    known = {name: value for name, value in rows.items() if name in schema.names}
    unknown = {name: rows[name] for name in rows if name not in known}
    try:
        sizes = {name: len(value) for name, value in known.items()}
    except TypeError:
        raise RowError("a batch maps columns to tensors, arrays or lists with one item per row") from None
    if len({*sizes.values()}) > 1:
        raise RowError(f"columns have different numbers of rows: {', '.join(f'{k} {v}' for k, v in sizes.items())}")
    count = next(iter(sizes.values()), 1)
    return [{name: value[number] for name, value in known.items()} | unknown for number in range(count)]


def rows_in(batch: Batch) -> int:
    """Return the number of rows of a batch."""
    return next((len(item) for item in batch.values() if isinstance(item, torch.Tensor | list)), 0)


def part_of(batch: Batch, start: int, count: int) -> Batch:
    """Return some rows of a batch."""
    return {name: value[start : start + count] for name, value in batch.items()}
