"""Exports on disk: their description, and the predictor of one."""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_runtime.companions.serving.exports import proof
from mlx_runtime.companions.serving.predictor import Predictor
from mlx_runtime.companions.serving.schema import STRING, TYPES, Schema
from mlx_runtime.companions.sharding import tensor_files
from mlx_runtime.data.batches import Batch
from mlx_runtime.errors import USER_ERRORS, StorageError, UsageError, short_message
from mlx_runtime.extras import require
from mlx_runtime.storage import publishing
from mlx_runtime.storage.documents import (
    COUNT,
    NAME,
    TEXT,
    from_json,
    list_of,
    mapping_of,
    mapping_with,
    one_of,
    stays_below,
)
from mlx_runtime.storage.files import storage_at
from mlx_runtime.storage.local import open_regular

EXPORT = "export.json"
VERSION = 1
PROGRAMS = {"pt2": "program.pt2", "aoti": "program_aoti.pt2", "onnx": "program.onnx"}
"""Names of programs in the folder, in the order in which `load_export` prefers them."""

DOCUMENT = {
    "version": COUNT,
    "experiment": NAME,
    "run": NAME,
    "checkpoint": mapping_with({"name": NAME}, needs=("name",)),
    "programs": list_of(one_of(*PROGRAMS)),
    "files": mapping_of(mapping_with({"size_bytes": COUNT, "sha256": TEXT}, needs=("size_bytes", "sha256"))),
}
"""Types of the fields of `export.json` that are read."""


def is_export(folder: Path) -> bool:
    """Return True if a folder is an export."""
    with contextlib.suppress(StorageError, UsageError):
        return bool(describe(folder))
    return False


def describe(folder: Path) -> dict[str, Any]:
    """Return the content of the `export.json` of a folder.

    Raises:
        UsageError: the folder is not an export, or one of a newer version.
        StorageError: it cannot be read.
    """
    if not (folder / EXPORT).is_file():
        raise UsageError(f"{folder} is not an export: it has no {EXPORT}; write one with mlx xp export")
    about = _document(folder, EXPORT, DOCUMENT, needs=tuple(DOCUMENT))
    if about["version"] != VERSION:
        raise UsageError(f"{folder} is an export of version {about['version']}; this package reads version {VERSION}")
    return about


def load_export(folder: str | Path, program: str | None = None) -> Predictor:
    """Return the predictor of an export, which answers rows as the run does: `load_export(folder)(rows)`.

    Load only exports from people whom you trust: `torch.export.load` unpickles parts of a `.pt2` file without
    restrictions and evaluates expressions in it, and a compiled program is machine code. The sizes and SHA-256 of the
    files are checked first, which detects damage, but not malice.

    Args:
        folder: a folder of `mlx xp export`.
        program: `pt2`, `aoti` or `onnx`; by default the first of them that the folder has.

    Raises:
        UsageError: the folder is not an export, or lacks such a program.
        StorageError: a file is missing or damaged.
        MissingLibraryError: the program needs onnxruntime.
    """
    folder = Path(folder)
    about = describe(folder)
    chosen = next((name for name in PROGRAMS if name in about["programs"] and program in (None, name)), None)
    if chosen is None:
        known = ", ".join(about["programs"])
        raise UsageError(f"{folder} has no program{f' {program}' if program else ''}, only {known or 'weights'}")
    needed = {PROGRAMS[chosen], "schema.json", "examples.safetensors"}
    needed |= {file.name for file in folder.glob("examples.json")}  # strings
    for name in sorted(needed | {name for name in about["files"] if name.startswith(f"{PROGRAMS[chosen]}.")}):
        _check_file(folder, name, about["files"])
    schema = read_schema(folder)
    if chosen == "onnx":
        require("onnxruntime", f"the program of {folder}")
    try:
        function = proof.load(folder, chosen)
    except USER_ERRORS as error:
        raise StorageError(f"{folder / PROGRAMS[chosen]} does not load: {short_message(error)}") from error
    title = f"{about['experiment']}/{about['run']} {about['checkpoint']['name']}"
    return Predictor(function, schema, title)


def read_schema(folder: Path) -> Schema:
    """Return the schema of an export, with its example rows."""
    examples = _examples(folder)
    try:
        schema = Schema.from_document(_document(folder, "schema.json", {}), examples)
    except ValueError as error:
        raise StorageError(f"{folder / 'schema.json'} is damaged: {error}") from error
    for column in schema.columns:
        value = examples.get(column.name)
        fits = (
            isinstance(value, list) if column.dtype == STRING else getattr(value, "dtype", None) == TYPES[column.dtype]
        )
        if not fits:
            raise StorageError(f"{folder / 'examples.safetensors'} does not fit schema.json: {column.name}")
    return schema


def _examples(folder: Path) -> Batch:
    file = folder / "examples.safetensors"
    try:
        found: Batch = dict(tensor_files.read(file.read_bytes()))
        if (folder / "examples.json").is_file():
            found |= _document(folder, "examples.json", {})
    except (OSError, ValueError) as error:
        raise StorageError(f"{file} is damaged: {short_message(error)}") from error
    return found


def _document(folder: Path, name: str, shape: Mapping[str, Any], needs: tuple[str, ...] = ()) -> dict[str, Any]:
    try:
        return from_json(storage_at(str(folder)).document(name), shape, needs)
    except (OSError, ValueError) as error:
        raise StorageError(f"{folder / name} is damaged: {short_message(error)}") from error


def _check_file(folder: Path, name: str, files: Mapping[str, Any]) -> None:
    """Raise StorageError unless a file has the size and the SHA-256 of the description."""
    file, known = folder / name, files.get(name)
    if known is None or not stays_below(name):
        raise StorageError(f"{folder / EXPORT} is damaged: it does not list {name}")
    try:
        found, size = sha256_of(file)
    except OSError as error:
        raise StorageError(f"cannot read {file}: {short_message(error)}") from error
    if size != known["size_bytes"] or found != known["sha256"]:
        raise StorageError(f"{file} is damaged: it is not the file that was exported; export it again")


def sha256_of(file: Path) -> tuple[str, int]:
    """Return the SHA-256 of a file, in hexadecimal, and its size in bytes."""
    with open_regular(str(file)) as stream:
        return publishing.sha256_of(stream)
