"""Collect the files to upload to a cluster: those of an experiment that git and Ray do not ignore, and the runtime."""

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pathspec import GitIgnoreSpec

from mlx_runtime.errors import UsageError
from mlx_runtime.storage.local import read_regular
from mlx_runtime.storage.secrets.redaction import FILES

IGNORE_FILES = {".gitignore", ".rayignore"}

NEVER = (
    *(".git", ".venv/", "venv/", "__pycache__/", "*.pyc", "runs/", ".prepared/", "node_modules/"),
    *(".mypy_cache/", ".pytest_cache/", ".ruff_cache/", ".DS_Store"),
)
"""Files that no run needs; left out regardless of ignore files."""

NAMED = 10
"""Number of files that a note lists; the rest is counted."""

RUNTIME = Path(__file__).parents[1]


@dataclass(frozen=True)
class Upload:
    """The files of a folder that a job needs."""

    folder: Path
    files: tuple[tuple[Path, int], ...]  # path relative to the folder, and size in bytes
    left_out: dict[str, tuple[Path, ...]]  # paths not uploaded for other reasons than ignore files, by reason

    @classmethod
    def of(cls, folder: Path) -> "Upload":
        """Collect the files of a folder. Only ignore files are read."""
        files: list[tuple[Path, int]] = []
        left_out: dict[str, list[Path]] = {}
        for path, size_or_reason in _walk(folder.resolve()):
            if isinstance(size_or_reason, int):
                files.append((path, size_or_reason))
            else:
                left_out.setdefault(size_or_reason, []).append(path)
        return cls(folder, tuple(sorted(files)), {why: tuple(sorted(paths)) for why, paths in left_out.items()})

    @property
    def notes(self) -> list[str]:
        """Files left out, one line per reason."""
        return [
            f"not uploaded, {why}: {', '.join(map(str, paths[:NAMED]))}"
            + (f" and {len(paths) - NAMED:,} more" if len(paths) > NAMED else "")
            for why, paths in self.left_out.items()
        ]

    @property
    def size_bytes(self) -> int:
        return sum(size for _, size in self.files)

    def largest(self, count: int = 10) -> list[tuple[Path, int]]:
        return sorted(self.files, key=lambda item: item[1], reverse=True)[:count]

    @contextlib.contextmanager
    def stage(self) -> Iterator[Path]:
        """Copy the files and the runtime to a temporary folder for the duration of the block."""
        with tempfile.TemporaryDirectory(prefix="mlx-upload-") as temporary:
            for path, _ in self.files:
                target = Path(temporary, path)
                target.parent.mkdir(parents=True, exist_ok=True)
                with contextlib.suppress(FileNotFoundError):  # removed since the folder was listed
                    shutil.copy(self.folder / path, target)
            ignored = shutil.ignore_patterns("__pycache__", "template", "*.pyc")
            shutil.copytree(RUNTIME, Path(temporary, RUNTIME.name), ignore=ignored, dirs_exist_ok=True)
            yield Path(temporary)


def _walk(root: Path) -> Iterator[tuple[Path, int | str]]:
    """Yield each path with its size in bytes, or with the reason for leaving it out."""
    ignored = _IgnoreRules(root)
    for where, folders, files in os.walk(root, followlinks=False):
        here = Path(where)
        for name in IGNORE_FILES.intersection(files):
            ignored.add(here / name, here)
        entered = []
        for name in sorted(folders):
            path = here / name
            if ignored.matches(path, is_folder=True):
                continue
            if why := _refusal(path, root, is_folder=True):
                yield path.relative_to(root), why
            else:
                entered.append(name)
        folders[:] = entered
        for name in files:
            path = here / name
            with contextlib.suppress(OSError):  # a broken link, a socket
                if not ignored.matches(path, is_folder=False) and path.is_file():
                    yield path.relative_to(root), _refusal(path, root, is_folder=False) or path.stat().st_size


class _IgnoreRules:
    """The ignore files of a folder, and of the repository around it."""

    _never = GitIgnoreSpec.from_lines(NEVER)

    def __init__(self, root: Path) -> None:
        self._of_git: list[tuple[Path, GitIgnoreSpec]] = []
        self._of_ray: list[tuple[Path, GitIgnoreSpec]] = []
        for file, base in _ignore_files_above(root):
            self.add(file, base)
        if self._ignores(root, is_folder=True):  # the whole project is ignored, so rules of parent folders do not apply
            self._of_git.clear()

    def add(self, file: Path, base: Path) -> None:
        """Read an ignore file, whose lines refer to a folder."""
        lines = read_regular(file, UsageError).decode(errors="replace").splitlines()
        chain = self._of_ray if file.name == ".rayignore" else self._of_git
        chain.append((base, GitIgnoreSpec.from_lines(lines)))

    def matches(self, path: Path, *, is_folder: bool) -> bool:
        name = f"{path.name}/" if is_folder else path.name
        return self._never.match_file(name) or self._ignores(path, is_folder=is_folder)

    def _ignores(self, path: Path, *, is_folder: bool) -> bool:
        """Return True if git or Ray ignores a path: for each, the nearest file with a rule for it decides."""
        for chain in (self._of_git, self._of_ray):
            for base, spec in reversed(chain):
                if path.is_relative_to(base):
                    ignored = spec.check_file(f"{path.relative_to(base)}{'/' if is_folder else ''}").include
                    if ignored:
                        return True
                    if ignored is not None:
                        break
        return False


_SECRET = GitIgnoreSpec.from_lines(FILES)


def _refusal(path: Path, root: Path, *, is_folder: bool) -> str | None:
    """Return the reason for not uploading a file or folder, or None."""
    target = path.resolve()
    if not target.is_relative_to(root):
        return "a link out of the project"
    if is_folder and path.is_symlink():
        return "a link to a folder"
    parts = {path.name, *target.relative_to(root).parts}  # a link may have a harmless name
    if any(_SECRET.match_file(form) for part in parts for form in (part.lower(), f"{part.lower()}/")):
        return "may hold secrets"
    return None


def _ignore_files_above(folder: Path) -> Iterator[tuple[Path, Path]]:
    """Yield git's ignore files outside a folder that apply to it, each with the folder that its lines refer to."""
    command = ["git", "rev-parse", "--show-toplevel", "--git-path", "info/exclude"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return
    if done.returncode:
        return
    top, exclude = (folder / line for line in done.stdout.splitlines())
    if exclude.is_file():
        yield exclude, top
    for above in reversed(folder.parents):
        if above.is_relative_to(top) and (above / ".gitignore").is_file():
            yield above / ".gitignore", above
