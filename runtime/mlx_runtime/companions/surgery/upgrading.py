"""Upgrades of a project: what has changed in its template since it was generated is merged into its files.

A hook of the template writes `.mlx/template.json`: the version of the template, its answers, and each file as it was
rendered, which is the base of the merge. Files that belong to the user, like `src/`, have only their hashes there. The
file is replaced last, so an upgrade that was interrupted can be undone and repeated.
"""

import os
import re
import stat
import subprocess
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from mlx_runtime.cli.verbs import projects
from mlx_runtime.config.projects import Kind
from mlx_runtime.errors import MlxError, UsageError
from mlx_runtime.runs.sources import file_digest
from mlx_runtime.storage import documents
from mlx_runtime.storage.documents import FLAG, TEXT, list_of, mapping_of, mapping_with
from mlx_runtime.storage.local import read_regular, write_atomic

RECORD = Path(".mlx/template.json")

UNDO = "git stash push --include-untracked -- ."
"""Command that puts all uncommitted changes in the project folder aside."""

_VERSION = documents.Kind("a version", lambda value: isinstance(value, str) and bool(re.fullmatch(r"[\w.+-]+", value)))
_PATH = documents.Kind("a path below the project", documents.stays_below)
_FILE = mapping_with({"sha256": TEXT, "executable": FLAG, "lines": list_of(TEXT)})
_SHAPE = {"version": _VERSION, "context": mapping_of(TEXT), "files": mapping_of(_FILE, _PATH)}


class File(NamedTuple):
    """A file of a project or a template."""

    content: bytes
    executable: bool


@dataclass(frozen=True)
class Rendering:
    """What a version of a template rendered for a project of this name: its files, and the hashes of the user's."""

    version: str
    name: str
    files: Mapping[str, File]
    users: Mapping[str, str]

    @classmethod
    def read(cls, kind: Kind, folder: Path) -> "Rendering":
        """Read the record of a project. Raises UsageError if there is none, or it is damaged."""
        try:
            record = documents.from_json(read_regular(folder / RECORD, UsageError), _SHAPE, needs=tuple(_SHAPE))
            files = record["files"]
            return cls(
                record["version"],
                record["context"][f"{kind.file.stem}_name"],
                {
                    path: File("".join(item["lines"]).encode("latin-1"), item.get("executable", False))
                    for path, item in files.items()
                    if "lines" in item
                },
                {path: item["sha256"] for path, item in files.items() if "lines" not in item},
            )
        except FileNotFoundError as error:
            raise UsageError(
                f"there is no {RECORD}: this {kind.title} is older than upgrades; to follow the template from now on: "
                f"{kind.command} new NAME -o /tmp && cp -r /tmp/NAME/.mlx ."
            ) from error
        except (ValueError, KeyError) as error:
            raise UsageError(f"{RECORD} is damaged ({error}); restore it with: git checkout HEAD {RECORD}") from error


class Change(NamedTuple):
    """What an upgrade does to a file, in a word, and why. A file that is absent is None."""

    path: str
    word: str
    reason: str
    before: File | None
    after: File | None


