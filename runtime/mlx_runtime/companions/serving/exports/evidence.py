"""The evidence of an export: held-out rows at several batch sizes with the outputs of `predict`, and its check."""

import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from mlx_runtime.companions.serving.exports import proof
from mlx_runtime.companions.serving.exports.faults import ExportError, fault_of_rows
from mlx_runtime.companions.serving.loading import by_preference, shard_of
from mlx_runtime.companions.serving.predictor import Outputs, PredictError, Predictor
from mlx_runtime.companions.serving.schema import Schema
from mlx_runtime.data.batches import Batch, dtype_name
from mlx_runtime.data.definitions import stream_names
from mlx_runtime.data.loaders import trains
from mlx_runtime.distributed.randomness import temporary_seed
from mlx_runtime.errors import USER_ERRORS
from mlx_runtime.loop.experiment import BaseModule

SIZES = (1, 2, 7, 64)
"""Numbers of rows at which outputs are compared."""

TOLERANCES = {32: 1e-4, "fp16": 2e-3, "bf16": 2e-2}
"""Largest accepted difference by the precision of the run, relative to the largest value of an output, or absolute if
that is less than 1: other processes and other libraries add numbers in another order."""


CHECK_S = 900.0
"""Default time limit of the check: seconds for small models, but large ones take minutes for 64 rows."""


@dataclass(frozen=True)
class Evidence:
    """Batches by their number of rows, each with the outputs of `predict`."""

    source: str  # name of the dataset, or `examples`
    schema: Schema  # of these batches; further dimensions may vary than in the recorded examples
    cases: Mapping[int, tuple[Batch, Outputs]]
    tolerance: float


def collect(experiment: BaseModule, nodes: Mapping[str, Any], predictor: Predictor, project: Path) -> Evidence:
    """Read held-out rows, and call `predict` on them.

    Raises:
        ExportError: `predict` fails, draws random numbers, or returns no finite numbers.
    """
    source, batches = held_out(experiment, nodes, predictor.schema)
    cases = {}
    for rows, batch in batches.items():
        try:
            with temporary_seed(0):
                cases[rows] = (batch, predictor.predict(batch, rows))
        except PredictError as error:
            raise fault_of_rows(error, rows, project) from error
    with temporary_seed(1):
        again = predictor.predict(batches[SIZES[-1]], SIZES[-1])
    _refuse_randomness(cases[SIZES[-1]][1], again)
    for name, value in again.items():
        if value.numel() and not value.isfinite().any():
            raise ExportError(
                f"predict returns only NaN or infinity in {name!r}, for {SIZES[-1]} rows of {source}: nothing can be "
                "compared; choose another --checkpoint"
            )
    schema = widened(predictor.schema, list(batches.values()))
    return Evidence(source, schema, cases, TOLERANCES[experiment.cfg.precision])


def _refuse_randomness(expected: Outputs, again: Outputs) -> None:
    for name, value in expected.items():
        if not torch.equal(value.nan_to_num(), again[name].nan_to_num()):
            raise ExportError(
                f"predict returns different values of {name!r} each time, because it draws random numbers, so that the "
                'export cannot be compared; let the dataset yield them as a column, and read it: batch["noise"]'
            )


def held_out(experiment: BaseModule, nodes: Mapping[str, Any], schema: Schema) -> tuple[str, dict[int, Batch]]:
    """Return the first rows of the test or validation set by batch size, or else repeated example rows."""
    streams = stream_names(nodes)
    for name in by_preference(nodes.get("datasets", {})):
        if name.startswith("_") or trains(name) or name in streams:
            continue
        try:
            return name, {size: _read(experiment, nodes, name, schema, size) for size in SIZES}
        except USER_ERRORS:  # it cannot be read here, or lacks a column
            continue
    return "examples", {size: _repeated(schema, size) for size in SIZES}


