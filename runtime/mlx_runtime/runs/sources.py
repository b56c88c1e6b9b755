"""The source files of an experiment, and whether they have changed."""

import contextlib
import hashlib
import os
import sys
from pathlib import Path

from mlx_runtime.runs.folder import RunFolder
from mlx_runtime.runs.snapshots import FILE_BYTES, Upload, unpack


def source_files(project: Path) -> list[str]:
    """Return the paths of the files in `src` of a project, and of its other Python files."""
    files = [path for path, size in sorted(Upload.of(project).files) if size <= FILE_BYTES]
    return [str(path) for path in files if path.parts[0] == "src" or path.suffix == ".py"]


def file_digest(file: Path) -> str:
    """Return the SHA-256 of a file, or `none` if it cannot be read."""
    with contextlib.suppress(OSError):
        return hashlib.sha256(file.read_bytes()).hexdigest()
    return "none"


def code_digest(project: Path) -> str:
    """Return one digest of the Python files in `src` of a project."""
    names = [path.relative_to(project).as_posix() for path in sorted((project / "src").rglob("*.py"))]
    return hashlib.sha256(repr([(name, file_digest(project / name)) for name in names]).encode()).hexdigest()


def changed_files(project: Path, folder: RunFolder) -> list[str]:
    """Return the files in `src` of a project, and its imported scripts, that differ from the stored code of a run."""
    stored, below = unpack(folder), f"{project.resolve()}{os.sep}"
    imported = [str(getattr(module, "__file__", None)) for module in [*sys.modules.values()]]
    scripts = {file.removeprefix(below) for file in imported if file.startswith(below)}
    files = {name for name in source_files(project) if name.startswith("src/")}
    files |= {str(path.relative_to(stored)) for path in (stored / "src").rglob("*") if path.is_file()}
    files |= {name for name in scripts if (stored / name).is_file()}
    return sorted(name for name in files if file_digest(stored / name) != file_digest(project / name))
