"""Prepared datasets: the result of `ray_map_batches` for every row, stored as one `.npy` file per column.

<root>/Digits-3f2a…/
    manifest.json          rows, bytes, schema; written last, so a dataset without it does not exist
    9c41d2-0.npy           a column; the first part of the name identifies the attempt to write the dataset
    last_used              only its modification time matters
    used-7be0…             mark of a process that reads the dataset, refreshed meanwhile

The root is a folder or a URI like `s3://bucket/prepared`.
"""

import contextlib
import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mlx_runtime.errors import StorageError, short_message
from mlx_runtime.storage.documents import COUNT, NAME, TEXT, Kind, from_json, list_of, mapping_of
from mlx_runtime.storage.files import Stored, storage_at, storage_errors
from mlx_runtime.storage.leases import heartbeat

MANIFEST = "manifest.json"

MARK = "used-"
"""Prefix of the marks of processes that read the dataset in a folder."""

MARK_S = 300
"""Age at which a mark has expired; processes refresh theirs more often."""


_COLUMN = Kind(
    "a file, a type and a shape",
    lambda value: (
        isinstance(value, list)
        and len(value) == 3
        and all(kind.fits(item) for kind, item in zip((NAME, TEXT, list_of(COUNT)), value, strict=True))
    ),
)
_SHAPE = {
    "name": NAME,
    "rows": COUNT,
    "size_bytes": COUNT,
    "columns": mapping_of(_COLUMN),
    "dataset": TEXT,
    "arguments": Kind("a mapping", lambda value: isinstance(value, dict)),
    "created": TEXT,
}


@dataclass(frozen=True)
class Manifest:
    """Description of a prepared dataset."""

    name: str  # of its folder: class and digest
    rows: int
    size_bytes: int  # total of the files of all columns
    columns: dict[str, tuple[str, str, tuple[int, ...]]]  # file, torch dtype and shape of one row, by column
    dataset: str  # path of its class
    arguments: dict[str, Any]  # of its constructor
    created: str  # time in UTC

    def text(self) -> str:
        return json.dumps(asdict(self), indent=2, default=str) + "\n"

    @classmethod
    def parse(cls, content: bytes) -> "Manifest":
        """Parse the content of a manifest file. Raises ValueError if it is not one."""
        fields = {name: from_json(content, _SHAPE, needs=tuple(_SHAPE))[name] for name in _SHAPE}
        columns = {name: (file, dtype, tuple(shape)) for name, (file, dtype, shape) in fields.pop("columns").items()}
        return cls(columns=columns, **fields)


@dataclass(frozen=True)
class Entry:
    """A folder in a store of prepared datasets."""

    manifest: Manifest | None  # None if the dataset is incomplete or damaged
    name: str
    size_bytes: int  # of all its files
    age_s: float  # since it was last used or written
    busy: bool  # a process reads or writes it, or that is unknown


@dataclass(frozen=True)
class PreparedSet:
    """A prepared dataset to read in place of a dataset, with the attributes that loaders need."""

    root: str  # of its store
    manifest: Manifest
    attributes: Mapping[str, Any]  # `batch_size`, `row_counts` and others of the dataset
    cache_bytes: float = float("inf")  # space for copies on a machine, if the root is on an object store


