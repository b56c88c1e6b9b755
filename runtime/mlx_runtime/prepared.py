"""Prepared sets: what `ray_map_batches` made of every row, stored once as one `.npy` file per column.

<root>/Digits-3f2a…/
    manifest.json          rows, bytes, schema; written last, so a set without it does not exist
    9c41d2-0.npy           a column; the first part is the attempt that wrote it
    used-7be0…             somebody reads the set at present; refreshed while they do

The root is a folder or a URI like `s3://bucket/prepared`. Workers map the files into memory and gather about a megabyte
of rows at a time; from an object store they first copy them to a folder of their machine.
"""

import contextlib
import fcntl
import io
import json
import os
import shutil
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.fs
import torch

from mlx_runtime.errors import StorageError, first_line
from mlx_runtime.layout import BUSY_S, READ_MARK, is_read_mark
from mlx_runtime.reading import Batch, as_numpy, dtype_name
from mlx_runtime.storage import Storage, write_atomic

MANIFEST = "manifest.json"

CHUNK_BYTES = 1 << 20
"""Gathered at once: many small batches are then one gather, and a chunk still fits a cache."""


@dataclass(frozen=True)
class Manifest:
    """What a prepared set is.

    Attributes:
        name: of its folder: dataset class and key.
        rows: in each column.
        size_bytes: of the files of all columns.
        columns: by name: file, torch dtype, shape of one row.
        dataset: class path.
        arguments: of its constructor.
        created: in UTC.
    """

    name: str
    rows: int
    size_bytes: int
    columns: dict[str, tuple[str, str, tuple[int, ...]]]
    dataset: str
    arguments: dict[str, Any]
    created: str

    def text(self) -> str:
        return json.dumps(asdict(self), indent=2, default=str) + "\n"

    @classmethod
    def parsed(cls, text: str) -> "Manifest":
        fields = json.loads(text)
        columns = {name: (file, dtype, tuple(shape)) for name, (file, dtype, shape) in fields.pop("columns").items()}
        return cls(columns=columns, **fields)


@dataclass(frozen=True)
class Found:
    """A prepared set on the storage, with how old and how busy it is.

    Attributes:
        manifest: None when the set is half-written or damaged.
        name: of the folder.
        size_bytes: of all files.
        age_s: seconds since it was last used or written.
        busy: whether somebody reads it at present.
    """

    manifest: Manifest | None
    name: str
    size_bytes: int
    age_s: float
    busy: bool


@dataclass(frozen=True)
class PreparedSet:
    """A prepared set to read instead of a dataset, with what its loader would ask the dataset.

    Attributes:
        root: of the store it is in.
        manifest: of the set.
        attributes: `batch_size`, `shuffle`, `drop_last` and `training` of the dataset, those that it has.
        cache_bytes: for copies of sets on a machine, when the root is on an object store.
    """

    root: str
    manifest: Manifest
    attributes: Mapping[str, Any]
    cache_bytes: float = float("inf")


