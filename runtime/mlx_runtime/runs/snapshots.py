"""The code of a run: stored with it, and imported under a private name.

All experiments call their package `src`. Modules of a snapshot are imported into a private package, in which `src`
refers to the snapshot, so that one process can open models of several experiments.
"""

import builtins
import contextlib
import functools
import hashlib
import importlib
import importlib.machinery
import importlib.util
import io
import modulefinder
import os
import re
import subprocess
import sys
import tempfile
import types
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pathspec import GitIgnoreSpec

from mlx_runtime.config.constructors.declarations import SourceLoader
from mlx_runtime.errors import ConfigError, StorageError, UsageError, short_message
from mlx_runtime.runs.folder import RunFolder
from mlx_runtime.runs.uploads import RUNTIME, Upload
from mlx_runtime.storage.documents import stays_below
from mlx_runtime.storage.files import join_path

FILE_BYTES, ALL_BYTES = 1 << 20, 20 << 20
"""Maximum size of a file in a snapshot, and of all files together; larger files are data, not code."""

CODE = "code.zip"
PREFIX = "_mlx_code_"

WITH_CODE = GitIgnoreSpec.from_lines(
    (
        *("/main.py", "/src/conf.yaml", "/src/variants/**/*.yaml", ".gitignore"),
        *("/requirements.txt", "/constraints.txt", "/pyproject.toml"),
    )
)
"""Files that the code of an experiment needs but does not import."""


def store(project: Path, folder: RunFolder, listed: Sequence[str] = ()) -> None:
    """Store the code of a project as `code.zip` of a run, `src` first.

    It contains the files that a launch would upload and that git tracks, the code imports, or `listed` names, with
    patterns of a .gitignore. Other files in the folder are left out.
    """
    code = folder.path / CODE
    part = code.with_suffix(".part")
    try:
        part.unlink(missing_ok=True)
        with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as archive:
            left = ALL_BYTES
            for path, size in sorted(_files(project, listed), key=lambda item: (item[0].parts[0] != "src", item)):
                if size > min(FILE_BYTES, left) or path.parts[0] == RUNTIME.name:  # part of every job
                    continue
                with contextlib.suppress(FileNotFoundError):  # removed in the meantime
                    archive.write(project / path, path)
                    left -= size
        part.replace(code)
    except OSError as error:
        raise StorageError(f"cannot write {code}: {error.strerror or error}") from error
    folder.push(code, must=True)


def refuse_unmatched(project: Path, listed: Sequence[str]) -> None:
    """Raise ConfigError if a line of `cfg.code_files` matches no file that a launch would upload."""
    files = [path for path, _ in Upload.of(project).files] if listed else []
    for line in listed:
        if not any(map(GitIgnoreSpec.from_lines([line.removeprefix("!")]).match_file, files)):
            raise ConfigError(f"cfg.code_files names {line!r}, which matches no file that a launch would upload")


def unpack(folder: RunFolder) -> Path:
    """Unpack the stored code of a run into a temporary folder, once per process and version of the code."""
    try:
        content = folder.read(CODE)
    except FileNotFoundError as error:
        raise UsageError(f"{folder.title} has no stored code; open it in the folder of its experiment") from error
    except OSError as error:
        raise StorageError(f"cannot read {join_path(folder.location, CODE)}: {short_message(error)}") from error
    digest = hashlib.sha256(content).hexdigest()[:16]
    if digest not in _unpacked:
        temporary = tempfile.TemporaryDirectory(prefix="mlx-code-")
        try:
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                if odd := [name for name in archive.namelist() if not stays_below(name.removesuffix("/"))]:
                    raise ValueError(f"it names {odd[0]!r:.100}, which is not a path below the project")
                if sum(member.file_size for member in archive.infolist()) > ALL_BYTES:
                    raise ValueError(f"its files have more than {ALL_BYTES:,} bytes")
                archive.extractall(temporary.name)
        except Exception as error:  # zipfile raises many types of exceptions
            raise StorageError(f"{join_path(folder.location, CODE)} is damaged: {short_message(error)}") from error
        _unpacked[digest] = temporary  # removed when this process exits
    return Path(_unpacked[digest].name)


def is_unpacked(project: Path) -> bool:
    """Return True if a folder is the unpacked code of a run."""
    return str(project) in {temporary.name for temporary in _unpacked.values()}


def project_of(cls: type) -> Path:
    """Return the folder of a class's project: the unpacked code of a run, or the working directory."""
    file = Path(getattr(sys.modules.get(cls.__module__), "__file__", None) or "")
    return next((folder for folder in file.parents if is_unpacked(folder)), Path.cwd())


