"""Upgrades of a project: what has changed in its template since it was generated is merged into its files.

A hook of the template writes `.mlx/template.json`: the version of the template, its answers, and each file as it was
rendered, which is the base of the merge. Files that belong to the user, like `src/`, have only their hashes there. The
file is replaced last, so an upgrade that was interrupted can be undone and repeated.
"""

import os
import re
import shlex
import stat
import subprocess
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from packaging.version import Version

from mlx_runtime.cli.verbs import projects
from mlx_runtime.config.projects import CONF, SCHEMA, Kind
from mlx_runtime.errors import UsageError
from mlx_runtime.runs.sources import file_digest
from mlx_runtime.storage import documents
from mlx_runtime.storage.documents import FLAG, TEXT, list_of, mapping_of, mapping_with
from mlx_runtime.storage.local import read_regular, write_atomic

RECORD = Path(".mlx/template.json")

BOUND = (str(CONF), str(CONF.with_name(SCHEMA)))
"""The files that are bound again."""

_DIFF = ("diff", "--no-index", "--no-ext-diff", "--no-renames", "--no-prefix")
_PATH = documents.Kind("a path below the project", documents.stays_below)
_FILE = mapping_with({"sha256": TEXT, "executable": FLAG, "lines": list_of(TEXT)})
_SHAPE = {"version": TEXT, "context": mapping_of(TEXT), "files": mapping_of(_FILE, _PATH)}


class File(NamedTuple):
    """A file of a project or a template."""

    content: bytes
    executable: bool


@dataclass(frozen=True)
class Rendering:
    """What a version of a template rendered for a project of this name: its files, and the hashes of the user's.

    `runtime` is where its Makefile installs the runtime from, or empty, and `variant` the template if it is another one
    than that of the kind.
    """

    version: Version
    name: str
    runtime: str
    files: Mapping[str, File]
    users: Mapping[str, str]
    variant: str

    @classmethod
    def read(cls, kind: Kind, folder: Path) -> "Rendering":
        """Read the record of a project. Raises UsageError if there is none, or it is damaged."""
        try:
            record = documents.from_json(read_regular(folder / RECORD, UsageError), _SHAPE, needs=tuple(_SHAPE))
            files = {
                path: File("".join(item["lines"]).encode("latin-1"), item.get("executable", False))
                for path, item in record["files"].items()
                if "lines" in item
            }
            if (variant := record["context"].get("variant", "")) not in ("", *kind.variants):
                raise ValueError(f"the template has no variant {variant!r:.40}")
            found = re.search(rb"^RUNTIME \?= (.+)$", files["Makefile"].content, re.MULTILINE)
            return cls(
                Version(record["version"]),
                record["context"][f"{kind.file.stem}_name"],
                found[1].decode() if found else "",
                files,
                {path: item["sha256"] for path, item in record["files"].items() if path not in files},
                variant,
            )
        except FileNotFoundError as error:
            raise UsageError(
                f"there is no {RECORD}: this {kind.title} is older than upgrades; to follow the template from now on "
                f"(changes of the template up to now are not merged): "
                f"{kind.command} new NAME -o /tmp && cp -r /tmp/NAME/.mlx ."
            ) from error
        except (ValueError, KeyError) as error:
            raise UsageError(
                f"{RECORD} is damaged ({error}); restore it from an earlier commit: git log -- {RECORD}"
            ) from error


class Change(NamedTuple):
    """What an upgrade does to a file, in a word, and why: its sides in the diff, by their titles.

    They are the file before and after, `a` and `b`, or, if it stays as it is, those of the template, `old` and `new`.
    """

    path: str
    word: str
    reason: str
    sides: Mapping[str, File | None]


@dataclass(frozen=True)
class Upgrade:
    """The changes of a project from the template in `base` to that in `new`, whose record has the content `record`.

    `binds` is True if conf.yaml can be bound again, and git can undo that.
    """

    folder: Path
    base: Rendering
    new: Rendering
    record: bytes
    changes: tuple[Change, ...]
    binds: bool

    @property
    def needed(self) -> bool:
        """False if the project follows the template already."""
        return self.base != self.new

    @property
    def conflicts(self) -> list[str]:
        return [change.path for change in self.changes if change.word == "conflict"]

    @property
    def undo(self) -> str:
        """The command that undoes the upgrade, also half of one, and touches no other files."""
        written = [change for change in self.changes if "a" in change.sides]
        changed = [str(RECORD), *BOUND * self.binds, *(change.path for change in written if change.sides["a"])]
        added = [change.path for change in written if not change.sides["a"]]
        remove = f" && rm -f -- {shlex.join(added)}" if added else ""
        return f"git checkout HEAD -- {shlex.join(changed)}{remove}"

    def lines(self) -> Iterator[str]:
        """Yield a line for each file that changes, or does not although the template does, and one about the user's."""
        if not self.needed:
            yield f"the project follows the template of version {self.new.version} already"
            return
        yield f"template  {self.base.version} -> {self.new.version}"
        for change in self.changes:
            yield f"{change.word:<10}{change.path}{f': {change.reason}' if change.reason else ''}"
        if self.binds:
            yield f"to bind   {', '.join(BOUND)}: settings that this runtime lacks are dropped"
        before, after = self.base.users, self.new.users
        users = [path for path in sorted({*before, *after}) if before.get(path) != after.get(path)]
        if users := [path for path in users if file_digest(self.folder / path) != after.get(path, "none")]:
            yield f"yours     {', '.join(users)}: the template has changed them, this project keeps its own"

    def diff(self) -> str:
        """Return the changes as git shows them, and last those of the template that are not applied."""
        text = b""
        with TemporaryDirectory(prefix="mlx-upgrade-") as temporary:
            for change in self.changes:
                for side, file in change.sides.items():
                    if file is not None:
                        _write(Path(temporary, side, change.path), file)
            for sides in (("a", "b"), ("old", "new")):
                for side in sides:
                    Path(temporary, side).mkdir(exist_ok=True)
                text += _git(Path(temporary), *_DIFF, *sides, accepted=(0, 1)).stdout
        return text.replace(b"\r\n", b"\n").decode(errors="replace")

    def apply(self) -> None:
        """Write the files, and the record last."""
        for change in self.changes:
            if after := change.sides.get("b"):
                _write(self.folder / change.path, after)
            elif "b" in change.sides:
                (self.folder / change.path).unlink()
        write_atomic(self.folder / RECORD, self.record)


