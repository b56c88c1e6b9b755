"""The line of a project at which torch.export gave up, and its cure."""

import linecache
import re
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError, GuardOnDataDependentSymNode

from mlx_runtime.companions.serving.predictor import LIBRARIES
from mlx_runtime.data.batches import Batch
from mlx_runtime.errors import USER_ERRORS, MlxError, short_message

FIXED = "write x.shape[0] or -1 instead of a number; int(), loops over rows, and conditions on their number fix it"
FIXED_LENGTH = (
    "write x.shape[1] or -1 instead of a number; recurrent layers and loops over positions fix a length: pad all "
    "rows to one length in the dataset, or export only the weights with --format safetensors"
)
BRANCHES = "a program cannot branch on values of tensors; use torch.where, a mask, or torch.cond"
NOT_TORCH = "write it with operations of torch on tensors, without NumPy, and without attributes that predict changes"
PACKED = (
    "a program cannot read packed sequences; pad all rows to one length in the dataset, and mask the outputs of the "
    "layer, or export only the weights with --format safetensors"
)

MANY = 1 << 31
"""Rows that no batch has."""

EQUAL_SIZES = re.compile(r"Eq\(s\d+, s\d+\)")
"""Condition that two columns have the same size; it is not a problem."""


class ExportError(MlxError):
    """The program of an experiment cannot be exported, or its outputs differ from those of `predict`."""


def fault_of(error: BaseException, program: nn.Module, batch: Batch, varying: Mapping[str, Any]) -> ExportError:
    """Return the error to report for an exception of torch.export."""
    if isinstance(error, GuardOnDataDependentSymNode):
        return _error("a condition or a size depends on values of tensors", _line_of(error), BRANCHES)
    if isinstance(error.__context__, ConstraintViolationError):
        line, fixed = _draft(program, batch, varying)
        for column, axis, size in fixed:
            if axis:
                return _error(f"dimension {axis} of {column!r}, which varies, is fixed to {size}", line, FIXED_LENGTH)
        return _error("the number of rows is fixed", line, FIXED)
    recurrent = any(frame.filename == nn.modules.rnn.__file__ for frame in traceback.extract_tb(error.__traceback__))
    cure = PACKED if recurrent else NOT_TORCH
    return _error(f"{type(error).__name__}: {short_message(error)}", _line_of(error), cure)


def fault_of_rows(error: BaseException, rows: int) -> ExportError:
    """Return the error to report if `predict` fails for a number of rows."""
    line = _line_of(error.__cause__ or error)
    problem = f"it fails with {rows} row{'s' * (rows != 1)}: {short_message(error.__cause__ or error)}"
    return _error(problem, line, FIXED)


def refuse_few_rows(exported: ExportedProgram) -> None:
    """Raise ExportError if a program is right only for some numbers of rows, because `predict` branches on it."""
    for shape in shapes_of(exported).values():
        known = exported.range_constraints.get(shape[0].node.expr)
        if known and (known.lower > 2 or known.upper < MANY):
            limit = f"at least {known.lower}" if known.lower > 2 else f"at most {known.upper}"
            raise _error(f"the program would be right for {limit} rows only", None, FIXED)


def _error(problem: str, line: str | None, cure: str) -> ExportError:
    return ExportError(f"predict cannot be exported: {problem}{f' at {line}' if line else ''}\n{cure}")


def _line_of(error: BaseException) -> str | None:
    frames = traceback.extract_tb(error.__traceback__)
    return _last([(frame.filename, frame.lineno or 0) for frame in frames])


def _draft(
    program: nn.Module, batch: Batch, varying: Mapping[str, Any]
) -> tuple[str | None, list[tuple[str, int, str]]]:
    """Return the line that a draft export, which continues after problems, reports first.

    Also return the dimensions that should vary but have one size: column, dimension and size.
    """
    try:
        draft = torch.export.draft_export(program, (batch,), dynamic_shapes=(varying,))
        report: Any = draft._report  # type: ignore[attr-defined] # documented, but without a public name
        found = [item.data for item in report.failures if not EQUAL_SIZES.fullmatch(item.data.get("expr", ""))]
        stacks = [item.get("user_stack") or item.get("stack") or [] for item in found]
        names = report.str_to_filename
    except USER_ERRORS as error:
        return _line_of(error), []
    lines = (_last([(names.get(item["filename"], ""), item["line"]) for item in stack]) for stack in stacks)
    sizes = [(name, axis, str(shape[axis])) for name, shape in shapes_of(draft).items() for axis in varying[name]]
    return next(filter(None, lines), None), [item for item in sizes if item[2].isdecimal()]  # others are symbols


def shapes_of(exported: ExportedProgram) -> dict[str, Sequence[Any]]:
    """Return the shapes of the columns that a program reads: numbers, and symbols for dimensions that vary."""
    inputs = {spec.arg.name for spec in exported.graph_signature.input_specs if spec.kind.name == "USER_INPUT"}
    nodes = [node for node in exported.graph.nodes if node.op == "placeholder" and node.name in inputs]
    names = exported.example_inputs[0][0]
    return {name: node.meta["val"].shape for name, node in zip(names, nodes, strict=True)}


def _last(frames: list[tuple[str, int]]) -> str | None:
    """Format the innermost frame outside of libraries as `file:line: code`, or return None if there is none."""
    own = [(file, number) for file, number in frames if not file.startswith(LIBRARIES) and Path(file).is_file()]
    if not own:
        return None
    file, number = own[-1]
    return f"{'/'.join(Path(file).parts[-2:])}:{number}: {linecache.getline(file, number).strip()}"
