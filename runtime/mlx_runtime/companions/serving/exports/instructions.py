"""The README.md of an export. Its code is executed before the export is published."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from mlx_runtime.companions.serving.schema import Column, Schema
from mlx_runtime.runs.tables import format_number

PT2 = """import torch

exported = torch.export.load("program.pt2")
program = exported.module()
(batch,), _ = exported.example_inputs  # {batch}
with torch.no_grad():
    outputs = program(batch)  # {{name: tensor (rows, ...)}}
for name, output in outputs.items():
    print(name, tuple(output.shape), output.dtype)
"""

ONNX = """import onnxruntime
from safetensors.numpy import load_file

session = onnxruntime.InferenceSession("program.onnx")
batch = load_file("examples.safetensors")  # {batch}
names = [output.name for output in session.get_outputs()]
outputs = dict(zip(names, session.run(names, batch)))  # {{name: array (rows, ...)}}
for name, output in outputs.items():
    print(name, output.shape, output.dtype)
"""

AOTI = """import torch
from safetensors.torch import load_file

program = torch._inductor.aoti_load_package("program_aoti.pt2")
rows = load_file("examples.safetensors")
batch = {{name: rows[name] for name in {names}}}  # {batch}
outputs = program(batch)  # {{name: tensor (rows, ...)}}
for name, output in outputs.items():
    print(name, tuple(output.shape), output.dtype)
"""

TITLES = {
    "pt2": (PT2, "needs torch {torch} or newer, and nothing else"),
    "onnx": (ONNX, "needs onnxruntime, and safetensors for the example rows"),
    "aoti": (AOTI, "needs torch {torch}, on a machine like the one that compiled it ({machine}), and safetensors"),
}
"""The code that runs each program, and its requirements."""

LOADERS = {
    "PreTrainedTokenizerBase": "AutoTokenizer",
    "ImageProcessingMixin": "AutoImageProcessor",
    "FeatureExtractionMixin": "AutoFeatureExtractor",
    "ProcessorMixin": "AutoProcessor",
}
"""Classes of transformers that load a folder, by the base of the class that wrote it."""

WEIGHTS = """import sys

from safetensors.torch import load_file

sys.path.insert(0, "code")
{imports}

weights = load_file("weights.safetensors")
models = {{
{models}
}}
for name, model in models.items():
    state = {{key.removeprefix(f"{{name}}."): value for key, value in weights.items() if key.startswith(f"{{name}}.")}}
    model.load_state_dict(state)
    model.eval()
