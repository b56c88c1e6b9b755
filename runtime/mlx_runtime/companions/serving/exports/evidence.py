"""The evidence of an export: held-out rows with the outputs of `predict`, and its check."""

import contextlib
import itertools
import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from mlx_runtime.companions.serving.exports import programs, proof
from mlx_runtime.companions.serving.exports.faults import ExportError, fault_of_rows
from mlx_runtime.companions.serving.loading import by_preference, shard_of
from mlx_runtime.companions.serving.predictor import Outputs, PredictError, Predictor, rows_in
from mlx_runtime.companions.serving.schema import Schema
from mlx_runtime.data.batches import Batch, dtype_name
from mlx_runtime.data.definitions import stream_names
from mlx_runtime.data.loaders import DatasetShard, trains
from mlx_runtime.distributed.randomness import temporary_seed
from mlx_runtime.errors import USER_ERRORS
from mlx_runtime.loop.experiment import BaseModule

SIZES = (1, 2, 7, 64)
"""Numbers of rows at which outputs are compared."""

SEARCHED, SEARCH_S, SHAPES = 10_000, 30.0, 256
"""Rows and seconds in which rows of other shapes are searched, and the maximum number of shapes."""

TOLERANCES = {32: 1e-4, "fp16": 2e-3, "bf16": 2e-2}
"""Largest accepted difference by the precision of the run, relative to the largest value of an output, or absolute if
that is less than 1: other processes and other libraries add numbers in another order."""

CHECK_S = 900.0
"""Default time limit of the check: seconds for small models, but large ones take minutes for 64 rows."""


@dataclass(frozen=True)
class Evidence:
    """Batches with the outputs of `predict`; the first has the example rows of the export."""

    source: str  # name of the dataset, or `examples`
    schema: Schema  # of these batches; further dimensions may vary than in the recorded examples
    cases: Sequence[tuple[Batch, Outputs]]
    tolerance: float

    @property
    def rows(self) -> int:
        """Number of rows of the source in all batches."""
        return sum(rows_in(batch) for batch, _ in self.cases[1:])


def collect(experiment: BaseModule, nodes: Mapping[str, Any], predictor: Predictor) -> Evidence:
    """Read held-out rows, and call `predict` on them.

    Raises:
        ExportError: `predict` fails, draws random numbers, or returns no finite numbers.
    """
    source, batches = held_out(experiment, nodes, predictor.schema)
    schema = widened(predictor.schema, batches)
    cases: list[tuple[Batch, Outputs]] = []
    for batch in (programs.traced_rows(schema), *batches):
        rows = rows_in(batch)
        try:
            with temporary_seed(0):
                outputs = predictor.predict(batch, rows)
        except PredictError as error:
            raise fault_of_rows(error, rows) from error
        for name, value in outputs.items():
            if value.numel() and not value.isfinite().any():
                raise ExportError(
                    f"predict returns only NaN or infinity in {name!r} for {proof.title_of(batch)}: nothing can be "
                    "compared; choose another --checkpoint, or let predict return numbers for such rows"
                )
        cases.append((batch, outputs))
    batch, expected = cases[len(SIZES)]
    with temporary_seed(1):
        again = predictor.predict(batch, rows_in(batch))
    for name, value in expected.items():
        if not torch.equal(value.nan_to_num(), again[name].nan_to_num()):
            raise ExportError(
                f"predict returns different values of {name!r} each time, because it draws random numbers, so that the "
                'export cannot be compared; let the dataset yield them as a column, and read it: batch["noise"]'
            )
    return Evidence(source, schema, cases, TOLERANCES[experiment.cfg.precision])


