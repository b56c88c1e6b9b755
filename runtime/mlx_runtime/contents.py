"""What is in the storage: a tree of folders with their sizes, and taking parts of it away.

Sizes are those that files say, in decimal units; links count nothing and are never followed.
"""

import contextlib
import heapq
import os
import stat
import uuid
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_runtime import registry
from mlx_runtime.errors import StorageError, UsageError, first_line, near, plain
from mlx_runtime.filling import RECORD, job_record, job_status
from mlx_runtime.layout import ATTEMPT, RunFolder, is_read_mark, run_folder
from mlx_runtime.storage import Storage, is_uri, joined, opened, remove_tree, size_text

RUN = "run.json"

REMOVING = ".removing-"
"""What a folder is named by while it is removed."""

THREADS = 8
"""That list folders at the same time; a shared folder answers slowly, but many at once."""


@dataclass
class Entry:
    """A file or folder of the storage.

    Attributes:
        name: of it.
        kind: `folder`, `file`, or `link`.
        size_bytes: of all files below it.
        files: how many these are.
        children: what is in it, largest first; None below the depth that was asked for.
        more: how many other entries it has that are not listed, and their bytes.
        note: what a person should know of it.
    """

    name: str
    kind: str = "folder"
    size_bytes: int = 0
    files: int = 0
    children: "list[Entry] | None" = None
    more: tuple[int, int] = (0, 0)
    note: str = ""

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
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
    def of_json(cls, found: dict[str, Any]) -> "Entry":
        """What `as_json` gave, on another machine."""
        children = [cls.of_json(child) for child in found["children"]] if "children" in found else None
        more = found.get("more", {"entries": 0, "size_bytes": 0})
        facts = {name: found[name] for name in ("name", "kind", "size_bytes", "files", "note") if name in found}
        return cls(**facts, children=children, more=(more["entries"], more["size_bytes"]))


@dataclass
class Survey:
    """A look at a part of the storage.

    Attributes:
        top: what was asked for.
        unreadable: folders that could not be listed.
        runs: paths of run folders, relative to `top`, which may be one itself.
        jobs: folders with the record of a data job.
        reading: folders that somebody marks as being read.
    """

    top: Entry
    unreadable: list[str] = field(default_factory=list)
    runs: set[str] = field(default_factory=set)
    jobs: set[str] = field(default_factory=set)
    reading: set[str] = field(default_factory=set)

    def lines(self) -> list[str]:
        """The tree for people."""
        rows = list(_rows(self.top, "", ""))
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        return [f"{label:<{widths[0]}}  {size:>{widths[1]}}  {rest}".rstrip() for label, size, rest in rows]

    def as_json(self) -> dict[str, Any]:
        """The tree for `--json`."""
        return self.top.as_json() | ({"unreadable": self.unreadable} if self.unreadable else {})

    @classmethod
    def of_json(cls, found: dict[str, Any]) -> "Survey":
        """What `as_json` gave, on another machine."""
        return cls(Entry.of_json(found), found.get("unreadable", []))


@dataclass(frozen=True)
class Place:
    """A file or folder below the storage's root.

    Attributes:
        root: of the storage, a folder or a URI.
        parts: of its path there; none for the root.
    """

    root: str
    parts: tuple[str, ...]

    @property
    def title(self) -> str:
        """Its folder or URI."""
        return joined(self.root, *self.parts)

    @property
    def path(self) -> str:
        """As its file system names it."""
        return Storage(self.root).of(*self.parts)


def place_in(root: str, path: str | None) -> Place:
    """A place of the storage, as a person names it.

    Args:
        root: of the storage.
        path: below it, or a full path or URI that leads into it; None for the root.

    Raises:
        UsageError: it lies outside the storage, or is not there.
    """
    storage = Storage(root)
    parts = _local_parts(storage, path or "") if storage.local else _remote_parts(storage, root, path or "")
    place = Place(root, parts)
    if not _there(storage, place):
        above = storage.names(*parts[:-1]) if parts else []
        raise UsageError(f"there is no {place.title}.{near(parts[-1], above) if parts and len(above) <= 1000 else ''}")
    return place


def _local_parts(storage: Storage, path: str) -> tuple[str, ...]:
    """Of a path without links, except that its last part may be one."""
    if is_uri(path) and is_uri(storage.root):
        path = "/".join(_remote_parts(storage, storage.root, path))
    elif is_uri(path):
        raise _outside(path, storage.path)
    root = Path(storage.path)
    asked = root / Path(path).expanduser()
    if asked.name == "..":
        asked = asked.resolve()
    real = asked.parent.resolve() / asked.name if asked != root else root
    if not real.is_relative_to(root):
        raise _outside(path, storage.path)
    return real.relative_to(root).parts


