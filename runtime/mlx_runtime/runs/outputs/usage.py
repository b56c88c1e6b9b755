"""Contents of the storage: a tree of folders with their sizes, for `mlx data show`.

Sizes are the lengths of files, in decimal units; links have size 0 and are never followed.
"""

import contextlib
import heapq
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_runtime.errors import printable
from mlx_runtime.runs import records
from mlx_runtime.runs.folder import ATTEMPT
from mlx_runtime.runs.outputs.filling import RECORD, job_record, job_status
from mlx_runtime.runs.queries.lookup import StoragePath
from mlx_runtime.storage import leases
from mlx_runtime.storage.files import Storage, size_text, storage_at, storage_errors

RUN = "run.json"

READ_MARK = "used-"
"""Prefix of files that mark a prepared dataset as being read."""

REMOVING = ".removing-"
"""Part of the name of a folder that is being removed."""

THREADS = 8
"""Number of folders listed at the same time; a shared folder is slow, but answers many requests at once."""

Parts = tuple[str, ...]


@dataclass
class Entry:
    """A file or folder in the storage, with everything below it."""

    name: str
    kind: str = "folder"  # or file, or link
    size_bytes: int = 0
    files: int = 0
    children: "list[Entry] | None" = None  # largest first; None below the requested depth
    more: tuple[int, int] = (0, 0)  # number of children that are not listed, and their bytes
    note: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return plain values for `--json`."""
        found: dict[str, Any] = {"name": self.name, "kind": self.kind, "size_bytes": self.size_bytes}
        if self.kind == "folder":
            found["files"] = self.files
        if self.note:
            found["note"] = self.note
        if self.children is not None:
            found["children"] = [child.as_json() for child in self.children]
        if self.more[0]:
            found["more"] = {"entries": self.more[0], "size_bytes": self.more[1]}
        return found

    def rows(self, indent: str = "", indent_below: str = "") -> Iterator[tuple[str, str, str]]:
        """Yield the columns of each line: branch and name, size, and remarks."""
        files = f"{self.files:,} file{'s' * (self.files != 1)}" if self.kind == "folder" else ""
        note = f"({self.note})" if self.note else ""
        size = size_text(self.size_bytes) if self.kind != "link" else "link"
        yield f"{indent}{printable(self.name, one_line=True)}", size, "  ".join(filter(None, (files, note)))
        children = self.children or []
        for index, child in enumerate(children):
            last = index == len(children) - 1 and not self.more[0]
            branch, below = ("└── ", "    ") if last else ("├── ", "│   ")
            yield from child.rows(indent_below + branch, indent_below + below)
        if self.more[0]:
            yield f"{indent_below}└── … {self.more[0]:,} more", size_text(self.more[1]), ""

    def truncate(self, limit: int) -> None:
        """Sort entries by size, and list at most `limit` of each folder (0: all)."""
        if self.children is None:
            return
        self.children.sort(key=lambda child: (-child.size_bytes, child.name))
        rest = self.children[limit:] if limit else []
        if len(rest) + self.more[0] > 1:  # `1 more` takes as much space as the entry itself
            self.more = (self.more[0] + len(rest), self.more[1] + _total(rest))
            del self.children[limit:]
        for child in self.children:
            child.truncate(limit)


@dataclass
class Survey:
    """A measured part of the storage. All folders are relative to it."""

    top: Entry
    unreadable: list[str] = field(default_factory=list)
    runs: set[Parts] = field(default_factory=set)
    jobs: set[Parts] = field(default_factory=set)  # folders with the record of a data job
    reading: set[Parts] = field(default_factory=set)  # folders that a run has marked as being read

    def lines(self) -> list[str]:
        """Return the tree as lines for the terminal."""
        rows = list(self.top.rows())
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        return [f"{label:<{widths[0]}}  {size:>{widths[1]}}  {rest}".rstrip() for label, size, rest in rows]

    def as_json(self) -> dict[str, Any]:
        """Return plain values for `--json`."""
        return self.top.as_json() | ({"unreadable": self.unreadable} if self.unreadable else {})

    def add_mark(self, folder: Parts, name: str, modified_s: float) -> None:
        """Register a folder as a data job or as being read, if the name of a file in it shows that."""
        if name == RUN or name.startswith(ATTEMPT):
            self.runs.add(folder)
        elif name == RECORD:
            self.jobs.add(folder)
        elif is_read_mark(name, modified_s):
            self.reading.add(folder)


def survey(path: StoragePath, depth: int, limit: int) -> Survey:
    """Measure a file or folder with everything below it.

    Lists `depth` levels, and in each folder the `limit` largest entries (0: all); the others are only counted.
    """
    storage = storage_at(path.root)
    with storage_errors(f"cannot read {path.title}"):
        found = Survey(_measure_top(storage, path))
        if found.top.kind == "folder":
            found.top.children = [] if depth else None
            folders = _local_folders(path.path, found) if storage.local else _remote_folders(storage, path, found)
            _build_tree(folders, found, depth, limit)
            found.top.truncate(limit)
            _add_notes(found, storage_at(path.title))
    return found


def _measure_top(storage: Storage, path: StoragePath) -> Entry:
    """Return the entry of a path, empty if it is a folder."""
    name = path.parts[-1] if path.parts else path.title
    if not storage.local:
        found = storage.find(*path.parts)
        return Entry(name, "file", found.size_bytes, 1) if found is not None and found.is_file else Entry(name)
    file = Path(path.path)
    if file.is_symlink():
        return Entry(name, "link")
    return Entry(name) if file.is_dir() else Entry(name, "file", file.stat().st_size, 1)


def _build_tree(folders: Iterable[tuple[Parts, list[Entry] | None]], found: Survey, depth: int, limit: int) -> None:
    """Add the files of folders to the entries above them. Folders may arrive in any order and in several parts.

    A folder deeper than `depth` has no entry and only adds to the entries above it. None means the files of a folder
    that cannot be read.
    """
    entries: dict[Parts, Entry] = {}
    for parts, files in folders:
        above = [found.top]
        for path in (parts[:count] for count in range(1, min(len(parts), depth) + 1)):
            if path not in entries:
                entries[path] = Entry(path[-1], children=[] if len(path) < depth else None)
                assert above[-1].children is not None, "its depth was asked for"
                above[-1].children.append(entries[path])
            above.append(entries[path])
        listed = above[-1]
        if files is None:
            found.unreadable.append("/".join(parts) or ".")
            listed.note = "cannot be read" if len(parts) <= depth else "cannot be read in part"
            continue
        size, count = _total(files), sum(file.files for file in files)
        for entry in above:
            entry.size_bytes += size
            entry.files += count
        if len(parts) < depth and listed.children is not None:
            largest = heapq.nlargest(limit + 1, files, key=lambda file: file.size_bytes) if limit else files
            listed.children += largest
            listed.more = (listed.more[0] + len(files) - len(largest), listed.more[1] + size - _total(largest))


def _total(entries: list[Entry]) -> int:
    return sum(entry.size_bytes for entry in entries)


def _local_folders(path: str, found: Survey) -> Iterator[tuple[Parts, list[Entry] | None]]:
    """Yield the folders below a path on this machine with their files, listing several at a time."""

    def list_folder(parts: Parts) -> tuple[Parts, list[str], list[Entry] | None]:
        folders, files = [], []
        try:
            with os.scandir(os.path.join(path, *parts)) as entries:  # noqa: PTH118 - called for each folder
                for entry in entries:
                    if entry.is_symlink():
                        files.append(Entry(entry.name, "link"))
                    elif entry.is_dir(follow_symlinks=False):
                        folders.append(entry.name)
                    else:
                        with contextlib.suppress(OSError):  # removed in the meantime
                            facts = entry.stat(follow_symlinks=False)
                            files.append(Entry(entry.name, "file", facts.st_size, 1))
                            found.add_mark(parts, entry.name, facts.st_mtime)
        except OSError:
            return parts, [], None
        return parts, folders, files

    with ThreadPoolExecutor(THREADS) as pool:
        waiting = deque([pool.submit(list_folder, ())])
        while waiting:
            parts, folders, files = waiting.popleft().result()
            yield parts, files
            waiting += [pool.submit(list_folder, (*parts, name)) for name in folders]


def _remote_folders(storage: Storage, path: StoragePath, found: Survey) -> Iterator[tuple[Parts, list[Entry] | None]]:
    """Yield the files of an object store, which lists all below a prefix at once, each with its folder."""
    for file in storage.below(*path.parts):
        *above, name = file.path.split("/")[len(path.parts) :]
        found.add_mark(tuple(above), name, file.modified_s)
        yield tuple(above), [Entry(name, "file", file.size_bytes, 1)]


def _add_notes(found: Survey, storage: Storage) -> None:
    """Mark listed folders that are incomplete."""
    waiting: list[tuple[Entry, Parts]] = [(found.top, ())]
    while waiting:
        entry, parts = waiting.pop()
        waiting += [(child, (*parts, child.name)) for child in entry.children or ()]
        if REMOVING in entry.name:
            entry.note = "partly removed; remove it again"
        elif parts in found.jobs and not entry.note:
            entry.note = _job_note(job_record(storage, *parts), entry)


def _job_note(record: dict[str, Any] | None, entry: Entry) -> str:
    if record is None:
        return ""
    status = job_status(record)
    if status in records.LIVING:
        return "being filled"
    if status != "SUCCEEDED":
        return "incomplete: its job was killed" if status == "STALE" else f"incomplete: its job is {status}"
    missing = record.get("files", 0) + 1 - entry.files
    return f"{missing:,} of its files are missing" if missing > 0 else ""


def is_read_mark(name: str, changed_s: float) -> bool:
    """Return True if a file, last written at `changed_s` since 1970, marks the dataset in its folder as being read."""
    return name.startswith(READ_MARK) and leases.is_fresh(changed_s)
