"""The proof of an export, run as a script in a process of its own that can import neither this package nor a project.

It compares the outputs of the exported programs with those of `predict`, and executes the code in README.md:

    python -I proof.py < {"folder", "cases", "result", "path", "programs", "tolerance"}   in JSON

The result is the largest difference by program, or the problem. This file imports nothing of its package, because the
process could not.
"""

import importlib.abc
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

HIDDEN = ("mlx_runtime", "src")
"""Packages that the process cannot import: this one, and the project's."""

Function = Callable[[Mapping[str, Any]], dict[str, Any]]


class ProofError(Exception):
    """The export is not proven."""


class Hiding(importlib.abc.MetaPathFinder):
    """Finder, to be placed before all others, that raises for hidden packages."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] in HIDDEN:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def load(folder: Path, program: str) -> Function:
    """Return the function of a program: `pt2` or `onnx`."""
    import torch

    if program == "pt2":
        module: Function = torch.export.load(str(folder / "program.pt2")).module()
        return module
    import onnxruntime

    session = onnxruntime.InferenceSession(str(folder / "program.onnx"), providers=["CPUExecutionProvider"])
    names = [item.name for item in session.get_outputs()]
    wanted = [item.name for item in session.get_inputs()]

    def run(batch: Mapping[str, Any]) -> dict[str, Any]:
        found = session.run(names, {name: batch[name].cpu().numpy() for name in wanted})
        return {name: torch.from_numpy(value) for name, value in zip(names, found, strict=True)}

    return run


def difference(expected: Mapping[str, Any], found: Mapping[str, Any], tolerance: float) -> float:
    """Return the largest difference of floating point outputs. Other outputs have to be equal.

    It is relative to the largest value of the output if that is greater than 1.

    Raises:
        ProofError: it exceeds the tolerance, or the outputs have other names, shapes, types or values that are not
            finite.
    """
    import torch

    if set(found) != set(expected):
        raise ProofError(f"it returns {', '.join(found)} instead of {', '.join(expected)}")
    largest = 0.0
    for name, wanted in expected.items():
        value = found[name]
        if value.shape != wanted.shape or value.dtype != wanted.dtype:
            kinds = [f"{item.dtype} {tuple(item.shape)}" for item in (value, wanted)]
            raise ProofError(f"{name} is {kinds[0]} instead of {kinds[1]}")
        if not (wanted.is_floating_point() or wanted.is_complex()):
            if not torch.equal(value, wanted):
                raise ProofError(f"{name} differs in {int((value != wanted).sum())} values")
            continue
        finite = torch.isfinite(wanted)
        if not torch.equal(finite, torch.isfinite(value)) or not torch.allclose(
            value[~finite], wanted[~finite], equal_nan=True
        ):
            raise ProofError(f"{name} has NaN or infinity at other positions")
        if not finite.any():
            continue
        exact = torch.complex128 if wanted.is_complex() else torch.float64
        value, wanted = value.to(exact)[finite], wanted.to(exact)[finite]
        error = float((value - wanted).abs().max()) / max(1.0, float(wanted.abs().max()))
        if error > tolerance:
            raise ProofError(f"{name} by {error:.2g}, with a tolerance of {tolerance:g}")
        largest = max(largest, error)
    return largest


def check(program: str, folder: Path, cases: Sequence[Any], tolerance: float) -> float:
    """Return the largest difference between a program and `predict`."""
    import torch

    try:
        function = load(folder, program)
    except Exception as error:
        raise ProofError(f"the exported program ({program}) does not load: {_text(error)}") from error
    largest = 0.0
    for batch, expected in cases:
        rows = len(next(iter(batch.values())))
        title, size = f"the exported program ({program})", f"{rows} row{'s' * (rows != 1)}"
        try:
            with torch.no_grad():
                found = function(batch)
        except Exception as error:
            raise ProofError(f"{title} fails with {size}: {_text(error)}") from error
        try:
            largest = max(largest, difference(expected, found, tolerance))
        except ProofError as error:
            raise ProofError(f"{title} differs from predict with {size}: {error}") from error
    return largest


def run_readme(expected: Mapping[str, Any], tolerance: float) -> None:
    """Execute the code in README.md of the working directory, and compare its outputs for the example rows."""
    import torch

    for number, code in enumerate(re.findall(r"```python\n(.*?)```", Path("README.md").read_text("utf-8"), re.DOTALL)):
        names: dict[str, Any] = {"__name__": "__main__"}
        try:
            exec(compile(code, "README.md", "exec"), names)
            outputs = {name: torch.as_tensor(value) for name, value in names["outputs"].items()}
            difference(expected, outputs, tolerance)
        except Exception as error:
            problem = str(error) if isinstance(error, ProofError) else _text(error)
            raise ProofError(f"the code in README.md of the export fails: block {number + 1}: {problem}") from error


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def main() -> None:
    job = json.load(sys.stdin)
    sys.path[:] = [*sys.path, *(item for item in job["path"] if item not in sys.path)]
    sys.meta_path.insert(0, Hiding())
    import torch

    os.chdir(job["folder"])
    cases, tolerance = torch.load(job["cases"], weights_only=True), job["tolerance"]
    result: dict[str, Any] = {}
    try:
        for program in job["programs"]:
            result[program] = {"largest_difference": check(program, Path(), cases, tolerance)}
        run_readme(cases[0][1], tolerance)
    except ProofError as error:
        result["problem"] = str(error)
    Path(job["result"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
