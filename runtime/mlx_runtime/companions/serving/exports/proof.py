"""The proof of an export, run as a script in a process of its own that can import neither this package nor a project.

It compares the outputs of the exported programs with those of `predict`, and executes the code in README.md. It prints
a line with `STEP` before each of these steps, so that the parent can report one that takes too long:

    python -I proof.py < {"folder", "cases", "result", "path", "programs", "tolerance"}   in JSON

This file imports nothing of its package, because the process could not.
"""

import importlib.abc
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

HIDDEN = ("mlx_runtime", "src")
"""Packages that the process cannot import: this one, and the project's."""

STEP = "step: "

Function = Callable[[Mapping[str, Any]], dict[str, Any]]


class Hiding(importlib.abc.MetaPathFinder):
    """Finder, to be placed before all others, that raises for hidden packages."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] in HIDDEN:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def load(folder: Path, program: str) -> Function:
    """Return the function of a program: `pt2`, `aoti` or `onnx`."""
    import torch

    if program == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(str(folder / "program.onnx"), providers=["CPUExecutionProvider"])
        names = [item.name for item in session.get_outputs()]
        wanted = [item.name for item in session.get_inputs()]

        def run(batch: Mapping[str, Any]) -> dict[str, Any]:
            found = session.run(names, {name: batch[name].cpu().numpy() for name in wanted})
            return {name: torch.from_numpy(value) for name, value in zip(names, found, strict=True)}

        return run
    if program == "aoti":
        compiled: Function = torch._inductor.aoti_load_package(str(folder / "program_aoti.pt2"))
        return compiled
    module: Function = torch.export.load(str(folder / "program.pt2")).module()
    return module


def difference(expected: Mapping[str, Any], found: Mapping[str, Any]) -> tuple[float, str]:
    """Return the largest difference of floating point outputs, and the name of its output.

    It is relative to the largest value of the output if that is greater than 1. Other outputs have to be equal.

    Raises:
        ValueError: the outputs have other names, shapes or types, or other values than floating point outputs may.
    """
    import torch

    if set(found) != set(expected):
        raise ValueError(f"it returns {', '.join(found)} instead of {', '.join(expected)}")
    largest = (0.0, next(iter(expected)))
    for name, wanted in expected.items():
        value = found[name]
        if value.shape != wanted.shape or value.dtype != wanted.dtype:
            kinds = [f"{item.dtype} {tuple(item.shape)}" for item in (value, wanted)]
            raise ValueError(f"{name} is {kinds[0]} instead of {kinds[1]}")
        if not wanted.numel():
            continue
        if not (wanted.is_floating_point() or wanted.is_complex()):
            if not torch.equal(value, wanted):
                raise ValueError(f"{name} differs in {int((value != wanted).sum())} values")
            continue
        finite = torch.isfinite(wanted)
        if not torch.equal(finite, torch.isfinite(value)) or not torch.allclose(
            value[~finite], wanted[~finite], equal_nan=True
        ):
            raise ValueError(f"{name} has NaN or infinity at other positions")
        exact = torch.complex128 if wanted.is_complex() else torch.float64
        value, wanted = value.to(exact)[finite], wanted.to(exact)[finite]
        if wanted.numel():
            error = float((value - wanted).abs().max()) / max(1.0, float(wanted.abs().max()))
            largest = max(largest, (error, name))
    return largest


def check(program: str, function: Function, cases: Mapping[int, Any]) -> dict[str, Any]:
    """Return the largest difference by number of rows, and the seconds that the calls took."""
    import torch

    differences: dict[int, float] = {}
    outputs: dict[int, str] = {}
    began = time.perf_counter()
    for rows, (batch, expected) in cases.items():
        print(f"{STEP}running {program} with {rows} row{'s' * (rows != 1)}", flush=True)
        try:
            with torch.no_grad():
                found = function(batch)
        except Exception as error:
            first = str(error).strip().partition("\n")[0] or type(error).__name__
            return {"problem": f"fails with {rows} row{'s' * (rows != 1)}: {first}"}
        try:
            differences[rows], outputs[rows] = difference(expected, found)
        except ValueError as error:
            return {"problem": f"differs from predict with {rows} row{'s' * (rows != 1)}: {error}"}
    return {"differences": differences, "outputs": outputs, "seconds": round(time.perf_counter() - began, 3)}


def run_readme(folder: Path, examples: Any, tolerance: float) -> str | None:
    """Execute the code in README.md. Return why its outputs for the example rows are wrong, or None."""
    import torch

    os.chdir(folder)
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", Path("README.md").read_text("utf-8"), re.DOTALL)):
        if "from src" in code or "import src" in code:  # needs the code of the project
            continue
        names: dict[str, Any] = {"__name__": "__main__"}
        try:
            exec(compile(code, "README.md", "exec"), names)
            outputs = {name: torch.as_tensor(value) for name, value in names["outputs"].items()}
            if (error := difference(examples, outputs)[0]) > tolerance:
                return f"block {number + 1} differs from predict by {error:.2g}, with a tolerance of {tolerance:g}"
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            return f"block {number + 1}: {type(error).__name__}: {error} (line {last.lineno})"
    return None


def main() -> None:
    job = json.load(sys.stdin)
    sys.path[:] = [*sys.path, *(item for item in job["path"] if item not in sys.path)]
    sys.meta_path.insert(0, Hiding())
    import torch

    folder, cases = Path(job["folder"]), torch.load(job["cases"], weights_only=True)
    result: dict[str, Any] = {"programs": {}, "hidden": all(map(_is_hidden, HIDDEN))}
    for program in job["programs"]:
        began = time.perf_counter()
        print(f"{STEP}loading {program}", flush=True)
        try:
            function = load(folder, program)
        except Exception as error:
            result["programs"][program] = {"problem": f"does not load: {type(error).__name__}: {error}"}
            continue
        loaded = round(time.perf_counter() - began, 3)
        result["programs"][program] = {"load_seconds": loaded} | check(program, function, cases["rows"])
    if not any("problem" in item for item in result["programs"].values()):
        print(f"{STEP}running the code in README.md", flush=True)
        result["readme"] = run_readme(folder, cases["examples"], job["tolerance"])
    Path(job["result"]).write_text(json.dumps(result))


def _is_hidden(name: str) -> bool:
    try:
        __import__(name)
    except ModuleNotFoundError:
        return True
    return False


if __name__ == "__main__":
    main()
