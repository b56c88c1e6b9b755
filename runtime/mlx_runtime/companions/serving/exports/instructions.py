"""The README.md of an export. Its code is executed before the export is published."""

import contextlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from mlx_runtime.companions.serving.loading import by_preference
from mlx_runtime.companions.serving.schema import Schema
from mlx_runtime.companions.serving.stored_code import public
from mlx_runtime.errors import USER_ERRORS
from mlx_runtime.loop.experiment import BaseModule
from mlx_runtime.runs.tables import format_number

README = """# {experiment} {run}, {checkpoint}

{metrics}| column | shape and type |
|---|---|
{columns}
{programs}
## From samples to columns

New samples need the same preparation as in the run: {origin}.

## Files

- `export.json`: the run, its metrics, the check, and the size and SHA-256 of each file
- `schema.json`: columns that the program reads; `examples.safetensors`: example rows
- `weights.safetensors`: weights of all models, named `model.parameter`{merged}
- `code/`: the code of the run, unless it has stored none
- `tokenizer/`: if a tool or dataset has one, written by its `save_pretrained`
"""

PROGRAMS = {
    "pt2": """
## Run program.pt2

It needs torch {torch} or newer, and nothing else:

```python
import torch

exported = torch.export.load("program.pt2")
program = exported.module()
(batch,), _ = exported.example_inputs  # {batch}
with torch.no_grad():
    outputs = program(batch)  # {{name: tensor (rows, ...)}}
for name, output in outputs.items():
    print(name, tuple(output.shape), output.dtype)
```
""",
    "onnx": """
## Run program.onnx

It needs onnxruntime, and safetensors for the example rows:

```python
import onnxruntime
from safetensors.numpy import load_file

session = onnxruntime.InferenceSession("program.onnx")
batch = load_file("examples.safetensors")  # {batch}
names = [output.name for output in session.get_outputs()]
outputs = dict(zip(names, session.run(names, batch)))  # {{name: array (rows, ...)}}
for name, output in outputs.items():
    print(name, output.shape, output.dtype)
```
""",
}
"""The code that runs each program."""


def text(about: Mapping[str, Any], schema: Schema, programs: Sequence[str], origin: str) -> str:
    """Return the README of an export.

    Args:
        about: content of `export.json`.
        schema: columns of the inputs.
        programs: the programs in the folder.
        origin: the function that makes the columns.
    """
    columns, metrics = {}, {name: format_number(value) for name, value in sorted(about["metrics"].items())}
    for column in schema.columns:
        sizes = ["rows", *("any" if size is None else str(size) for size in column.shape)]
        columns[column.name] = f"({', '.join(sizes)}) {column.dtype}"
    batch = ", ".join(f'"{name}": {description}' for name, description in columns.items())
    filled = [PROGRAMS[name].format(batch=f"{{{batch}}}", torch=about["torch"].partition("+")[0]) for name in programs]
    return README.format(
        experiment=about["experiment"],
        run=about["run"],
        checkpoint=about["checkpoint"]["name"],
        metrics=f"| metric | value |\n|---|---|\n{_lines(metrics)}\n\n" if metrics else "",
        columns=_lines(columns),
        programs="".join(filled),
        origin=origin,
        merged=f"; the adapters of {', '.join(about['merged'])} are merged" if "merged" in about else "",
    )


def _lines(table: Mapping[str, str]) -> str:
    return "\n".join(f"| `{name}` | {value} |" for name, value in table.items())


def origin_of(dataset: Any) -> str:
    """Return the function that makes batches from samples, like `` `src.datasets.Digits.ray_map_batches` ``."""
    if dataset is None:
        return "see the class of its dataset"
    cls = type(dataset)
    method = next((name for name in ("ray_map_batches", "collate") if hasattr(dataset, name)), "__getitem__")
    function, path = getattr(dataset, method, None), public(f"{cls.__module__}.{cls.__qualname__}.{method}")
    if function is None or inspect.isroutine(function):
        return f"`{path}`"
    return f"`{path}`, a `{type(function).__name__}`"  # a callable object, like a data collator


def dataset_of(experiment: BaseModule, nodes: Mapping[str, Any]) -> Any:
    """Return the first dataset that can be constructed; the data of others may not be on this machine."""
    for name in by_preference(nodes.get("datasets", {})):
        if not name.startswith("_"):
            with contextlib.suppress(*USER_ERRORS):
                return getattr(experiment.datasets, name)
    return None