def _read(experiment: BaseModule, nodes: Mapping[str, Any], name: str, schema: Schema, size: int) -> Batch:
    batch = next(iter(shard_of(experiment, nodes, name).iter_torch_batches(batch_size=size)))
    found: Batch = {}
    for column in schema.columns:
        value = batch[column.name]
        if value.ndim != len(column.shape) + 1 or dtype_name(value) != column.dtype:
            raise ValueError(f"{name} yields another {column.name}")
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


def _repeated(schema: Schema, size: int) -> Batch:
    """Return example rows, permuted and repeated."""
    rows = min(len(value) for value in schema.examples.values())
    order = torch.arange(size, 0, -1) % rows
    return {column.name: schema.examples[column.name][order].contiguous() for column in schema.columns}


def prove(
    folder: Path,
    programs: Sequence[str],
    evidence: Evidence,
    examples: tuple[Batch, Outputs],
    scratch: Path,
    timeout_s: float,
) -> dict[str, Any]:
    """Compare the programs of an export with the evidence, in a process that can import neither this package nor `src`.

    Return the result by program, for `export.json`.

    Raises:
        ExportError: a difference exceeds the tolerance, the code of README.md fails, or the check takes too long.
    """
    cases, result = scratch / "cases.pt", scratch / "result.json"
    content = {
        "rows": {size: [dict(batch), outputs] for size, (batch, outputs) in evidence.cases.items()},
        "examples": examples[1],
    }
    torch.save(content, cases)
    job = {
        "folder": str(folder.resolve()),
        "cases": str(cases),
        "result": str(result),
        "path": [item for item in sys.path if "site-packages" in item or "dist-packages" in item or _has_torch(item)],
        "programs": list(programs),
        "tolerance": evidence.tolerance,
    }
    command = [sys.executable, "-I", proof.__file__]
    try:
        done = subprocess.run(
            command, input=json.dumps(job), capture_output=True, text=True, cwd=scratch, timeout=timeout_s
        )
    except subprocess.TimeoutExpired as error:
        raise ExportError(too_slow(f"the check of the export, {_step(error.stdout)},", timeout_s)) from error
    if done.returncode or not result.is_file():
        code = done.returncode
        ended = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise ExportError(f"the process that checks the export ended with {ended} while {_step(done.stdout)}: {last}")
    return _judge(json.loads(result.read_text()), evidence.tolerance, f"{folder.resolve()}/")


def too_slow(what: str, timeout_s: float) -> str:
    """Return the message for a process that was stopped."""
    return f"{what} took more than {timeout_s:g} s; allow more with --timeout {2 * timeout_s:g}"


def _step(output: bytes | str | None) -> str:
    text = output.decode(errors="replace") if isinstance(output, bytes) else output or ""
    steps = [line.removeprefix(proof.STEP) for line in text.splitlines() if line.startswith(proof.STEP)]
    return steps[-1] if steps else "importing torch"


def _judge(found: Mapping[str, Any], tolerance: float, folder: str) -> dict[str, Any]:
    assert found["hidden"]
    judged = {}
    for program, item in found["programs"].items():
        if problem := item.get("problem"):
            raise ExportError(f"the exported program ({program}) {problem.replace(folder, '')}")
        size = max(item["differences"], key=item["differences"].__getitem__)
        largest = item["differences"][size]
        if largest > tolerance:
            raise ExportError(
                f"the exported program ({program}) differs from predict with {size} rows: {item['outputs'][size]!r} by "
                f"{largest:.2g}, with a tolerance of {tolerance:g}"
            )
        seconds = {"seconds": item["seconds"], "load_seconds": item["load_seconds"]}
        judged[program] = {"largest_difference": largest, "differences": item["differences"]} | seconds
    if problem := found["readme"]:
        raise ExportError(f"the code in README.md of the export fails: {problem}")
    return judged


def _has_torch(folder: str) -> bool:
    return bool(folder) and any(Path(folder, name).is_dir() for name in ("torch", "onnxruntime", "safetensors"))
