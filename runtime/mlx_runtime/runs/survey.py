"""Contents of the storage: a tree of folders with their sizes, for `mlx data show`.

Sizes are the lengths of files, in decimal units; links count nothing and are never followed.
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

from mlx_runtime.data.prepared import is_read_mark
from mlx_runtime.errors import StorageError, printable, short_message
from mlx_runtime.runs import records
from mlx_runtime.runs.filling import RECORD, job_record, job_status
from mlx_runtime.runs.folder import ATTEMPT
from mlx_runtime.runs.storage_paths import StoragePath
from mlx_runtime.storage.files import Storage, size_text

RUN = "run.json"

REMOVING = ".removing-"
"""Part of the name of a folder that is being removed."""

THREADS = 8
"""Folders listed at the same time; a shared folder is slow, but answers many requests at once."""


@dataclass
class Entry:
    """A file or folder in the storage.

    Attributes:
        name: its name, without the path of its parent folder.
        kind: `folder`, `file`, or `link`.
        size_bytes: size of all files below it.
        files: how many there are.
        children: its entries, largest first; None below the requested depth.
        more: number of entries that are not listed, and their bytes.
        note: remark for the user.
    """

    name: str
    kind: str = "folder"
    size_bytes: int = 0
    files: int = 0
    children: "list[Entry] | None" = None
    more: tuple[int, int] = (0, 0)
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

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> "Entry":
        """Restore an entry from `as_json`."""
        children = [cls.from_json(child) for child in found["children"]] if "children" in found else None
        more = found.get("more", {"entries": 0, "size_bytes": 0})
        fields = {name: found[name] for name in ("name", "kind", "size_bytes", "files", "note") if name in found}
        return cls(**fields, children=children, more=(more["entries"], more["size_bytes"]))

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
            self.more = (self.more[0] + len(rest), self.more[1] + sum(child.size_bytes for child in rest))
            del self.children[limit:]
        for child in self.children:
            child.truncate(limit)


@dataclass
class Survey:
    """A measured part of the storage.

    Attributes:
        top: the entry that was asked for.
        unreadable: folders that could not be listed.
        runs: folders of runs, relative to `top`, which may be one itself.
        jobs: folders with the record of a data job.
        reading: folders that a run has marked as being read.
    """

    top: Entry
    unreadable: list[str] = field(default_factory=list)
    runs: set[str] = field(default_factory=set)
    jobs: set[str] = field(default_factory=set)
    reading: set[str] = field(default_factory=set)

    def lines(self) -> list[str]:
        """Return the tree as lines for the terminal."""
        rows = list(self.top.rows())
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        return [f"{label:<{widths[0]}}  {size:>{widths[1]}}  {rest}".rstrip() for label, size, rest in rows]

    def as_json(self) -> dict[str, Any]:
        """Return plain values for `--json`."""
        return self.top.as_json() | ({"unreadable": self.unreadable} if self.unreadable else {})

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> "Survey":
        """Restore what `as_json` shows of a survey."""
        return cls(Entry.from_json(found), found.get("unreadable", []))

    def add_marks(self, relative: str, names: Iterable[str]) -> None:
        """Register what a folder is by the names of files in it."""
        for name in names:
            if name == RUN or name.startswith(ATTEMPT):
                self.runs.add(relative)
            elif name == RECORD:
                self.jobs.add(relative)
            else:
                self.reading.add(relative)


def survey(path: StoragePath, depth: int, limit: int) -> Survey:
    """Measure a file or folder with everything below it.

    Args:
        path: path to measure.
        depth: levels to list; everything below is counted as well.
        limit: entries to list per folder, the largest; the others are counted.

    Raises:
        StorageError: the storage does not answer.
    """
    storage = Storage(path.root)
    found = Survey(Entry(path.parts[-1] if path.parts else path.title))
    if storage.local:
        _measure_folder(path.path, found, depth, limit)
    else:
        _measure_objects(storage, path, found, depth)
    found.top.truncate(limit)
    if found.top.kind == "folder":
        _add_notes(found, Storage(path.title))
    return found


def _measure_folder(path: str, found: Survey, depth: int, limit: int) -> None:
    """Measure a folder on this machine, listing several folders at a time."""
    top = found.top
    if Path(path).is_symlink() or not Path(path).is_dir():
        top.kind = "link" if Path(path).is_symlink() else "file"
        top.files = int(top.kind == "file")
        top.size_bytes = Path(path).lstat().st_size if top.files else 0
        return
    top.children = [] if depth else None
    with ThreadPoolExecutor(THREADS) as pool:
        # A folder deeper than `depth` has no entry of its own and only adds to those above it.
        waiting = deque([(pool.submit(_Listing.read, path), "", [top])])
        while waiting:
            future, relative, above = waiting.popleft()
            listing = future.result()
            if listing is None:
                found.unreadable.append(relative or ".")
                listed = len(above) == 1 + len(Path(relative).parts)
                above[-1].note = "cannot be read" if listed else "cannot be read in part"
                continue
            for entry in above:
                entry.size_bytes += sum(file.size_bytes for file in listing.files)
                entry.files += sum(file.files for file in listing.files)
            children = above[-1].children if len(above) <= depth else None
            if children is not None:
                largest = heapq.nlargest(limit + 1, listing.files, key=_size) if limit else listing.files
                children += largest
                hidden = sum(map(_size, listing.files)) - sum(map(_size, largest))
                above[-1].more = (len(listing.files) - len(largest), hidden)
            found.add_marks(relative, listing.marks)
            for name in listing.folders:
                below, chain = f"{relative}/{name}".lstrip("/"), above
                if children is not None:
                    chain = [*above, Entry(name, children=[] if len(above) < depth else None)]
                    children.append(chain[-1])
                waiting.append((pool.submit(_Listing.read, f"{path}/{below}"), below, chain))


def _size(entry: Entry) -> int:
    return entry.size_bytes


@dataclass(frozen=True)
class _Listing:
    """Contents of one folder on this machine.

    Attributes:
        folders: names of the folders in it.
        files: the files and links in it.
        marks: names of files that say what the folder is.
    """

    folders: list[str]
    files: list[Entry]
    marks: list[str]

    @classmethod
    def read(cls, path: str) -> "_Listing | None":
        """List a folder. Returns None if it cannot be read."""
        found = cls([], [], [])
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    if entry.is_symlink():
                        found.files.append(Entry(entry.name, "link"))
                    elif entry.is_dir(follow_symlinks=False):
                        found.folders.append(entry.name)
                    else:
                        with contextlib.suppress(OSError):  # removed meanwhile
                            facts = entry.stat(follow_symlinks=False)
                            found.files.append(Entry(entry.name, "file", facts.st_size, 1))
                            if _is_mark(entry.name, facts.st_mtime):
                                found.marks.append(entry.name)
        except OSError:
            return None
        return found


def _measure_objects(storage: Storage, path: StoragePath, found: Survey, depth: int) -> None:
    """Measure a part of an object store, which lists all objects below a prefix at once."""
    top = found.top
    try:
        info = storage.fs.get_file_info(path.path)
        if info.is_file:
            top.kind, top.size_bytes, top.files = "file", info.size or 0, 1
            return
        infos = storage.below(*path.parts)
    except OSError as error:
        raise StorageError(f"cannot read {path.title}: {short_message(error)}") from error
    top.children = [] if depth else None
    folders: dict[tuple[str, ...], Entry] = {(): top}

    def folder(parts: tuple[str, ...]) -> Entry:
        """Return the entry of a listed folder, creating it first if needed."""
        if parts not in folders:
            folders[parts] = Entry(parts[-1], children=[] if len(parts) < depth else None)
            siblings = folder(parts[:-1]).children
            assert siblings is not None, "its depth was asked for"
            siblings.append(folders[parts])
        return folders[parts]

    for info in infos:
        parts = tuple(info.path.removeprefix(path.path).strip("/").split("/"))
        above = [folder(parts[:count]) for count in range(min(len(parts) - 1, depth) + 1)]
        for entry in above:
            entry.size_bytes += info.size or 0
            entry.files += 1
        if len(parts) <= depth and above[-1].children is not None:
            above[-1].children.append(Entry(parts[-1], "file", info.size or 0, 1))
        if _is_mark(parts[-1], (info.mtime_ns or 0) / 1e9):
            found.add_marks("/".join(parts[:-1]), [parts[-1]])


def _is_mark(name: str, modified_s: float) -> bool:
    """Return True if a file says what its folder is."""
    return name in (RUN, RECORD) or name.startswith(ATTEMPT) or is_read_mark(name, modified_s)


def _add_notes(found: Survey, storage: Storage) -> None:
    """Mark listed folders that are incomplete."""
    waiting = [(found.top, "")]
    while waiting:
        entry, relative = waiting.pop()
        waiting += [(child, f"{relative}/{child.name}".lstrip("/")) for child in entry.children or ()]
        if REMOVING in entry.name:
            entry.note = "partly removed; remove it again"
        elif relative in found.jobs and not entry.note:
            entry.note = _job_note(job_record(storage, *filter(None, relative.split("/"))), entry)


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
