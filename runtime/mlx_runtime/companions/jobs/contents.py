"""Contents of the storage: a tree of folders with their sizes, and the removal of what no run uses.

Sizes are the lengths of files, in decimal units. Links to folders are not followed.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from mlx_runtime.companions.jobs.filling import RECORD, job_record, job_status
from mlx_runtime.companions.prepared.store import is_in_use
from mlx_runtime.errors import StorageError, UsageError, printable, short_message
from mlx_runtime.runs import records
from mlx_runtime.runs.folder import ATTEMPT
from mlx_runtime.storage import leases
from mlx_runtime.storage.files import Storage, Stored, is_uri, join_path, size_text, storage_at, storage_errors

RUN = "run.json"

MARKS = (RECORD, "manifest.json")
"""Files without which a data job's output or a prepared dataset is incomplete. They are removed first."""


class StoragePath(NamedTuple):
    """A file or folder in a storage; without parts its root."""

    root: str
    parts: tuple[str, ...]

    @property
    def title(self) -> str:
        """Folder or URI for the user."""
        return join_path(self.root, *self.parts)


@dataclass
class Entry:
    """A file or folder in the storage, with the sum of everything below it."""

    name: str
    kind: str = "folder"  # or file
    size_bytes: int = 0
    files: int = 0
    children: "dict[str, Entry]" = field(default_factory=dict)  # down to the requested depth
    note: str = ""  # on a folder that its job has not completed

    @property
    def largest(self) -> "list[Entry]":
        """The children, the largest first."""
        return sorted(self.children.values(), key=lambda child: (-child.size_bytes, child.name))

    def as_json(self) -> dict[str, Any]:
        """Return plain values for `--json`."""
        found: dict[str, Any] = {"name": self.name, "kind": self.kind, "size_bytes": self.size_bytes}
        if self.kind == "folder":
            found["files"] = self.files
        if self.note:
            found["note"] = self.note
        if self.children:
            found["children"] = [child.as_json() for child in self.largest]
        return found

    def lines(self) -> list[str]:
        """Return the tree as lines for the terminal."""
        rows = list(self._rows())
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        return [f"{label:<{widths[0]}}  {size:>{widths[1]}}  {files}".rstrip() for label, size, files in rows]

    def _rows(self, indent: str = "", indent_below: str = "") -> Iterator[tuple[str, str, str]]:
        """Yield the columns of each line: branch and name, size, and remarks."""
        files = f"{self.files:,} file{'s' * (self.files != 1)}" if self.kind == "folder" else ""
        remarks = "  ".join(filter(None, (files, self.note and f"({self.note})")))
        yield f"{indent}{printable(self.name, one_line=True)}", size_text(self.size_bytes), remarks
        for child in (largest := self.largest):
            branch, below = ("├── ", "│   ") if child is not largest[-1] else ("└── ", "    ")
            yield from child._rows(indent_below + branch, indent_below + below)


def survey(path: StoragePath, depth: int) -> Entry:
    """Measure a file or folder with everything below it, and list `depth` levels of it."""
    storage, skipped = storage_at(path.root), len(path.parts)
    top = Entry(path.parts[-1] if path.parts else path.root)
    for file in _files(storage, path):
        names = file.path.split("/")[skipped:]
        entries = [top]
        for name in names[:depth]:
            entries.append(entries[-1].children.setdefault(name, Entry(name)))
        for entry in entries:
            entry.size_bytes += file.size_bytes
            entry.files += 1
        if len(names) < len(entries):
            entries[-1].kind = "file"
        if names[-1:] == [RECORD] and len(names) <= len(entries):
            record = job_record(storage, *path.parts, *names[:-1])
            if record and (status := job_status(record)) != "SUCCEEDED":
                filled = "being filled" if status in records.LIVING else f"incomplete: its job is {status}"
                entries[len(names) - 1].note = filled
    return top


def _files(storage: Storage, path: StoragePath) -> list[Stored]:
    """Return a file, or all files below a folder; none of a link, whose target is not in this place."""
    if storage.local and path.parts and Path(storage.of(*path.parts)).is_symlink():
        return []
    with storage_errors(f"cannot read {path.title}"):
        found = storage.find(*path.parts)
        return [found] if found is not None and found.is_file else storage.below(*path.parts)


def refuse_in_use(path: StoragePath) -> None:
    """Raise UsageError for the storage itself, for runs, and for what is being written or read."""
    if not path.parts:
        raise UsageError(f"{path.title} is the storage itself; name a folder in it")
    storage = storage_at(path.root)
    above = [(*path.parts[:count], name) for count in range(1, len(path.parts)) for name in (RUN, RECORD)]
    found = [Stored("/".join(parts)) for parts in above if storage.size_bytes(*parts) is not None]
    for file in [*found, *_files(storage, path)]:
        *folder, name = file.path.split("/")
        title = join_path(path.root, *folder)
        if name == RUN or name.startswith(ATTEMPT):
            raise UsageError(f"{title} is a run; remove it with: mlx xp rm {title}")
        if is_in_use(file):
            raise UsageError(f"{title} is in use, or was in the last five minutes; wait for the runs that read it")
        record = job_record(storage, *folder) if name == RECORD else None
        if record is not None and job_status(record) in records.LIVING:
            raise UsageError(f"{title} is being filled by {leases.holder(record)}; end that first")


def remove(path: StoragePath) -> None:
    """Remove a file or folder; call `refuse_in_use` first. If it is a link, its target is kept."""
    storage = storage_at(path.root)
    try:
        is_link = storage.local and Path(storage.of(*path.parts)).is_symlink()
        if is_link or storage.size_bytes(*path.parts) is not None:
            storage.remove_file(*path.parts)
            return
        for mark in MARKS:  # a folder that is removed in part is not mistaken for a complete one
            storage.remove_file(*path.parts, mark)
        storage.remove_folder(*path.parts)
    except OSError as error:
        title, why = path.title, short_message(error)
        raise StorageError(f"{title} was removed only in part: {why}. Fix that, and repeat the command") from error


def path_in(root: str, text: str) -> StoragePath:
    """Parse a path below the root of a storage, or a full path or URI that leads into it.

    Raises:
        UsageError: it lies outside the storage, or does not exist.
    """
    storage, base = storage_at(root), root.partition("?")[0].rstrip("/")
    outside = UsageError(f"{text} lies outside the storage {root}; MLX_STORAGE=FOLDER selects another storage")
    given = text
    if is_uri(given):
        whole = given.partition("?")[0].rstrip("/")
        if whole != base and not whole.startswith(f"{base}/"):
            raise outside
        given = whole.removeprefix(base).lstrip("/")
    if storage.local:
        top = Path(storage.path)
        path = top / Path(given).expanduser()
        path = path.resolve() if path.name == ".." else path.parent.resolve() / path.name  # which may be a link itself
        if not path.is_relative_to(top):
            raise outside
        parts = path.relative_to(top).parts
        exists = os.path.lexists(path)
    else:
        parts = tuple(part for part in given.split("/") if part not in ("", "."))
        if ".." in parts or given.startswith("/"):
            raise outside
        with storage_errors(f"cannot read {root}"):
            exists = storage.find(*parts) is not None
    if not exists:
        raise UsageError(f"there is no {join_path(root, *parts)}; mlx data show lists the storage")
    return StoragePath(root, parts)