@dataclass(frozen=True)
class Upgrade:
    """The changes of a project from the template in `base` to that in `new`, whose record has the content `record`."""

    folder: Path
    base: Rendering
    new: Rendering
    record: bytes
    changes: tuple[Change, ...]

    @property
    def needed(self) -> bool:
        """False if the project follows the template already."""
        return self.base != self.new

    @property
    def conflicts(self) -> list[str]:
        return [change.path for change in self.changes if change.word == "conflict"]

    def lines(self) -> Iterator[str]:
        """Yield a line for each file that changes, or does not although the template does, and one about the user's."""
        if not self.needed:
            yield f"the project follows the template of version {self.new.version} already"
            return
        yield f"template  {self.base.version} -> {self.new.version}"
        for change in self.changes:
            yield f"{change.word:<10}{change.path}{f': {change.reason}' if change.reason else ''}"
        before, after = self.base.users, self.new.users
        users = [path for path in sorted({*before, *after}) if before.get(path) != after.get(path)]
        if users := [path for path in users if file_digest(self.folder / path) != after.get(path, "none")]:
            yield f"yours     {', '.join(users)}: the template has changed them, this project keeps its own"

    def diff(self) -> str:
        """Return the changes as git shows them."""
        with TemporaryDirectory(prefix="mlx-upgrade-") as temporary:
            for change in self.changes:
                for side, file in (("a", change.before), ("b", change.after)):
                    if file is not None and change.before != change.after:
                        _write(Path(temporary, side, change.path), file)
            for side in "ab":
                Path(temporary, side).mkdir(exist_ok=True)
            command = ["diff", "--no-index", "--no-ext-diff", "--no-renames", "--no-prefix", "a", "b"]
            text = _git(Path(temporary), *command, accepted=(0, 1)).stdout
        return text.replace(b"\r\n", b"\n").decode(errors="replace")

    def apply(self) -> None:
        """Write the files, and the record last. Raises UsageError if a file has changed since it was planned."""
        changes = [change for change in self.changes if change.before != change.after]
        for change in changes:
            if _read(self.folder / change.path) != change.before:
                raise UsageError(f"{change.path} has changed in the meantime; nothing was upgraded, type it again")
        for change in changes:
            if change.after is None:
                (self.folder / change.path).unlink()
            else:
                _write(self.folder / change.path, change.after)
        write_atomic(self.folder / RECORD, self.record)


def plan(kind: Kind) -> Upgrade:
    """Return the upgrade of the project in the working directory to the template in this package. Writes nothing.

    Raises:
        UsageError: the project has no record, git cannot undo an upgrade, or the project is newer than this package.
    """
    folder = kind.folder()
    base, tracked = Rendering.read(kind, folder), _tracked(folder)
    with TemporaryDirectory(prefix="mlx-upgrade-") as temporary:
        rendered = projects.new(kind, base.name, Path(temporary))
        new, record = Rendering.read(kind, rendered), (rendered / RECORD).read_bytes()
    if _release(base.version) > _release(new.version):
        raise UsageError(
            f"this project follows the template of version {base.version}, and the runtime here is {new.version}; "
            f"install mlx-runtime {base.version} or newer"
        )
    paths = [path for path in sorted({*base.files, *new.files}) if path not in new.users]
    changes = (_change(folder, path, base, new, path in tracked) for path in paths)
    return Upgrade(folder, base, new, record, tuple(filter(None, changes)))