def _remote_parts(storage: Storage, root: str, path: str) -> tuple[str, ...]:
    if is_uri(path):
        base, whole = root.partition("?")[0].rstrip("/"), path.partition("?")[0].rstrip("/")
        if whole != base and not whole.startswith(f"{base}/"):
            raise _outside(path, base)
        path = whole.removeprefix(base)
    elif path.startswith("/"):
        raise _outside(path, root)
    parts = tuple(part for part in path.split("/") if part not in ("", "."))
    if ".." in parts:
        raise _outside(path, root)
    return parts


def _outside(path: str, root: str) -> UsageError:
    return UsageError(f"{path} lies outside the storage {root}; MLX_STORAGE=FOLDER chooses another storage")


def _there(storage: Storage, place: Place) -> bool:
    if storage.local:
        return os.path.lexists(place.path)
    try:
        return bool(storage.fs.get_file_info(place.path).type.name != "NotFound")
    except OSError as error:
        raise StorageError(f"cannot read {storage.root}: {first_line(error)}") from error


def survey(place: Place, depth: int, limit: int) -> Survey:
    """Measure a place and everything below it.

    Args:
        place: from `place_in`.
        depth: levels to list; everything below counts all the same.
        limit: entries to list of a folder, the largest; the others are counted.

    Raises:
        StorageError: the storage does not answer.
    """
    storage = Storage(place.root)
    name = place.parts[-1] if place.parts else place.title
    found = Survey(Entry(name))
    if storage.local:
        _measure_folder(place.path, found, depth, limit)
    else:
        _measure_objects(storage, place, found, depth)
    _shorten(found.top, limit)
    if found.top.kind == "folder":
        _annotate(found, Storage(place.title))
    return found


def _measure_folder(path: str, found: Survey, depth: int, limit: int) -> None:
    """Several folders are listed at a time; what is deeper than `depth` only adds to those above it."""
    if Path(path).is_symlink() or not Path(path).is_dir():
        _measure_file(path, found.top)
        return
    found.top.children = [] if depth else None
    with ThreadPoolExecutor(THREADS) as pool:
        waiting = deque([(pool.submit(_listing, path), "", [found.top])])
        while waiting:
            listing, relative, above = waiting.popleft()
            folders, files, marks = listing.result()
            if folders is None:
                found.unreadable.append(relative or ".")
                own = len(above) == 1 + len(Path(relative).parts)
                above[-1].note = "cannot be read" if own else "cannot be read in part"
                continue
            for entry in above:
                entry.size_bytes += sum(size for _, _, size in files)
                entry.files += sum(kind == "file" for _, kind, _ in files)
            shown = above[-1].children if len(above) <= depth else None
            if shown is not None:
                largest = heapq.nlargest(limit + 1, files, key=lambda file: file[2]) if limit else files
                shown += [Entry(name, kind, size, int(kind == "file")) for name, kind, size in largest]
                rest = sum(size for _, _, size in files) - sum(size for _, _, size in largest)
                above[-1].more = (len(files) - len(largest), rest)
            _remember(found, relative, marks)
            for name in folders:
                below = f"{relative}/{name}" if relative else name
                chain = above
                if shown is not None:
                    chain = [*above, Entry(name, children=[] if len(above) < depth else None)]
                    shown.append(chain[-1])
                waiting.append((pool.submit(_listing, f"{path}/{below}"), below, chain))


Listing = tuple[list[str] | None, list[tuple[str, str, int]], set[str]]


def _listing(path: str) -> Listing:
    """Folders of a folder, its files with kind and size, and the names among them that say what it is."""
    folders: list[str] = []
    files: list[tuple[str, str, int]] = []
    marks: set[str] = set()
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.is_symlink():
                    files.append((entry.name, "link", 0))
                elif entry.is_dir(follow_symlinks=False):
                    folders.append(entry.name)
                else:
                    facts = None
                    with contextlib.suppress(OSError):  # gone meanwhile
                        facts = entry.stat(follow_symlinks=False)
                        files.append((entry.name, "file", facts.st_size))
                    if _is_mark(entry.name, facts.st_mtime if facts else 0):
                        marks.add(entry.name)
    except OSError:
        return None, [], set()
    return folders, files, marks


