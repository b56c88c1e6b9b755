"""Prepared datasets: the result of `ray_map_batches` for every row, stored as one `.npy` file per column.

<root>/Digits-3f2a…/
    manifest.json          rows, bytes, schema; written last, so a dataset without it does not exist
    9c41d2a0-1b3f-0.npy    a column; the first part of the name identifies the attempt to write the dataset
    9c41d2a0.sample        some rows as the driver has read them, until that attempt ends
    last_used              only its modification time matters; processes that read the dataset refresh it

The root is a folder or a URI like `s3://bucket/prepared`.
"""

import contextlib
import json
import re
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlx_runtime.storage.documents import COUNT, NAME, TEXT, Kind, from_json, list_of, mapping_of
from mlx_runtime.storage.files import Stored, storage_at, storage_errors
from mlx_runtime.storage.leases import heartbeat

MANIFEST = "manifest.json"

LAST_USED = "last_used"

_FOLDER = re.compile(r"\w+-[0-9a-f]{12}-[0-9a-f]{12}")
_FILE = re.compile(r"\.*(manifest\.json|last_used|[0-9a-f]{8}\.sample|[0-9a-f]+(-[0-9a-f]+)+\.npy)(\.[0-9a-f]{8})*")
"""Names of folders and files of datasets, also unfinished ones. Nothing else in a store is touched."""

IN_USE_S = 300
"""Time for which a dataset counts as in use; processes that read it refresh `LAST_USED` more often."""


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

    name: str
    complete: bool  # False if it was not written to the end
    size_bytes: int  # of all its files, without those of others
    age_s: float  # since it was last used or written

    @property
    def in_use(self) -> bool:
        return self.age_s < IN_USE_S


@dataclass(frozen=True)
class PreparedSet:
    """A prepared dataset to read in place of a dataset, with the attributes that loaders need.

    If it has an `attempt`, it is missing, and the workers write it first; its manifest does not name columns yet.
    """

    root: str  # of its store
    manifest: Manifest
    attributes: Mapping[str, Any]  # `batch_size`, `row_counts` and others of the dataset
    max_bytes: float = float("inf")  # of the store, and of copies on a machine if the root is on an object store
    attempt: str = ""  # id of the attempt to write it

    def is_written(self) -> bool:
        """Return True once the workers have written a missing one."""
        return Store(self.root).find(self.manifest.name) is not None


class Store:
    """The prepared datasets in a folder or an object store. Methods raise StorageError if it cannot be read."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.storage = storage_at(root)

    def names(self) -> list[str]:
        """Return the names of all datasets, complete or not."""
        with storage_errors(f"cannot read {self.root}"):
            return [name for name in self.storage.names() if _FOLDER.fullmatch(name)]

    def find(self, name: str) -> Manifest | None:
        """Return the manifest of a dataset, or None if any part of the dataset cannot be read."""
        try:
            manifest = Manifest.parse(self.storage.document(name, MANIFEST))
            sizes = {item.name: item.size_bytes for item in self.storage.listed(name)}
        except (OSError, ValueError):
            return None
        size_bytes = sum(sizes.get(file, 0) for file, _, _ in manifest.columns.values())
        return manifest if (manifest.name, manifest.size_bytes) == (name, size_bytes) else None

    def is_damaged(self, name: str) -> bool:
        """Return True if a dataset was written completely, but can no longer be read."""
        with contextlib.suppress(OSError):
            return self.find(name) is None and self.storage.size_bytes(name, MANIFEST) is not None
        return True

    def entries(self) -> list[Entry]:
        """Return all datasets, least recently used first."""
        names = self.names()
        with storage_errors(f"cannot read {self.root}"):
            return sorted(map(self._entry, names), key=lambda item: -item.age_s)

    def _entry(self, name: str) -> Entry:
        files = [file for file in self.storage.listed(name) if _FILE.fullmatch(file.name)]
        changed = max((file.modified_s for file in files), default=time.time())
        complete = any(file.name == MANIFEST for file in files)
        size_bytes = sum(file.size_bytes for file in files)
        return Entry(name, complete, size_bytes, max(0.0, time.time() - changed))

    @contextlib.contextmanager
    def mark_used(self, name: str) -> Iterator[None]:
        """Mark a dataset as in use while the block runs, so that nobody removes it."""
        self.note_use(name)
        with heartbeat(lambda: self.note_use(name), IN_USE_S / 5):
            yield

    def note_use(self, name: str) -> None:
        """Record the current time as the last use of a dataset, if the storage is writable."""
        with contextlib.suppress(OSError):
            self.storage.write(b"", name, LAST_USED)

    @contextlib.contextmanager
    def attempt(self, name: str, sample: bytes = b"") -> Iterator[str]:
        """Provide the id of an attempt to write a dataset, with which its files begin. One of them is `ID.sample`.

        After the block, those that are not published are removed.
        """
        attempt = uuid.uuid4().hex[:8]
        try:
            with storage_errors(f"cannot write a prepared dataset to {self.root}"):
                if self.storage.local:
                    Path(self.storage.of(name)).mkdir(parents=True, exist_ok=True)
                self.storage.write(sample, name, f"{attempt}.sample")
            self.note_use(name)
            yield attempt
        finally:
            self.discard(name, attempt)

    def discard(self, name: str, attempt: str = "") -> None:
        """Remove the files of a dataset, or of an attempt to write it; the columns only if it is not published."""
        with contextlib.suppress(OSError):
            published = self.storage.size_bytes(name, MANIFEST) is not None
            for file in self.storage.names(name):
                if _FILE.fullmatch(file) and file.startswith(attempt) and not (published and file.endswith(".npy")):
                    self.storage.remove_file(name, file)
            if self.storage.names(name) in ([], [LAST_USED]):
                self.storage.remove_folder(name)

    def clean(self, max_bytes: float) -> list[Entry]:
        """Remove incomplete datasets, and the least recently used ones until the rest fits. Return the removed ones.

        Datasets in use remain.
        """
        entries, removed = self.entries(), []
        total = sum(item.size_bytes for item in entries)
        for item in entries:
            if not item.in_use and (total > max_bytes or not item.complete) and self._remove(item):
                removed.append(item)
                total -= item.size_bytes
        return removed

    def _remove(self, item: Entry) -> bool:
        """Remove a dataset. Return False if the storage refuses it, or if a process has begun to use the dataset."""
        try:
            if self._entry(item.name).in_use:
                return False
            manifest = self.storage.document(item.name, MANIFEST) if item.complete else None
            self.storage.remove_file(item.name, MANIFEST)  # no process finds it from now on
            if self._entry(item.name).in_use:  # one has found it before
                if manifest is not None:
                    self.storage.write(manifest, item.name, MANIFEST)
                return False
            self.discard(item.name)
        except OSError:
            return False
        return True


def is_in_use(file: Stored) -> bool:
    """Return True if a file shows that a process reads or writes the dataset in its folder."""
    return file.name == LAST_USED and time.time() - file.modified_s < IN_USE_S