"""


def text(
    about: Mapping[str, Any],
    schema: Schema,
    *,
    programs: Sequence[str],
    origin: str | None,
    tokenizers: Mapping[str, Any],
    models: Mapping[str, Any] | None,
) -> str:
    """Return the README of an export.

    Args:
        about: content of `export.json`.
        schema: columns of the inputs.
        programs: the programs in the folder.
        origin: the function that makes the columns.
        tokenizers: tokenizers and processors by their folder.
        models: node of the models in conf.yaml, for code that builds them; None to leave it out.
    """
    lines = [f"# {about['experiment']} {about['run']}, {about['checkpoint']['name']}", ""]
    if metrics := about["metrics"]:
        lines += ["| metric | value |", "|---|---|"]
        lines += [f"| `{name}` | {format_number(value)} |" for name, value in sorted(metrics.items())] + [""]
    columns = {
        column.name: f"({', '.join(['rows', *map(_size, column.shape)])}) {column.dtype}" for column in schema.columns
    }
    lines += ["| column | shape and type |", "|---|---|"]
    lines += [f"| `{name}` | {description} |" for name, description in columns.items()] + [""]
    batch = ", ".join(f'"{name}": {description}' for name, description in columns.items())
    for program in programs:
        code, needs = TITLES[program]
        facts = {"torch": about["torch"].partition("+")[0], "machine": about["machine"]}
        filled = code.format(batch=f"{{{batch}}}", names=tuple(columns)).rstrip()
        lines += [
            f"## Run the program ({program})",
            "",
            f"It {needs.format(**facts)}:",
            "",
            "```python",
            filled,
            "```",
            "",
        ]
    lines += ["## From samples to columns", "", _preparation(origin, about["code"]), ""]
    lines += _tokenizing(tokenizers, schema, origin)
    if models is not None:
        lines += [
            "## Build the models from the code",
            "",
            "This needs `mlx-runtime` and the libraries of the code:",
            "",
        ]
        lines += ["```python", _building(models).rstrip(), "```", ""]
    lines += [_contents(about), ""]
    return "\n".join(lines)


def _size(size: int | None) -> str:
    return "any" if size is None else str(size)


def _preparation(origin: str | None, has_code: bool) -> str:
    where = ", in the folder `code`" if has_code else ""
    if origin is None:
        return f"Prepare samples as the dataset of the run does; see its class{where}."
    return f"New samples need the same preparation as in the run, by {origin}{where}."


def _tokenizing(tokenizers: Mapping[str, Any], schema: Schema, origin: str | None) -> list[str]:
    lines = []
    for folder, item in tokenizers.items():
        lines += [f"`{folder}/` is a `{type(item).__name__}`, written by its `save_pretrained`.", ""]
        bases = {cls.__name__ for cls in type(item).__mro__}
        loader = next((loader for base, loader in LOADERS.items() if base in bases), None)
        columns = [column for column in schema.columns if column.name in getattr(item, "model_input_names", ())]
        if loader is None or not columns:
            continue
        call = 'images, return_tensors="pt"'
        if loader == "AutoTokenizer":
            call = f'["a text", "another text"], {_lengths(item, columns)}, return_tensors="pt"'
        names = ", ".join(f'"{column.name}"' for column in columns)
        lines += ["```", f"from transformers import {loader}", "", f'prepare = {loader}.from_pretrained("{folder}")']
        lines += [f"encoded = prepare({call})", f"batch = {{name: encoded[name] for name in [{names}]}}", "```", ""]
        lines += [f"Pass the same arguments as {origin or 'the dataset'}, if it passes others.", ""]
    return lines


def _lengths(tokenizer: Any, columns: Sequence[Column]) -> str:
    """Return the arguments with which a tokenizer returns columns of these lengths."""
    if fixed := next((size for column in columns for size in column.shape[:1] if size is not None), None):
        return f'padding="max_length", truncation=True, max_length={fixed}'
    limited = tokenizer.model_max_length < 1e9  # transformers has a huge number for none
    return f"padding=True{', truncation=True' if limited else ''}"


def _building(models: Mapping[str, Any]) -> str:
    imports: set[str] = set()
    built = {name: expression(node, imports) for name, node in models.items() if not name.startswith("_")}
    made = "\n".join(f"    {name!r}: {expression}," for name, expression in built.items())
    return WEIGHTS.format(imports="\n".join(f"import {name}" for name in sorted(imports)), models=made)


def expression(node: Any, imports: set[str]) -> str:
    """Return Python for a node of conf.yaml."""
    if isinstance(node, list):
        return f"[{', '.join(expression(item, imports) for item in node)}]"
    if not isinstance(node, Mapping):
        return repr(node)
    if "_target_" not in node:
        return f"{{{', '.join(f'{name!r}: {expression(item, imports)}' for name, item in node.items())}}}"
    target = node["_target_"]
    imports.add(_module_of(target))
    values = [expression(item, imports) for item in node.get("_args_", ())]
    values += [f"{name}={expression(item, imports)}" for name, item in node.items() if not name.startswith("_")]
    if node.get("_partial_"):
        imports.add("functools")
        return f"functools.partial({', '.join([target, *values])})"
    return f"{target}({', '.join(values)})"


def _module_of(target: str) -> str:
    """Return the module of a target, which this process has imported: `pkg.nets` for `pkg.nets.Net.from_pretrained`."""
    parts = target.split(".")
    names = (".".join(parts[:count]) for count in range(len(parts) - 1, 0, -1))
    return next((name for name in names if name in sys.modules), "builtins")


def _contents(about: Mapping[str, Any]) -> str:
    lines = ["## Files", "", "- `export.json`: the run, its metrics, and the size and SHA-256 of each file"]
    lines += ["- `schema.json`: columns that the program reads; `examples.safetensors`: example rows"]
    lines += ["- `weights.safetensors`: weights of all models, named `model.parameter`"]
    lines += ["- `code/`: the code of the run"] * about["code"]
    if proof := about["proof"]:
        sizes = ", ".join(map(str, proof["batch_sizes"]))
        lines += [
            f"\nThe outputs were compared with those of `predict` on batches of {sizes} rows of {proof['rows_of']}, "
            f"with a tolerance of {proof['tolerance']:g}; `export.json` has the differences under `proof`."
        ]
    lines += [f"\nLicense: {about['license'] or 'not stated'}."]
    return "\n".join(lines)