def _measure_file(path: str, entry: Entry) -> None:
    entry.kind = "link" if Path(path).is_symlink() else "file"
    entry.files = int(entry.kind == "file")
    entry.size_bytes = Path(path).lstat().st_size if entry.files else 0


def _measure_objects(storage: Storage, place: Place, found: Survey, depth: int) -> None:
    top = found.top
    try:
        own = storage.fs.get_file_info(place.path)
        if own.is_file:
            top.kind, top.size_bytes, top.files = "file", own.size or 0, 1
            return
        infos = storage.below(*place.parts)
    except OSError as error:
        raise StorageError(f"cannot read {place.title}: {first_line(error)}") from error
    top.children = [] if depth else None
    known: dict[tuple[str, ...], Entry] = {(): top}

    def shown(parts: tuple[str, ...]) -> Entry:
        """The entry of a folder that is listed, made when it is first asked for."""
        if parts not in known:
            known[parts] = Entry(parts[-1], children=[] if len(parts) < depth else None)
            siblings = shown(parts[:-1]).children
            assert siblings is not None, "its depth was asked for"
            siblings.append(known[parts])
        return known[parts]

    for info in infos:
        parts = tuple(info.path.removeprefix(place.path).strip("/").split("/"))
        above = [shown(parts[:count]) for count in range(min(len(parts) - 1, depth) + 1)]
        for entry in above:
            entry.size_bytes += info.size or 0
            entry.files += 1
        if len(parts) <= depth and above[-1].children is not None:
            above[-1].children.append(Entry(parts[-1], "file", info.size or 0, 1))
        if _is_mark(parts[-1], (info.mtime_ns or 0) / 1e9):
            _remember(found, "/".join(parts[:-1]), {parts[-1]})


def _is_mark(name: str, changed_s: float) -> bool:
    """Whether a file says what its folder is."""
    return name in (RUN, RECORD) or name.startswith(ATTEMPT) or is_read_mark(name, changed_s)


def _remember(found: Survey, relative: str, marks: set[str]) -> None:
    for mark in marks:
        if mark == RUN or mark.startswith(ATTEMPT):
            found.runs.add(relative)
        elif mark == RECORD:
            found.jobs.add(relative)
        else:
            found.reading.add(relative)


def _shorten(entry: Entry, limit: int) -> None:
    """Sort by size, and keep so many of each folder."""
    if entry.children is None:
        return
    entry.children.sort(key=lambda child: (-child.size_bytes, child.name))
    rest = entry.children[limit:] if limit else []
    if len(rest) + entry.more[0] > 1:  # instead of a line that says `1 more` there could as well be that one
        entry.more = (entry.more[0] + len(rest), entry.more[1] + sum(child.size_bytes for child in rest))
        del entry.children[limit:]
    for child in entry.children:
        _shorten(child, limit)


def _annotate(found: Survey, storage: Storage) -> None:
    """Say of the folders that are listed which are not whole."""
    waiting = [(found.top, "")]
    while waiting:
        entry, relative = waiting.pop()
        waiting += [(child, f"{relative}/{child.name}".lstrip("/")) for child in entry.children or ()]
        if REMOVING in entry.name:
            entry.note = "half removed; remove it again"
        elif relative in found.jobs and not entry.note:
            entry.note = _job_note(job_record(storage, *filter(None, relative.split("/"))), entry)


def _job_note(record: dict[str, Any] | None, entry: Entry) -> str:
    if record is None:
        return ""
    status = job_status(record)
    if status in registry.LIVING:
        return "being made"
    if status != "SUCCEEDED":
        return f"not whole: its job has {status}" if status != "STALE" else "not whole: its job was killed"
    missing = record.get("files", 0) + 1 - entry.files
    return f"{missing:,} of its files are gone" if missing > 0 else ""


def _rows(entry: Entry, before: str, below: str) -> Iterator[tuple[str, str, str]]:
    """Name, size, and the rest of each line."""
    files = f"{entry.files:,} file{'s' * (entry.files != 1)}" if entry.kind == "folder" else ""
    note = f"({entry.note})" if entry.note else ""
    size = size_text(entry.size_bytes) if entry.kind != "link" else "link"
    yield f"{before}{plain(entry.name, one_line=True)}", size, "  ".join(filter(None, (files, note)))
    children = entry.children or []
    for index, child in enumerate(children):
        last = index == len(children) - 1 and not entry.more[0]
        yield from _rows(child, below + ("└── " if last else "├── "), below + ("    " if last else "│   "))
    if entry.more[0]:
        yield f"{below}└── … {entry.more[0]:,} more", size_text(entry.more[1]), ""