def plan(kind: Kind) -> Upgrade:
    """Return the upgrade of the project in the working directory to the template in this package. Writes nothing.

    Raises:
        UsageError: the project has no record, git cannot undo an upgrade, or the project is newer than this package.
    """
    folder = kind.folder()
    base, tracked = Rendering.read(kind, folder), _tracked(folder)
    with TemporaryDirectory(prefix="mlx-upgrade-") as temporary:
        rendered = projects.new(kind, base.name, Path(temporary), base.runtime, base.variant)
        new, record = Rendering.read(kind, rendered), (rendered / RECORD).read_bytes()
    if base.version > new.version:
        raise UsageError(
            f"this project follows the template of version {base.version}, and the runtime here is {new.version}; "
            f"install mlx-runtime {base.version} or newer"
        )
    users = {path.partition("/")[0] for path in (*base.users, *new.users)}  # like src, now or before
    changes = (
        _change(folder, path, base, new, path in tracked)
        for path in sorted({*base.files, *new.files})
        if path.partition("/")[0] not in users
    )
    binds = tracked.issuperset(BOUND) and find_spec("torch") is not None  # a client cannot import the code
    return Upgrade(folder, base, new, record, tuple(filter(None, changes)), binds)


def _tracked(folder: Path) -> set[str]:
    """Return the files that git can restore. Raises UsageError if others have changed."""
    changed = _git(folder, "status", "--porcelain", "--untracked-files=all", "-z", "--", ".").stdout
    if changed:
        first = os.fsdecode(changed[3:].partition(b"\0")[0])
        raise UsageError(f"there are uncommitted changes, as in {first}: commit or undo them, and try again")
    listed = os.fsdecode(_git(folder, "ls-files", "-v", "-z", "--", ".").stdout).split("\0")
    tracked = {
        line[2:]
        for line in listed
        if line.startswith("H ") and not (folder / line[2:]).is_symlink()  # others may have edits that git ignores
    }
    if str(RECORD) not in tracked:
        raise UsageError(f"git does not track {RECORD} as a file; type: git add --force {RECORD}, and commit")
    return tracked


def _change(folder: Path, path: str, base: Rendering, new: Rendering, tracked: bool) -> Change | None:
    """Return the change of a file, or None if there is none."""
    old, theirs, file = base.files.get(path), new.files.get(path), folder / path
    kept = {"old": old, "new": theirs}
    parents = [folder / parent for parent in Path(path).parents[:-1]]
    if any(parent.is_symlink() or parent.is_file() for parent in parents) or file.is_symlink() or file.is_dir():
        reason = "it is, or is below, a link or a folder; left as it is"
        return Change(path, "kept", reason, kept) if old != theirs else None
    ours = _read(file)
    if ours and re.search(rb"^<<<<<<< yours\r?$", ours.content, re.MULTILINE):
        raise UsageError(f"{path} has conflicts of an earlier upgrade; resolve them, and commit")
    if theirs in (old, ours):
        return None
    if ours is None:
        if old is None:
            return Change(path, "added", "", {"a": None, "b": theirs})
        return Change(path, "missing", "the template has changed it, but it was removed here", kept)
    if not tracked:
        return Change(path, "kept", "git cannot restore it here; left as it is", kept)
    if theirs is None:
        if old is None or (_lines(old.content)[0], old.executable) != (_lines(ours.content)[0], ours.executable):
            return Change(path, "kept", "the template has removed it, but it was changed here", kept)
        return Change(path, "deleted", "", {"a": ours, "b": None})
    merged, reason = _merge(folder, (old, ours, theirs), [f"template {item.version}" for item in (base, new)])
    if merged == ours:
        return Change(path, "kept", reason, kept) if reason else None
    word = "conflict" if reason else "updated" if merged == theirs else "merged"
    return Change(path, word, reason, {"a": ours, "b": merged})


def _merge(folder: Path, files: tuple[File | None, File, File], labels: list[str]) -> tuple[File, str]:
    """Return the merge of base, ours and theirs, and why it is not complete, or nothing.

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
            return ours, "it is binary, and both have changed it; left as it is"
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
        done = subprocess.run(["git", *words], cwd=folder, capture_output=True, env=os.environ | {"LC_ALL": "C"})
    except FileNotFoundError as error:
        raise UsageError("git, which merges files and could undo an upgrade, is not installed") from error
    if done.returncode not in accepted:
        why = " ".join(os.fsdecode(done.stderr).split())
        cure = "; type: git init, and commit" if "not a git repository" in why else ""
        raise UsageError(f"git {words[0]}, with which an upgrade can be undone, failed: {why}{cure}")
    return done
