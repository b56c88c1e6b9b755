"""The code of an experiment: the files that jobs get and runs store.

These are the files that git tracks or would add, without those that are likely to hold secrets.
"""

import contextlib
import hashlib
import io
import os
import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pathspec import GitIgnoreSpec

from mlx_runtime.errors import StorageError, UsageError, short_message
from mlx_runtime.runs.folder import RunFolder
from mlx_runtime.runs.records import LAUNCHED_FILE
from mlx_runtime.settings import Settings
from mlx_runtime.storage.documents import stays_below
from mlx_runtime.storage.files import join_path
from mlx_runtime.storage.local import read_regular
from mlx_runtime.storage.redaction import FILES

FILE_BYTES, ALL_BYTES = 1 << 20, 20 << 20
"""Maximum size of a file in a snapshot, and of all files together; larger files are data, not code."""

CODE = "code.zip"

NEVER = GitIgnoreSpec.from_lines(
    (
        *(".git", ".venv/", "venv/", "__pycache__/", "*.pyc", "runs/", ".prepared/", "node_modules/"),
        *("/.mlx/template.json", ".mypy_cache/", ".pytest_cache/", ".ruff_cache/", ".ds_store"),
        LAUNCHED_FILE,
    )
)
"""Files that no run needs, even if git tracks them; matched in lower case, as those with secrets."""

_SECRET = GitIgnoreSpec.from_lines(FILES)

NAMED = 10
"""Number of files that a note lists; the rest is counted."""

RUNTIME = Path(__file__).parents[1]

_NOT_SENT = {"__pycache__", "template"}


@dataclass(frozen=True)
class Upload:
    """The files of a folder that a job needs."""

    folder: Path
    files: tuple[tuple[Path, int], ...]  # path relative to the folder, and size in bytes
    left_out: tuple[Path, ...] = ()  # see `_is_private`

    @classmethod
    def of(cls, folder: Path) -> "Upload":
        """Collect the files of a folder, without those that its .rayignore lists."""
        root = folder.resolve()
        ignored = _ignored(root / ".rayignore")
        files: list[tuple[Path, int]] = []
        left_out = []
        for path in sorted(_listed(root)):
            if NEVER.match_file(str(path).lower()) or ignored.match_file(path):
                continue
            if _is_private(root, path):
                left_out.append(path)
            elif (root / path).is_file():  # not removed, and no link that leads nowhere
                files.append((path, (root / path).stat().st_size))
        return cls(folder, tuple(files), tuple(left_out))

    @property
    def notes(self) -> list[str]:
        """A line about the files left out, if there are any."""
        if not self.left_out:
            return []
        more = f" and {len(self.left_out) - NAMED:,} more" if len(self.left_out) > NAMED else ""
        names = ", ".join(map(str, self.left_out[:NAMED]))
        return [f"not uploaded, links, other repositories, or what may hold secrets: {names}{more}"]

    @property
    def sources(self) -> dict[str, Path]:
        """The files, and those of the runtime: each by its path in the working directory of the job."""
        runtime = [file for file in RUNTIME.rglob("*") if not _NOT_SENT.intersection(file.relative_to(RUNTIME).parts)]
        return {str(path): self.folder / path for path, _ in self.files} | {
            str(file.relative_to(RUNTIME.parent)): file for file in runtime if file.is_file()
        }

    @contextlib.contextmanager
    def stage(self) -> Iterator[Path]:
        """Copy the files and the runtime to a temporary folder for the duration of the block."""
        with tempfile.TemporaryDirectory(prefix="mlx-upload-") as temporary:
            for path, source in self.sources.items():
                target = Path(temporary, path)
                target.parent.mkdir(parents=True, exist_ok=True)
                with contextlib.suppress(FileNotFoundError):  # removed since the folder was listed
                    shutil.copy(source, target)
            yield Path(temporary)


def _listed(root: Path) -> set[Path]:
    """Return the files that git tracks or would add; without git, those in `src` and beside it, minus .gitignore.

    A job has the files that were uploaded, without a repository, and lists all of them.
    """
    listed: set[Path] = set()
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z"]  # in a container, the files may be another user's
    try:
        for options in (("--cached", "--recurse-submodules"), ("--others", "--exclude-standard")):
            done = subprocess.run([*command, *options, "--", "."], cwd=root, capture_output=True, check=True)
            listed |= {Path(os.fsdecode(name)) for name in done.stdout.split(b"\0") if name}
    except (FileNotFoundError, subprocess.CalledProcessError):  # no git, or no repository that it can read
        listed = set()
    if not listed:  # or a repository that ignores the whole project
        source = root / "src" if (root / "src").is_dir() and Settings.read().job is None else root
        found = {path.relative_to(root) for path in (*root.glob("*"), *source.rglob("*")) if not path.is_dir()}
        ignored = _ignored(root / ".gitignore") if Settings.read().job is None else GitIgnoreSpec.from_lines(())
        listed = {path for path in found if not ignored.match_file(path)}
    return listed


def _ignored(file: Path) -> GitIgnoreSpec:
    """Return the patterns in a file like .gitignore; none if it does not exist."""
    lines = read_regular(file, UsageError) if file.exists() else b""
    return GitIgnoreSpec.from_lines(lines.decode(errors="replace").splitlines())


def _is_private(root: Path, path: Path) -> bool:
    """Return True for a link to a folder or out of the project, another repository, or what may hold secrets."""
    target = (root / path).resolve()
    if not target.is_relative_to(root) or target.is_dir():
        return True
    names = {str(path).lower(), str(target.relative_to(root)).lower()}  # a link may have a harmless name
    return any(map(_SECRET.match_file, names))


def store(project: Path, folder: RunFolder) -> None:
    """Store the code of a project as `code.zip` of a run, `src` first: the files that a launch would upload."""
    code = folder.path / CODE
    part = code.with_suffix(".part")
    try:
        part.unlink(missing_ok=True)
        with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as archive:
            left = ALL_BYTES
            for path, size in sorted(Upload.of(project).files, key=lambda item: (item[0].parts[0] != "src", item)):
                if size > min(FILE_BYTES, left) or path.parts[0] == RUNTIME.name:  # part of every job
                    continue
                with contextlib.suppress(FileNotFoundError):  # removed in the meantime
                    archive.write(project / path, path)
                    left -= size
        part.replace(code)
    except OSError as error:
        raise StorageError(f"cannot write {code}: {error.strerror or error}") from error
    folder.push(code, must=True)


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


_unpacked: "dict[str, tempfile.TemporaryDirectory[str]]" = {}