def refuse_in_use(place: Place, found: Survey) -> None:
    """Refuse to remove what is not data, or what somebody is using.

    Args:
        place: what shall be removed.
        found: its survey.

    Raises:
        UsageError: it is the storage itself, belongs to a run, or is being read or written.
    """
    if not place.parts:
        raise UsageError(f"{place.title} is the storage itself; name a folder in it")
    storage = Storage(place.root)
    runs = [place.parts + _parts(run) for run in sorted(found.runs)]
    jobs = [place.parts + _parts(job) for job in sorted(found.jobs)]
    for count in range(1, len(place.parts)):
        above = place.parts[:count]
        if storage.size_bytes(*above, RUN) is not None:
            runs.append(above)
        jobs.append(above)
    for parts in runs:
        if not any(REMOVING in part for part in parts):  # what is left of a run that was removed
            _refuse_run(place.root, parts)
    for parts in jobs:
        record = job_record(storage, *parts)
        if record is not None and job_status(record) in registry.LIVING:
            raise UsageError(
                f"{joined(place.root, *parts)} is being filled by process {record.get('pid')} on {record.get('host')}; "
                "end that first"
            )
    if found.reading:
        read = joined(place.root, *place.parts, *_parts(min(found.reading)))
        raise UsageError(f"{read} is being read; wait for the runs that read it")


def _refuse_run(root: str, parts: tuple[str, ...]) -> None:
    above = joined(root, *parts[:-2])
    folder = run_folder(above, *parts[-2:]) if len(parts) > 1 else RunFolder(Path(joined(root, *parts)))
    with contextlib.suppress(StorageError):  # one that has not begun has no record
        registry.refuse_living(folder)
    name = " ".join(parts[-2:])
    elsewhere = f"MLX_STORAGE={above} " if len(parts) > 2 else ""
    raise UsageError(f"{joined(root, *parts)} is a run; runs are removed by: {elsewhere}mlx xp rm {name}")


def _parts(relative: str) -> tuple[str, ...]:
    return tuple(part for part in relative.split("/") if part)


def remove(place: Place) -> None:
    """Remove a file or folder; a link goes, and what it leads to stays.

    Args:
        place: that was surveyed, and not refused.

    Raises:
        StorageError: not all of it could be removed; says what is left, and where.
    """
    storage = Storage(place.root)
    if storage.local:
        _remove_local(place)
    else:
        _remove_objects(storage, place)


def _remove_local(place: Place) -> None:
    """A folder gets another name first, so that nobody ever takes a half of it for the whole."""
    *above, name = place.parts
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(opened(Storage(place.root).path, *above))
            if not stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                os.unlink(name, dir_fd=folder)
                return
            hidden = name
            if REMOVING not in name:
                hidden = f".{name.lstrip('.')}{REMOVING}{uuid.uuid4().hex[:8]}"
                os.rename(name, hidden, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError as error:
            raise StorageError(f"cannot remove {place.title}: {error.strerror or error}; nothing is gone") from error
        problem = remove_tree(hidden, folder)
    if problem is not None:
        rest = Place(place.root, (*above, hidden))
        left = Survey(Entry(hidden))
        _measure_folder(rest.path, left, 0, 0)
        raise StorageError(
            f"removed only a part of {place.title}: {left.top.files:,} files, {size_text(left.top.size_bytes)}, are "
            f"left ({problem.strerror or problem}: {problem.filename}). Make them removable, then: "
            f"mlx data rm {'/'.join(rest.parts)}"
        ) from problem


def _remove_objects(storage: Storage, place: Place) -> None:
    try:
        if storage.fs.get_file_info(place.path).is_file:
            storage.remove_file(*place.parts)
            return
        for mark in (RECORD, "manifest.json"):  # without it nobody takes a half for the whole
            storage.remove_file(*place.parts, mark)
        storage.remove_folder(*place.parts)
        problem = ""
    except OSError as error:
        problem = f" ({first_line(error)})"
    left = Survey(Entry(place.parts[-1]))
    _measure_objects(storage, place, left, 0)
    if left.top.files:
        raise StorageError(
            f"removed only a part of {place.title}: {left.top.files:,} files, {size_text(left.top.size_bytes)}, are "
            f"left{problem}. Again with: mlx data rm {'/'.join(place.parts)}"
        )
