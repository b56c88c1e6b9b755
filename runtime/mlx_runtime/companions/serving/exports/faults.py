"""The line of a project at which torch.export gave up, and its cure."""

import linecache
import os
import re
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError, GuardOnDataDependentSymNode

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

EQUAL_SIZES = re.compile(r"Eq\(s\d+, s\d+\)")
"""Condition that two columns have the same size; it is not a problem."""


class ExportError(MlxError):
    """The program of an experiment cannot be exported, or its outputs differ from those of `predict`."""


def fault_of(
    error: BaseException, program: nn.Module, batch: Batch, varying: Mapping[str, Any], project: Path
) -> ExportError:
    """Return the error to report for an exception of torch.export."""
    if isinstance(error, GuardOnDataDependentSymNode):
        return _error("a condition or a size depends on values of tensors", _line_of(error, project), BRANCHES)
    if isinstance(error.__context__, ConstraintViolationError):
        line, fixed = _draft(program, batch, varying, project)
        for column, axis, size in fixed:
            if axis:
                return _error(f"dimension {axis} of {column!r}, which varies, is fixed to {size}", line, FIXED_LENGTH)
        return _error("the number of rows is fixed", line, FIXED)
    recurrent = any(frame.filename == nn.modules.rnn.__file__ for frame in traceback.extract_tb(error.__traceback__))
    cure = PACKED if recurrent else NOT_TORCH
    return _error(f"{type(error).__name__}: {short_message(error)}", _line_of(error, project), cure)


def fault_of_rows(error: BaseException, rows: int, project: Path) -> ExportError:
    """Return the error to report if `predict` fails for a number of rows."""
    line = _line_of(error.__cause__ or error, project)
    problem = f"it fails with {rows} row{'s' * (rows != 1)}: {short_message(error.__cause__ or error)}"
    return _error(problem, line, FIXED)


def _error(problem: str, line: str | None, cure: str) -> ExportError:
    return ExportError(f"predict cannot be exported: {problem}{f' at {line}' if line else ''}\n{cure}")


def _line_of(error: BaseException, project: Path) -> str | None:
    frames = traceback.extract_tb(error.__traceback__)
    return _last([(frame.filename, frame.lineno or 0) for frame in frames], project)


def _draft(
    program: nn.Module, batch: Batch, varying: Mapping[str, Any], project: Path
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
        return _line_of(error, project), []
    lines = (_last([(names.get(item["filename"], ""), item["line"]) for item in stack], project) for stack in stacks)
    inputs = {spec.arg.name for spec in draft.graph_signature.input_specs if spec.kind.name == "USER_INPUT"}
    nodes = [node for node in draft.graph.nodes if node.op == "placeholder" and node.name in inputs]
    sizes = [
        (name, axis, str(node.meta["val"].shape[axis]))
        for name, node in zip(draft.example_inputs[0][0], nodes, strict=True)
        for axis in varying[name]
    ]
    return next(filter(None, lines), None), [item for item in sizes if item[2].isdecimal()]  # others are symbols


def _last(frames: list[tuple[str, int]], project: Path) -> str | None:
    """Format the innermost frame of a project, or else of another library than torch, as `file:line: code`."""
    libraries = (Path(torch.__file__).parent, Path(__file__).parents[2])
    files = [(Path(file).resolve(), number) for file, number in frames if Path(file).is_file()]
    own = [item for item in files if item[0].is_relative_to(project.resolve()) and "site-packages" not in str(item[0])]
    rest = [item for item in files if not any(map(item[0].is_relative_to, libraries))]
    if not (chosen := own or rest):
        return None
    file, number = chosen[-1]
    shown = os.path.relpath(file, project.resolve()) if own else file
    return f"{shown}:{number}: {linecache.getline(str(file), number).strip()}"
