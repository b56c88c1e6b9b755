"""What travels to a cluster: the files of an experiment, without what git or Ray is told to ignore, and the runtime."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LIMIT_BYTES = 100 << 20
"""What a cluster takes."""

IGNORE_FILES = (".gitignore", ".rayignore")

NEVER = (
    *(".git/", ".venv/", "venv/", "__pycache__/", "*.pyc", "runs/", ".prepared/", "node_modules/"),
    *(".env", ".mypy_cache/", ".pytest_cache/", ".ruff_cache/", ".DS_Store"),
)
"""What no run needs, whatever ignore files say; `.env` may hold secrets."""

RUNTIME = Path(__file__).parent


@dataclass(frozen=True)
class Upload:
    """The files of a folder that a job needs.

    Attributes:
        folder: they are in.
        files: path relative to it and size in bytes of each.
    """

    folder: Path
    files: tuple[tuple[Path, int], ...]

    @classmethod
    def of(cls, folder: Path) -> "Upload":
        """Look through a folder; nothing is read but ignore files."""
        return cls(folder, tuple(sorted(_found(folder))))

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


def _found(folder: Path) -> Iterator[tuple[Path, int]]:
    from pathspec import GitIgnoreSpec

    never = GitIgnoreSpec.from_lines(NEVER)
    specs: dict[str, list[tuple[Path, GitIgnoreSpec]]] = {name: [] for name in IGNORE_FILES}

    def ignored(path: Path, *, is_folder: bool) -> bool:
        if never.match_file(f"{path.name}/" if is_folder else path.name):
            return True
        for chain in specs.values():
            for base, spec in reversed(chain):  # the nearest ignore file that says something decides
                if path.is_relative_to(base):
                    told = spec.check_file(f"{path.relative_to(base)}{'/' if is_folder else ''}").include
                    if told is not None:
                        if told:
                            return True
                        break
        return False

    for where, folders, files in os.walk(folder, followlinks=False):
        here = Path(where).relative_to(folder)
        for name in IGNORE_FILES:
            if name in files:
                lines = Path(where, name).read_text(encoding="utf-8", errors="replace").splitlines()
                specs[name].append((here, GitIgnoreSpec.from_lines(lines)))
        folders[:] = sorted(name for name in folders if not ignored(here / name, is_folder=True))
        for name in files:
            path = here / name
            with contextlib.suppress(OSError):  # a link that leads nowhere, a socket
                if not ignored(path, is_folder=False) and (folder / path).is_file():
                    yield path, (folder / path).stat().st_size
