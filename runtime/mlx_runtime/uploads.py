"""What travels to a cluster: the files of an experiment, without what git or Ray is told to ignore, and the runtime."""

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mlx_runtime.redaction import FILES

LIMIT_BYTES = 100 << 20
"""What a cluster takes."""

IGNORE_FILES = (".gitignore", ".rayignore")

NEVER = (
    *(".git", ".venv/", "venv/", "__pycache__/", "*.pyc", "runs/", ".prepared/", "node_modules/"),
    *(".mypy_cache/", ".pytest_cache/", ".ruff_cache/", ".DS_Store"),
)
"""What no run needs, whatever ignore files say."""

NAMED = 10
"""Files that a note names; of more it tells the number."""

RUNTIME = Path(__file__).parent


@dataclass(frozen=True)
class Upload:
    """The files of a folder that a job needs.

    Attributes:
        folder: they are in.
        files: path relative to it and size in bytes of each.
        left_out: what is not uploaded although nobody ignores it, by the reason.
    """

    folder: Path
    files: tuple[tuple[Path, int], ...]
    left_out: dict[str, tuple[Path, ...]]

    @classmethod
    def of(cls, folder: Path) -> "Upload":
        """Look through a folder; nothing is read but ignore files."""
        files: list[tuple[Path, int]] = []
        left_out: dict[str, list[Path]] = {}
        for path, found in _found(folder):
            if isinstance(found, int):
                files.append((path, found))
            else:
                left_out.setdefault(found, []).append(path)
        return cls(folder, tuple(sorted(files)), {why: tuple(sorted(paths)) for why, paths in left_out.items()})

    @property
    def notes(self) -> list[str]:
        """One line per reason for what is left out."""
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
    def staged(self) -> Iterator[Path]:
        """A folder with copies of the files and with the runtime beside them, while the block runs."""
        with tempfile.TemporaryDirectory(prefix="mlx-upload-") as temporary:
            for path, _ in self.files:
                target = Path(temporary, path)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(self.folder / path, target)
            ignored = shutil.ignore_patterns("__pycache__", "template", "*.pyc")
            shutil.copytree(RUNTIME, Path(temporary, RUNTIME.name), ignore=ignored, dirs_exist_ok=True)
            yield Path(temporary)


def _found(folder: Path) -> Iterator[tuple[Path, int | str]]:
    """Each file with its size in bytes, and what is left out with the reason."""
    from pathspec import GitIgnoreSpec

    root = folder.resolve()
    never, secret = (GitIgnoreSpec.from_lines(lines) for lines in (NEVER, FILES))
    specs: dict[str, list[tuple[Path, GitIgnoreSpec]]] = {name: [] for name in IGNORE_FILES}

    def read(name: str, file: Path, base: Path) -> None:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        specs[name].append((base, GitIgnoreSpec.from_lines(lines)))

    def ignored(path: Path, *, is_folder: bool) -> bool:
        return never.match_file(f"{path.name}/" if is_folder else path.name) or named(path, is_folder=is_folder)

    def named(path: Path, *, is_folder: bool) -> bool:
        for chain in specs.values():
            for base, spec in reversed(chain):  # the nearest ignore file that says something decides
                if path.is_relative_to(base):
                    told = spec.check_file(f"{path.relative_to(base)}{'/' if is_folder else ''}").include
                    if told is not None:
                        if told:
                            return True
                        break
        return False

    def refused(path: Path, *, is_folder: bool) -> str | None:
        target = path.resolve()
        if not target.is_relative_to(root):
            return "a link out of the project"
        if is_folder and path.is_symlink():
            return "a link to a folder"
        parts = {path.name, *target.relative_to(root).parts[:-1], target.name}  # a link may name its target otherwise
        if any(secret.match_file(form) for part in parts for form in (part.lower(), f"{part.lower()}/")):
            return "may hold secrets"
        return None

    for file, base in _ignore_files_above(root):
        read(".gitignore", file, base)
    if named(root, is_folder=True):  # all of it, so that these do not tell one file from another
        specs[".gitignore"].clear()
    for where, folders, files in os.walk(root, followlinks=False):
        here = Path(where)
        for name in IGNORE_FILES:
            if name in files:
                read(name, here / name, here)
        kept = []
        for name in sorted(folders):
            if not ignored(here / name, is_folder=True):
                if why := refused(here / name, is_folder=True):
                    yield (here / name).relative_to(root), why
                else:
                    kept.append(name)
        folders[:] = kept
        for name in files:
            path = here / name
            with contextlib.suppress(OSError):  # a link that leads nowhere, a socket
                if not ignored(path, is_folder=False) and path.is_file():
                    yield path.relative_to(root), refused(path, is_folder=False) or path.stat().st_size


def _ignore_files_above(folder: Path) -> Iterator[tuple[Path, Path]]:
    """What git ignores in a folder for reasons outside it: files with lines of a .gitignore, and where these count."""
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