def _files(project: Path, listed: Sequence[str]) -> list[tuple[Path, int]]:
    """Return the files of a project that belong to its code, with their sizes in bytes."""
    files = Upload.of(project).files
    known = _tracked_files(project)
    chosen = GitIgnoreSpec.from_lines(listed)
    known |= {path for path, _ in files if WITH_CODE.match_file(path) or chosen.match_file(path)}
    if any(path.suffix == ".py" and path not in known for path, _ in files):
        known |= _imported_files(project)
    return [(path, size) for path, size in files if path in known]


def _tracked_files(project: Path) -> set[Path]:
    """Return the files of a project that git tracks; empty outside a repository."""
    command = ["git", "ls-files", "-z", "--recurse-submodules", "--", "."]
    try:
        done = subprocess.run(command, cwd=project, capture_output=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return set()
    return {Path(os.fsdecode(name)) for name in done.stdout.split(b"\0") if name} if not done.returncode else set()


def _imported_files(project: Path) -> set[Path]:
    """Return the modules of a project that this process has imported, its experiment imports, or conf.yaml names."""
    root = project.resolve()
    finder = modulefinder.ModuleFinder([str(root)])
    conf = root / "src" / "conf.yaml"
    text = conf.read_text(encoding="utf-8", errors="replace") if conf.is_file() else ""
    for name in {"src.experiment", "main", *re.findall(r"\bsrc(?:\.\w+)+", text)}:
        while name and name not in finder.modules:
            # A class in a module, or broken code; modulefinder does not know packages without `__init__.py`.
            with contextlib.suppress(ImportError, SyntaxError, ValueError, AttributeError):
                finder.import_hook(name)
            name = name.rpartition(".")[0]
    return _below(root, [*finder.modules.values(), *sys.modules.values()])


def _below(root: Path, modules: Iterable[Any]) -> set[Path]:
    """Return the files of modules that are below a folder."""
    files, below = [getattr(module, "__file__", None) for module in modules], f"{root}{os.sep}"
    return {Path(file).relative_to(root) for file in files if isinstance(file, str) and file.startswith(below)}


def changed_files(project: Path, folder: RunFolder, listed: Sequence[str] = ()) -> list[str]:
    """Return the files in `src` of a project, and its imported scripts, that differ from the stored code of a run."""
    stored, scripts = unpack(folder), _below(project.resolve(), list(sys.modules.values()))
    before = {path.relative_to(stored): path.read_bytes() for path in (stored / "src").rglob("*") if path.is_file()}
    before |= {path: (stored / path).read_bytes() for path in scripts if (stored / path).is_file()}
    files = {path for path, size in _files(project, listed) if path.parts[0] == "src" and size <= FILE_BYTES}
    files |= {path for path in before if (project / path).is_file()}
    present = {path: (project / path).read_bytes() for path in files}
    return sorted(str(path) for path in before.keys() | present.keys() if before.get(path) != present.get(path))


_unpacked: "dict[str, tempfile.TemporaryDirectory[str]]" = {}


def private(tree: Any, project: Path) -> Any:
    """Return a config whose `_target_`s in `src` name the modules of a project, even if `src` is another one here."""
    prefix = PREFIX + hashlib.sha256(str(project.resolve()).encode()).hexdigest()[:16]
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)
    if prefix not in sys.modules:
        package = types.ModuleType(prefix)
        package.__path__ = [str(project)]
        sys.modules[prefix] = package
    return _rename_targets(tree, prefix)


def public(text: str) -> str:
    """Return a message with the original names of modules in place of private ones."""
    return re.sub(rf"{PREFIX}\w+\.", "", text)


def _rename_targets(node: Any, prefix: str) -> Any:
    if isinstance(node, list):
        return [_rename_targets(item, prefix) for item in node]
    if not isinstance(node, dict):
        return node
    made = {name: _rename_targets(item, prefix) for name, item in node.items()}
    target = made.get("_target_")
    if isinstance(target, str) and target.startswith("src."):
        made["_target_"] = f"{prefix}.{target}"
    return made


class _Finder:
    """Finds modules of private packages, and lets them import each other by their original names."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith(PREFIX):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(SourceLoader):
    def exec_module(self, module: types.ModuleType) -> None:
        prefix = module.__name__.partition(".")[0]
        vars(module)["__builtins__"] = vars(builtins) | {"__import__": functools.partial(_import, prefix)}
        super().exec_module(module)


def _import(
    prefix: str, name: str, globals: Any = None, locals: Any = None, fromlist: Sequence[str] | None = (), level: int = 0
) -> Any:
    """`__import__` of the modules in a private package."""
    top = name.partition(".")[0]
    spec = importlib.util.find_spec(f"{prefix}.{top}") if top and not level else None
    if spec is None or (spec.origin is None and top != "src"):  # other folders without __init__.py may not be packages
        return builtins.__import__(name, globals, locals, fromlist or (), level)
    found = builtins.__import__(f"{prefix}.{name}", globals, locals, fromlist or (), 0)
    return found if fromlist else sys.modules[f"{prefix}.{top}"]