class Store:
    """Prepared sets in one place.

    Args:
        root: a folder or a URI.

    Raises:
        StorageError: there is no file system for such a URI.
    """

    def __init__(self, root: str) -> None:
        self.root = root
        self._storage = Storage(root)
        self._fs, self.local = self._storage.fs, self._storage.local

    def names(self) -> list[str]:
        """Folders of sets, whole or not."""
        return sorted(info.base_name for info in self._listed(self._of()) if info.type == pyarrow.fs.FileType.Directory)

    def find(self, name: str) -> Manifest | None:
        """The set in a folder, if all of it is there and can be read."""
        try:
            return self._find(name)
        except StorageError:
            return None

    def _find(self, name: str) -> Manifest | None:
        """The same.

        Raises:
            StorageError: nobody knows, since the storage did not answer, or another version wrote the manifest.
        """
        try:
            manifest = Manifest.parsed(self._storage.read(name, MANIFEST).decode())
            files = [self._of(name, file) for file, _, _ in manifest.columns.values()]
            whole = sum(info.size or 0 for info in self._fs.get_file_info(files)) == manifest.size_bytes
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise StorageError(f"cannot read the prepared set {name} in {self.root}: {first_line(error)}") from error
        return manifest if whole else None

    def found(self) -> list[Found]:
        """Everything there is, the longest unused first."""
        sets = []
        for name in self.names():
            infos = self._listed(self._of(name))
            ages = [max(0.0, time.time() - (info.mtime_ns or 0) / 1e9) for info in infos]
            busy = _busy(infos)
            size = sum(info.size or 0 for info in infos)
            age = min(ages, default=float("inf"))
            try:
                manifest = self._find(name)
            except StorageError:
                manifest, busy = None, True  # better kept than lost
            sets.append(Found(manifest, name, size, age, busy))
        return sorted(sets, key=lambda item: -item.age_s)

    @contextlib.contextmanager
    def used(self, name: str, refresh_s: float = BUSY_S / 5) -> Iterator[Callable[[], None]]:
        """Mark a set as in use while the block runs; call what this gives now and then to keep the mark fresh.

        On a storage that cannot be written the set is used without a mark.
        """
        mark = (name, f"{READ_MARK}{uuid.uuid4().hex}")
        last = -refresh_s

        def refresh() -> None:
            nonlocal last
            if time.monotonic() - last >= refresh_s:
                last = time.monotonic()
                self._storage.write(b"", *mark)

        with contextlib.suppress(OSError):
            refresh()
        try:
            yield refresh
        finally:
            with contextlib.suppress(OSError):
                self._storage.remove_file(*mark)
            with contextlib.suppress(OSError):
                if self.find(name):
                    self._storage.write(b"", name, "last_used")

    def remove(self, name: str) -> bool:
        """Delete a set unless somebody uses it or it may not be deleted. Returns whether it is gone."""
        try:
            manifest = self._find(name)
            if _busy(self._listed(self._of(name))):
                return False
            self._storage.remove_file(name, MANIFEST)  # from here on nobody finds it
            if _busy(self._listed(self._of(name))):  # somebody did just before
                if manifest is not None:
                    self._storage.write(manifest.text().encode(), name, MANIFEST)
                return False
            self._storage.remove_folder(name)
        except (OSError, StorageError):
            return False
        return True

    def unwanted(self, *, max_age_s: float, max_bytes: float, keep: Sequence[str] = ()) -> list[Found]:
        """Sets that nobody used for long, the longest unused ones while all are too big together, and broken ones.

        Args:
            max_age_s: since their last use.
            max_bytes: of all sets together.
            keep: names that stay; so do those in use.
        """
        found = self.found()
        total = sum(item.size_bytes for item in found)
        chosen = []
        for item in found:
            wanted = item.manifest is not None and item.age_s <= max_age_s and total <= max_bytes
            if not (item.busy or wanted or item.name in keep):
                chosen.append(item)
                total -= item.size_bytes
        return chosen

    def clean(self, *, max_age_s: float, max_bytes: float, keep: Sequence[str] = ()) -> list[Found]:
        """Delete what is `unwanted`. Returns what was deleted."""
        unwanted = self.unwanted(max_age_s=max_age_s, max_bytes=max_bytes, keep=keep)
        return [item for item in unwanted if self.remove(item.name)]

    def columns(self, manifest: Manifest, cache: Path, *, max_bytes: float) -> dict[str, torch.Tensor]:
        """The columns of a set, {name: (rows, ...)}, mapped into memory and not to be written to.

        Args:
            manifest: from `find`.
            cache: folder of this machine for sets that are on an object store.
            max_bytes: of that folder.

        Raises:
            StorageError: a file cannot be read.
        """
        try:
            if self.local:
                return _mapped(Path(self._of(manifest.name)), manifest)
            return self._copied(manifest, cache, max_bytes)
        except (OSError, ValueError) as error:
            raise StorageError(
                f"the prepared set {manifest.name} in {self.root} cannot be read: {error}. "
                "Is it visible from every node? --no-prepared reads samples instead"
            ) from error

    def _copied(self, manifest: Manifest, cache: Path, max_bytes: float) -> dict[str, torch.Tensor]:
        """The columns of a copy on this machine; of several processes one fetches it, the others wait."""
        folder = cache / manifest.name
        cache.mkdir(parents=True, exist_ok=True)
        copies = Store(str(cache))
        with (cache / f".{manifest.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if copies.find(manifest.name) != manifest:
                shutil.rmtree(folder, ignore_errors=True)
                copies.clean(max_age_s=float("inf"), max_bytes=max(0.0, max_bytes - manifest.size_bytes))
                for left in cache.glob(f".{manifest.name}-*"):  # by one who was killed: this lock is ours
                    shutil.rmtree(left, ignore_errors=True)
                partial = cache / f".{manifest.name}-{uuid.uuid4().hex}"
                partial.mkdir()
                try:
                    for file in [file for file, _, _ in manifest.columns.values()] + [MANIFEST]:
                        source = self._of(manifest.name, file)
                        pyarrow.fs.copy_files(source, str(partial / file), source_filesystem=self._fs)
                    partial.rename(folder)
                finally:
                    shutil.rmtree(partial, ignore_errors=True)
            else:
                copies._storage.write(b"", manifest.name, "last_used")
            return _mapped(folder, manifest)  # what is mapped stays readable, whoever removes the files

    def _of(self, *parts: str) -> str:
        return self._storage.of(*parts)

    def _listed(self, path: str) -> list[pyarrow.fs.FileInfo]:
        selector = pyarrow.fs.FileSelector(path, allow_not_found=True)
        try:
            infos: list[pyarrow.fs.FileInfo] = self._fs.get_file_info(selector)
        except OSError as error:
            raise StorageError(f"cannot read {self.root}: {first_line(error)}") from error
        return [info for info in infos if not info.base_name.startswith(".")]

    def _put_new(self, data: bytes, *parts: str) -> bool:
        """Write a small file if there is none. Returns whether it was written; on a folder only one writer can win."""
        if not self.local:
            if self._storage.size_bytes(*parts) is not None:
                return False
            self._storage.write(data, *parts)
            return True
        temporary = Path(f"{self._of(*parts)}.{uuid.uuid4().hex}")
        write_atomic(temporary, data)
        try:
            os.link(temporary, self._of(*parts))
        except FileExistsError:
            return False
        finally:
            temporary.unlink()
        return True


def _busy(infos: Sequence[pyarrow.fs.FileInfo]) -> bool:
    """Whether somebody reads a set, by what is in its folder."""
    return any(is_read_mark(info.base_name, (info.mtime_ns or 0) / 1e9) for info in infos)


def _mapped(folder: Path, manifest: Manifest) -> dict[str, torch.Tensor]:
    columns = {}
    for name, (file, dtype, _) in manifest.columns.items():
        mapped = np.load(folder / file, mmap_mode="r")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that it cannot be written to
            columns[name] = torch.from_numpy(mapped).view(getattr(torch, dtype))
    return columns


class Writer:
    """Writes one set, block after block of rows in order; nothing of it can be found before `commit`.

    Use it as a context manager: left without `commit`, it takes away what it wrote. Two writers of one set do not
    meet: each has files of its own, and the first to commit wins.

    Args:
        store, name: where to.
        rows: in all.
        like: a batch of any length: names, types and shapes of the columns.
        dataset, arguments: for the manifest.

    Raises:
        StorageError: the storage cannot take it.
    """

    def __init__(
        self, store: Store, name: str, rows: int, like: Batch, *, dataset: str, arguments: Mapping[str, Any]
    ) -> None:
        self._store, self._name, self._rows = store, name, rows
        self._dataset, self._arguments = dataset, dict(arguments)
        attempt = uuid.uuid4().hex[:6]
        self._columns = {
            column: (f"{attempt}-{index}.npy", dtype_name(tensor), tuple(tensor.shape[1:]))
            for index, (column, tensor) in enumerate(like.items())
        }
        self._streams: dict[str, Any] = {}
        self._size_bytes = 0
        self._mark = contextlib.ExitStack()
        with self._storage_errors():
            store._fs.create_dir(store._of(name), recursive=True)
            self._refresh = self._mark.enter_context(store.used(name))
            for column, tensor in like.items():
                stream = store._fs.open_output_stream(store._of(name, self._columns[column][0]))
                self._streams[column] = stream
                self._write(column, _header(rows, as_numpy(tensor)))

    def __enter__(self) -> "Writer":
        return self

    def write(self, block: Mapping[str, Any]) -> None:
        """Append rows.

        Args:
            block: the bytes of some rows by column, in C order.

        Raises:
            StorageError: the storage cannot take them.
        """
        with self._storage_errors():
            self._refresh()
            for column, data in block.items():
                self._write(column, data)

    def commit(self, created: str) -> Manifest:
        """Make the set findable; if another writer was faster, take theirs.

        Raises:
            StorageError: the storage cannot take it.
        """
        store = self._store
        manifest = Manifest(
            self._name, self._rows, self._size_bytes, self._columns, self._dataset, self._arguments, created
        )
        with self._storage_errors():
            for stream in self._streams.values():
                stream.close()
            text = manifest.text().encode()
            if store._put_new(text, self._name, MANIFEST):
                self._streams = {}
                return manifest
            present = store.find(self._name)
            if present is None:  # the files of an older attempt were damaged
                store._storage.write(text, self._name, MANIFEST)
                self._streams = {}
        return present or manifest

    def __exit__(self, *_: object) -> None:
        for column, stream in self._streams.items():  # none after a commit
            with contextlib.suppress(OSError):
                stream.close()
            with contextlib.suppress(OSError):
                self._store._storage.remove_file(self._name, self._columns[column][0])
        self._mark.close()
        with contextlib.suppress(OSError):
            if not self._store._listed(self._store._of(self._name)):
                self._store._storage.remove_folder(self._name)

    def _write(self, column: str, data: Any) -> None:
        self._streams[column].write(data)
        self._size_bytes += memoryview(data).nbytes

    @contextlib.contextmanager
    def _storage_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError(f"cannot write a prepared set to {self._store.root}: {first_line(error)}") from error


class ColumnReader:
    """Reads rows of a prepared set.

    Args:
        columns: from `Store.columns`.
        device: where batches go.
    """

    def __init__(self, columns: Mapping[str, torch.Tensor], device: torch.device) -> None:
        self._columns, self._device = dict(columns), device
        self._row_bytes = sum(column[0].numel() * column.element_size() for column in columns.values())

    def batches(self, rows: torch.Tensor, sizes: Sequence[int]) -> Iterator[Batch]:
        """One batch after the other, on the device.

        Batches of one chunk share its memory without overlapping; it is freed with the last of them.

        Args:
            rows: to read, (n,).
            sizes: rows in each batch; n in all.
        """
        names = list(self._columns)
        per_chunk = max(1, CHUNK_BYTES // max(1, self._row_bytes * max(sizes, default=1)))
        start = 0
        for first in range(0, len(sizes), per_chunk):
            group = list(sizes[first : first + per_chunk])
            chosen = rows[start : start + sum(group)]
            start += len(chosen)
            chunks = [torch.split(self._gathered(column, chosen), group) for column in self._columns.values()]
            for batch in zip(*chunks, strict=True):
                yield dict(zip(names, batch, strict=True))

    def _gathered(self, column: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        if self._device.type == "cpu":
            return column.index_select(0, rows)
        pinned = torch.empty((len(rows), *column.shape[1:]), dtype=column.dtype, pin_memory=True)
        torch.index_select(column, 0, rows, out=pinned)
        return pinned.to(self._device, non_blocking=True)


def _header(rows: int, like: "np.ndarray[Any, Any]") -> bytes:
    """Of a `.npy` file with so many rows."""
    header = io.BytesIO()
    described = {
        "descr": np.lib.format.dtype_to_descr(like.dtype),
        "fortran_order": False,
        "shape": (rows, *like.shape[1:]),
    }
    np.lib.format.write_array_header_1_0(header, described)
    return header.getvalue()
