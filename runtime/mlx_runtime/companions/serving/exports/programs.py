"""The program of an experiment's `predict`: traced by torch.export, and converted to ONNX."""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.export import Dim, ExportedProgram

from mlx_runtime.companions.serving.exports.faults import ExportError, fault_of, refuse_few_rows
from mlx_runtime.companions.serving.predictor import Outputs
from mlx_runtime.companions.serving.schema import STRING, Schema
from mlx_runtime.data.batches import Batch
from mlx_runtime.errors import USER_ERRORS, UsageError, short_message
from mlx_runtime.loop.experiment import BaseModule
from mlx_runtime.runs.checkpoints.groups import members

ROWS = 3
"""Rows of the batch that is traced. A batch of one row would fix the number of rows."""

ONE_FILE_BYTES = 1 << 30
"""Size of the weights above which an ONNX program has them in a second file; one file can hold 2 GiB."""


class Program(nn.Module):
    """`predict` as a module, whose parameters are those of the models, and of the tools that are modules."""

    def __init__(self, experiment: BaseModule) -> None:
        super().__init__()
        for group in ("models", "tools"):
            self.add_module(group, held := nn.Module())
            for name, module in members(getattr(experiment, group), nn.Module).items():
                held.add_module(name, module)
        self._predict = experiment.predict
        self.train(False)

    def forward(self, batch: Batch) -> Outputs:
        return dict(self._predict(dict(batch)))


def refuse_strings(schema: Schema) -> None:
    """Raise UsageError if `predict` reads strings."""
    if texts := [column.name for column in schema.columns if column.dtype == STRING]:
        raise UsageError(
            f"predict reads {texts[0]!r}, a column of strings, which programs cannot read; tokenize it in "
            "ray_map_batches or collate of the dataset, and let predict read the tokens"
        )


def refuse_others(experiment: BaseModule) -> None:
    """Raise UsageError if the models are not torch's."""
    if not members(experiment.models, nn.Module):
        raise UsageError(
            "programs are made of torch modules, and the models of this experiment are none; export only the weights "
            "with --format safetensors, and functions of JAX with jax.export"
        )


def trace(experiment: BaseModule, schema: Schema) -> ExportedProgram:
    """Export `predict` with a variable number of rows, and with the dimensions that vary in the schema.

    Raises:
        ExportError: it cannot be exported. The message has the line of the project at fault.
    """
    program, batch = Program(experiment), traced_rows(schema)
    varying = {
        column.name: {
            0: Dim.DYNAMIC,
            **{axis: Dim.DYNAMIC for axis, size in enumerate(column.shape, 1) if size is None},
        }
        for column in schema.columns
    }
    with torch.no_grad(), _quiet():
        try:
            exported = torch.export.export(program, (batch,), dynamic_shapes=(varying,))
        except USER_ERRORS as error:
            raise fault_of(error, program, batch, varying) from error
    refuse_few_rows(exported)
    return exported


def traced_rows(schema: Schema) -> Batch:
    """Return the example rows as a batch whose varying dimensions are longer than 1, because 1 would be fixed."""
    batch: Batch = {}
    for column in schema.columns:
        rows = schema.examples[column.name]
        value = rows[torch.arange(ROWS) % len(rows)]
        for axis, size in enumerate(column.shape, 1):
            if size is None and value.shape[axis] == 1:
                value = value.repeat_interleave(2, axis)
        batch[column.name] = value.contiguous()
    return batch


def write_onnx(exported: ExportedProgram, file: Path, inputs: list[str], outputs: list[str]) -> None:
    """Convert a program to ONNX, and let the exporter verify it on the example rows.

    Raises:
        ExportError: an operation has no equivalent, or the results differ.
    """
    weights = sum(item.nbytes for item in exported.state_dict.values())
    with _quiet():
        try:
            torch.onnx.export(
                exported,
                (),
                file,
                input_names=inputs,
                output_names=outputs,
                dynamo=True,
                verify=True,
                external_data=weights > ONE_FILE_BYTES,
            )
        except USER_ERRORS as error:
            cause: BaseException = error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            reason = f"{type(cause).__name__}: {short_message(cause)}"
            raise ExportError(f"the program cannot be converted to ONNX: {reason}") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Drop the progress, warnings and graphs that exporters print. Errors are reported in one line."""
    before, ignored = logging.root.manager.disable, warnings.catch_warnings()
    logging.disable(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()), ignored:
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