class Store:
    """The prepared datasets in a folder or an object store. Methods raise StorageError if it cannot be read."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.storage = storage_at(root)

    def names(self) -> list[str]:
        """Return the names of all datasets, complete or not. Other files may be among them."""
        with storage_errors(f"cannot read {self.root}"):
            return [name for name in self.storage.names() if not name.startswith(".")]

    def find(self, name: str) -> Manifest | None:
        """Return the manifest of a dataset, or None if any part of the dataset cannot be read."""
        try:
            return self._find(name)
        except StorageError:
            return None

    def is_damaged(self, name: str) -> bool:
        """Return True if a dataset was written completely, but can no longer be read."""
        try:
            return self._find(name) is None and self.storage.size_bytes(name, MANIFEST) is not None
        except (OSError, StorageError):
            return True

    def entries(self) -> list[Entry]:
        """Return all folders, least recently used first."""
        entries = []
        for name in sorted(item.name for item in self._list() if not item.is_file):
            files = self._list(name)
            changed = max((file.modified_s for file in files), default=float("-inf"))
            busy = _is_busy(files)
            try:
                manifest = self._find(name)
            except StorageError:
                manifest, busy = None, True  # may be intact, so do not remove it
            size_bytes = sum(file.size_bytes for file in files)
            entries.append(Entry(manifest, name, size_bytes, max(0.0, time.time() - changed), busy))
        return sorted(entries, key=lambda item: -item.age_s)

    @contextlib.contextmanager
    def mark_used(self, name: str) -> Iterator[None]:
        """Mark a dataset as in use while the block runs, so that nobody removes it."""
        mark = f"{MARK}{uuid.uuid4().hex}"

        def refresh() -> None:
            with contextlib.suppress(OSError):  # the storage may not be writable
                self.storage.write(b"", name, mark)

        refresh()
        try:
            with heartbeat(refresh, MARK_S / 5):
                yield
        finally:
            with contextlib.suppress(OSError):
                self.storage.remove_file(name, mark)
            if self.find(name):
                self.note_use(name)

    def note_use(self, name: str) -> None:
        """Record the current time as the last use of a dataset, if the storage is writable."""
        with contextlib.suppress(OSError):
            self.storage.write(b"", name, "last_used")

    def remove(self, name: str) -> bool:
        """Remove a dataset unless it is in use or the storage refuses it. Return True if it is gone."""
        try:
            manifest = self._find(name)
            if _is_busy(self._list(name)):
                return False
            self.storage.remove_file(name, MANIFEST)  # no process finds it from now on
            if _is_busy(self._list(name)):  # a process found it just before that
                if manifest is not None:
                    self.storage.write(manifest.text().encode(), name, MANIFEST)
                return False
            self.storage.remove_folder(name)
        except (OSError, StorageError):
            return False
        return True

    def unwanted_entries(self, *, max_age_s: float, max_bytes: float, keep: Sequence[str] = ()) -> list[Entry]:
        """Return the datasets to remove: incomplete ones, old ones, and the least recently used until the rest fits.

        Datasets in use, and those named in `keep`, are excluded.
        """
        entries = self.entries()
        total = sum(item.size_bytes for item in entries)
        unwanted = []
        for item in entries:
            wanted = item.manifest is not None and item.age_s <= max_age_s and total <= max_bytes
            if not (item.busy or wanted or item.name in keep):
                unwanted.append(item)
                total -= item.size_bytes
        return unwanted

    def clean(self, *, max_age_s: float, max_bytes: float, keep: Sequence[str] = ()) -> list[Entry]:
        """Remove `unwanted_entries` datasets, and return them."""
        unwanted = self.unwanted_entries(max_age_s=max_age_s, max_bytes=max_bytes, keep=keep)
        return [item for item in unwanted if self.remove(item.name)]

    def _find(self, name: str) -> Manifest | None:
        """Return the manifest of a dataset, or None if it is incomplete.

        Raises StorageError if the storage does not answer, or another version wrote the manifest.
        """
        try:
            manifest = Manifest.parse(self.storage.document(name, MANIFEST))
            if manifest.name != name:
                raise ValueError(f"{MANIFEST} describes {manifest.name}")
            sizes = {item.name: item.size_bytes for item in self.storage.listed(name)}
            whole = sum(sizes.get(file, 0) for file, _, _ in manifest.columns.values()) == manifest.size_bytes
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            message = f"cannot read the prepared dataset {name} in {self.root}: {short_message(error)}"
            raise StorageError(message) from error
        return manifest if whole else None

    def _list(self, *parts: str) -> list[Stored]:
        with storage_errors(f"cannot read {self.root}"):
            found = self.storage.listed(*parts)
        return [item for item in found if not item.name.startswith(".")]


def is_fresh_mark(file: Stored) -> bool:
    """Return True for the mark of a process that reads the dataset in the folder of a file."""
    return file.name.startswith(MARK) and time.time() - file.modified_s < MARK_S


def _is_busy(files: Sequence[Stored]) -> bool:
    return any(map(is_fresh_mark, files))