def _release(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d{1,9}", version)[:3]]


def _tracked(folder: Path) -> set[str]:
    """Return the files that git can restore. Raises UsageError if others have changed."""
    done = _git(folder, "status", "--porcelain", "--untracked-files=all", "-z", "--", ".", accepted=(0, 128))
    if done.returncode:
        why = os.fsdecode(done.stderr).strip().partition("\n")[0]
        raise UsageError(f"git, which could undo an upgrade, cannot read {folder} ({why}); type: git init, and commit")
    if done.stdout:
        first = os.fsdecode(done.stdout[3:].partition(b"\0")[0])
        raise UsageError(f"there are uncommitted changes, as in {first}: commit them, or put them aside: {UNDO}")
    listed = os.fsdecode(_git(folder, "ls-files", "-v", "-z", "--", ".").stdout).split("\0")
    tracked = {line[2:] for line in listed if line.startswith("H ")}  # others have edits that git was told to ignore
    if str(RECORD) not in tracked:
        raise UsageError(f"git does not track {RECORD}; type: git add --force {RECORD}, and commit")
    return tracked


def _change(folder: Path, path: str, base: Rendering, new: Rendering, tracked: bool) -> Change | None:
    """Return the change of a file, or None if there is none."""
    old, theirs, file = base.files.get(path), new.files.get(path), folder / path
    if old == theirs:
        return None
    keep = "conflict" if theirs else "kept"
    parents = [folder / parent for parent in Path(path).parents[:-1]]
    if any(parent.is_symlink() or parent.is_file() for parent in parents) or file.is_symlink() or file.is_dir():
        return Change(path, keep, "it is a link or a folder here, or its folder is; it stays", None, None)
    ours = _read(file)
    if ours == theirs:
        return None
    if ours is None:
        if old is None:
            return Change(path, "added", "", None, theirs)
        return Change(path, "missing", "the template has changed it, but it was removed here", None, None)
    if not tracked:
        return Change(path, keep, "git does not track it here; it stays", ours, ours)
    if theirs is None:
        if old is None or (_lines(old.content)[0], old.executable) != (_lines(ours.content)[0], ours.executable):
            return Change(path, keep, "the template has removed it, but it was changed here", ours, ours)
        return Change(path, "deleted", "", ours, None)
    merged, reason = _merge(folder, (old, ours, theirs), [f"template {item.version}" for item in (base, new)])
    if merged == ours and not reason:
        return None
    return Change(path, "conflict" if reason else "updated" if merged == theirs else "merged", reason, ours, merged)


def _merge(folder: Path, files: tuple[File | None, File, File], labels: list[str]) -> tuple[File, str]:
    """Return the merge of base, ours and theirs, and the reason of a conflict, or nothing.

    Line ends and permissions are those of the template if only it has changed them, otherwise ours.
    """
    old, ours, theirs = files
    (mine, our_crlf), (other, their_crlf) = _lines(ours.content), _lines(theirs.content)
    before, old_crlf = _lines(old.content) if old else (b"", None)
    merged, reason = mine, ""
    if mine == before:
        merged = other
    elif other not in (before, mine):
        if b"\0" in before + mine + other:
            reason = "it is binary, and both have changed it; it stays"
        else:
            merged, count = _merge_file(folder, (mine, before, other), ("yours", *labels))
            reason = "the lines are marked with <<<<<<< and >>>>>>>" if count else ""
    if b"\0" not in merged and (their_crlf if our_crlf == old_crlf else our_crlf):
        merged = merged.replace(b"\r\n", b"\n").replace(b"\n", b"\r\n")
    is_executable = theirs.executable if old and ours.executable == old.executable else ours.executable
    return File(merged, is_executable), reason


def _lines(content: bytes) -> tuple[bytes, bool]:
    """Return text with plain line ends, and whether they were those of Windows; other content as it is."""
    crlf = b"\0" not in content and 0 < content.count(b"\n") == content.count(b"\r\n")
    return content.replace(b"\r\n", b"\n") if crlf else content, crlf


def _merge_file(folder: Path, contents: tuple[bytes, bytes, bytes], labels: tuple[str, ...]) -> tuple[bytes, int]:
    """Merge ours, base and theirs with `git merge-file`. Return the result, and the number of conflicts in it."""
    with TemporaryDirectory(prefix="mlx-upgrade-") as temporary:
        names = [Path(temporary, str(number)) for number in range(3)]
        for name, content in zip(names, contents, strict=True):
            name.write_bytes(content)
        words = [word for label in labels for word in ("-L", label)]
        done = _git(folder, "merge-file", "-p", *words, *map(str, names), accepted=range(128))
    return done.stdout, done.returncode


def _read(file: Path) -> File | None:
    """Return a file of the project, or None if there is none."""
    try:
        return File(read_regular(file, UsageError), bool(file.stat().st_mode & stat.S_IXUSR))
    except FileNotFoundError:
        return None


def _write(path: Path, file: File) -> None:
    """Write a file, executable by those who may read it, or by nobody."""
    path.parent.mkdir(parents=True, exist_ok=True)
    mode = path.stat().st_mode if path.exists() else None
    write_atomic(path, file.content)
    mode = stat.S_IMODE(mode or path.stat().st_mode) & ~0o111
    path.chmod(mode | (mode & 0o444) >> 2 if file.executable else mode)


def _git(folder: Path, *words: str, accepted: Container[int] = (0,)) -> "subprocess.CompletedProcess[bytes]":
    """Run git in a folder, and return what it printed."""
    try:
        done = subprocess.run(["git", *words], cwd=folder, capture_output=True)
    except FileNotFoundError as error:
        raise UsageError("git, which merges files and could undo an upgrade, is not installed") from error
    if done.returncode not in accepted:
        raise MlxError(f"git {words[0]} failed: {os.fsdecode(done.stderr).strip()}")
    return done