def held_out(experiment: BaseModule, nodes: Mapping[str, Any], schema: Schema) -> tuple[str, list[Batch]]:
    """Return rows of the test or validation set, or else example rows, in batches of `SIZES`.

    Further batches have one row each, of every other shape in the dataset.
    """
    streams = stream_names(nodes)
    for name in by_preference(nodes.get("datasets", {})):
        if name.startswith("_") or trains(name) or name in streams:
            continue
        try:
            shard = shard_of(experiment, nodes, name)
            batches = [_read(next(iter(shard.iter_torch_batches(batch_size=size))), schema, size) for size in SIZES]
        except USER_ERRORS:  # it cannot be read here, or lacks a column
            continue
        return name, [*batches, *_of_other_shapes(shard, schema, batches)]
    rows = {column.name: schema.examples[column.name].flip(0) for column in schema.columns}
    return "examples", [_read(rows, schema, size) for size in SIZES]


def _of_other_shapes(shard: DatasetShard, schema: Schema, batches: Sequence[Batch]) -> list[Batch]:
    """Return a row of each shape that the batches lack, up to the first row that cannot be read.

    Rows are read one by one, because batches are padded.
    """
    known, end = {_shapes(batch) for batch in batches}, time.monotonic() + SEARCH_S
    found: list[Batch] = []
    with contextlib.suppress(*USER_ERRORS):
        for batch in itertools.islice(shard.iter_torch_batches(batch_size=1), SEARCHED):
            if len(found) == SHAPES or time.monotonic() >= end:
                break
            row = _read(batch, schema, 1)
            if _shapes(row) not in known:
                known.add(_shapes(row))
                found.append(row)
    return found


def _shapes(batch: Batch) -> tuple[torch.Size, ...]:
    return tuple(value.shape[1:] for value in batch.values())


def _read(batch: Batch, schema: Schema, size: int) -> Batch:
    """Return the columns of a batch, repeated if it has fewer rows. Raises ValueError if one is of another kind."""
    found: Batch = {}
    for column in schema.columns:
        value = batch[column.name]
        if value.ndim != len(column.shape) + 1 or dtype_name(value) != column.dtype:
            raise ValueError(f"{column.name} is another column")
        found[column.name] = value[torch.arange(size) % len(value)].contiguous()
    return found


def widened(schema: Schema, batches: Sequence[Batch]) -> Schema:
    """Return the schema whose dimensions vary if they do in these batches: the examples may all have one length."""
    columns = []
    for column in schema.columns:
        shapes = zip(*(batch[column.name].shape[1:] for batch in batches), strict=True)
        shape = tuple(own if {*sizes} == {own} else None for own, sizes in zip(column.shape, shapes, strict=True))
        columns.append(replace(column, shape=shape))
    return replace(schema, columns=tuple(columns))


def prove(folder: Path, formats: Sequence[str], evidence: Evidence, scratch: Path, timeout_s: float) -> dict[str, Any]:
    """Compare the programs of an export with the evidence, in a process that can import neither this package nor `src`.

    Return the result by program, for `export.json`.

    Raises:
        ExportError: a difference exceeds the tolerance, the code of README.md fails, or the check takes too long.
    """
    cases, result = scratch / "cases.pt", scratch / "result.json"
    torch.save([[dict(batch), outputs] for batch, outputs in evidence.cases], cases)
    job = {
        "folder": str(folder.resolve()),
        "cases": str(cases),
        "result": str(result),
        "path": sys.path,
        "programs": list(formats),
        "tolerance": evidence.tolerance,
    }
    command = [sys.executable, "-I", "-B", proof.__file__]
    try:
        done = subprocess.run(
            command, input=json.dumps(job), capture_output=True, text=True, cwd=scratch, timeout=timeout_s
        )
    except subprocess.TimeoutExpired as error:
        raise ExportError(
            f"the check of the export took more than {timeout_s:g} s; allow more with --timeout {2 * timeout_s:g}"
        ) from error
    if done.returncode or not result.is_file():
        code = done.returncode
        ended = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise ExportError(f"the process that checks the export ended with {ended}: {last}")
    found: dict[str, Any] = json.loads(result.read_text())
    if "problem" in found:
        raise ExportError(found["problem"])
    return found
