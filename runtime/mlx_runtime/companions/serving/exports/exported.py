"""Exports on disk: their description, and the predictor of one."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mlx_runtime.companions.serving.exports import proof
from mlx_runtime.companions.serving.predictor import Predictor
from mlx_runtime.companions.serving.schema import Schema
from mlx_runtime.companions.sharding import tensor_files
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
PROGRAMS = {"pt2": "program.pt2", "onnx": "program.onnx"}
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
    with _reading(folder / EXPORT):
        about = from_json(storage_at(str(folder)).document(EXPORT), DOCUMENT, tuple(DOCUMENT))
    if about["version"] != VERSION:
        raise UsageError(f"{folder} is an export of version {about['version']}; this package reads version {VERSION}")
    return about


def load_export(folder: str | Path, program: str | None = None) -> Predictor:
    """Return the predictor of an export, which answers rows as the run does: `load_export(folder)(rows)`.

    Load only exports from people whom you trust: `torch.export.load` unpickles parts of a `.pt2` file without
    restrictions and evaluates expressions in it. The sizes and SHA-256 of the files are checked first, which detects
    damage, but not malice.

    Args:
        folder: a folder of `mlx xp export`.
        program: `pt2` or `onnx`; by default the first of them that the folder has.

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
    file = PROGRAMS[chosen]
    others = {name for name in about["files"] if name.startswith(f"{file}.")}  # weights of ONNX
    for name in sorted({file, "schema.json", "examples.safetensors"} | others):
        _check_file(folder, name, about["files"])
    if chosen == "onnx":
        require("onnxruntime", f"the program of {folder}")
    with _reading(folder / "examples.safetensors"):
        examples = dict(tensor_files.read((folder / "examples.safetensors").read_bytes()))
    with _reading(folder / "schema.json"):
        schema = Schema.from_document(from_json(storage_at(str(folder)).document("schema.json"), {}), examples)
    with _reading(folder / file):
        function = proof.load(folder, chosen)
    return Predictor(function, schema, f"{about['experiment']}/{about['run']} {about['checkpoint']['name']}")


@contextlib.contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Translate errors of damaged files."""
    try:
        yield
    except USER_ERRORS as error:
        raise StorageError(f"cannot read {file}: {short_message(error)}") from error


def _check_file(folder: Path, name: str, files: Mapping[str, Any]) -> None:
    """Raise StorageError unless a file has the size and the SHA-256 of the description."""
    file, known = folder / name, files.get(name)
    if known is None or not stays_below(name):
        raise StorageError(f"{folder / EXPORT} is damaged: it does not list {name}")
    with _reading(file):
        found, size = sha256_of(file)
    if size != known["size_bytes"] or found != known["sha256"]:
        raise StorageError(f"{file} is damaged: it is not the file that was exported; export it again")


def sha256_of(file: Path) -> tuple[str, int]:
    """Return the SHA-256 of a file, in hexadecimal, and its size in bytes."""
    with open_regular(str(file)) as stream:
        return publishing.sha256_of(stream)
