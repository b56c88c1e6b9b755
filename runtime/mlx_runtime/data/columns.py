"""Columns of prepared datasets: written block by block, mapped into memory, read in batches.

From an object store, workers first copy the files to a folder on their machine.
"""

import contextlib
import fcntl
import io
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mlx_runtime.data.batches import Batch, as_numpy, dtype_name
from mlx_runtime.data.prepared import MANIFEST, Manifest, PreparedSet, Store
from mlx_runtime.data.sampling import WorkerPass
from mlx_runtime.errors import StorageError
from mlx_runtime.settings import Settings
from mlx_runtime.storage.files import storage_errors
from mlx_runtime.storage.publishing import Publication, recover

CHUNK_BYTES = 1 << 20
"""Bytes gathered at once: many small batches then need only one gather, and a chunk still fits in a cache."""


class ColumnWriter:
    """Writes a prepared dataset, block after block of rows in order, as a context manager.

    It cannot be found before `commit`, and without it what was written is removed. Several writers of one dataset have
    files of their own; the first to commit wins.

    Args:
        store: Store to write to.
        name: Folder of the dataset.
        rows: Total number of rows.
        like: A batch of any length: names, types and shapes of the columns.
        dataset: Class path, for the manifest.
        arguments: Arguments of the dataset's constructor, for the manifest.
    """

    def __init__(
        self, store: Store, name: str, rows: int, like: Batch, *, dataset: str, arguments: Mapping[str, Any]
    ) -> None:
        self._store, self._name, self._rows, self._like = store, name, rows, like
        self._dataset, self._arguments = dataset, dict(arguments)
        self._publication = Publication(store.storage, name, MANIFEST, in_place=True)
        self._columns = {
            column: (f"{self._publication.id}-{index}.npy", dtype_name(tensor), tuple(tensor.shape[1:]))
            for index, (column, tensor) in enumerate(like.items())
        }
        self._problem = f"cannot write a prepared dataset to {store.root}"
        self._streams: dict[str, Any] = {}
        self._size_bytes = 0
        self._exit = contextlib.ExitStack()

    def __enter__(self) -> "ColumnWriter":
        """Open the files.

        Raises:
            StorageError: The storage refuses it.
        """
        with contextlib.ExitStack() as stack, storage_errors(self._problem):
            stack.callback(self._remove_if_empty)
            stack.enter_context(self._publication)
            stack.enter_context(self._store.used(self._name))
            stack.callback(self._close_quietly)
            for column, tensor in self._like.items():
                self._streams[column] = self._publication.create(self._columns[column][0])
                self._write(column, _header(self._rows, as_numpy(tensor)))
            self._exit = stack.pop_all()
        return self

    def write(self, block: Mapping[str, Any]) -> None:
        """Append rows.

        Args:
            block: The bytes of some rows by column, in C order.

        Raises:
            StorageError: The storage refuses it.
        """
        with storage_errors(self._problem):
            for column, data in block.items():
                self._write(column, data)

    def commit(self, created: str) -> Manifest:
        """Make the dataset findable. Return its description, or that of a writer that was faster.

        Raises:
            StorageError: The storage refuses it.
        """
        manifest = Manifest(
            self._name, self._rows, self._size_bytes, self._columns, self._dataset, self._arguments, created
        )
        with storage_errors(self._problem):
            for stream in self._streams.values():
                stream.close()
            if not self._publication.commit_first(manifest.text().encode()):
                present = self._store.find(self._name)
                if present is not None:
                    return present
                self._publication.commit(manifest.text().encode())  # files of the attempt before are damaged
        return manifest

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    def _write(self, column: str, data: Any) -> None:
        self._streams[column].write(data)
        self._size_bytes += memoryview(data).nbytes

    def _close_quietly(self) -> None:
        for stream in self._streams.values():
            with contextlib.suppress(OSError):
                stream.close()

    def _remove_if_empty(self) -> None:
        with contextlib.suppress(OSError):
            if not self._store.storage.names(self._name):
                self._store.storage.remove_folder(self._name)


class ColumnReader:
    """Reads rows of a prepared dataset.

    Args:
        columns: Columns returned by `load_columns`.
        device: Device that batches go to.
    """

    def __init__(self, columns: Mapping[str, torch.Tensor], device: torch.device) -> None:
        self._columns, self._device = dict(columns), device
        self._row_bytes = sum(column[0].numel() * column.element_size() for column in columns.values())

    def batches(self, rows: torch.Tensor, sizes: Sequence[int]) -> Iterator[Batch]:
        """Yield batches on the device.

        About a megabyte of rows is gathered at a time. Batches of one such chunk share its memory without overlapping;
        it is freed with the last of them.

        Args:
            rows: Rows to read, (n,) int64.
            sizes: Rows in each batch; n in all.
        """
        names = list(self._columns)
        per_chunk = max(1, CHUNK_BYTES // max(1, self._row_bytes * max(sizes, default=1)))
        start = 0
        for first in range(0, len(sizes), per_chunk):
            group = list(sizes[first : first + per_chunk])
            of_chunk = rows[start : start + sum(group)]
            start += len(of_chunk)
            chunks = [torch.split(self._gathered(column, of_chunk), group) for column in self._columns.values()]
            for batch in zip(*chunks, strict=True):
                yield dict(zip(names, batch, strict=True))

    def _gathered(self, column: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        if self._device.type == "cpu":
            return column.index_select(0, rows)
        pinned = torch.empty((len(rows), *column.shape[1:]), dtype=column.dtype, pin_memory=True)
        torch.index_select(column, 0, rows, out=pinned)
        return pinned.to(self._device, non_blocking=True)


def load_columns(store: Store, manifest: Manifest, cache: Path, *, max_bytes: float) -> dict[str, torch.Tensor]:
    """Return the columns of a prepared dataset, {name: (rows, ...)}, mapped into memory; do not write to them.

    Args:
        store: Store that holds it.
        manifest: Its description.
        cache: Folder on this machine for copies from an object store.
        max_bytes: Maximum total size of the copies.

    Raises:
        StorageError: A file cannot be read.
    """
    try:
        if store.storage.local:
            return _mapped(Path(store.storage.of(manifest.name)), manifest)
        return _copied(store, manifest, cache, max_bytes)
    except (OSError, ValueError) as error:
        raise StorageError(
            f"the prepared dataset {manifest.name} in {store.root} cannot be read: {error}. "
            "Is it visible from every node? --no-prepared reads samples instead"
        ) from error


def _copied(store: Store, manifest: Manifest, cache: Path, max_bytes: float) -> dict[str, torch.Tensor]:
    """Return the columns of a copy on this machine; if several processes ask, one fetches it while the others wait."""
    cache.mkdir(parents=True, exist_ok=True)
    copies = Store(str(cache))
    with (cache / f".{manifest.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if copies.find(manifest.name) == manifest:
            copies.note_use(manifest.name)
        else:
            recover(copies.storage, manifest.name)
            copies.clean(max_age_s=float("inf"), max_bytes=max(0.0, max_bytes - manifest.size_bytes))
            with Publication(copies.storage, manifest.name, MANIFEST) as publication:
                for file, _, _ in manifest.columns.values():
                    store.storage.download(cache / publication.folder / file, manifest.name, file)
                publication.commit(manifest.text().encode())
        return _mapped(cache / manifest.name, manifest)  # mapped files stay readable if somebody removes them


def _mapped(folder: Path, manifest: Manifest) -> dict[str, torch.Tensor]:
    columns = {}
    for name, (file, dtype, _) in manifest.columns.items():
        mapped = np.load(folder / file, mmap_mode="r")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that it cannot be written to
            columns[name] = torch.from_numpy(mapped).view(getattr(torch, dtype))
    return columns


def _header(rows: int, like: "np.ndarray[Any, Any]") -> bytes:
    """Return the header of a `.npy` file with the given number of rows."""
    header = io.BytesIO()
    description = {
        "descr": np.lib.format.dtype_to_descr(like.dtype),
        "fortran_order": False,
        "shape": (rows, *like.shape[1:]),
    }
    np.lib.format.write_array_header_1_0(header, description)
    return header.getvalue()


class PreparedReader:
    """Reads a prepared dataset.

    Args:
        prepared: the dataset.
        device: device of the batches.
    """

    window_rows = 1
    advice = None

    def __init__(self, prepared: PreparedSet, device: torch.device) -> None:
        self._prepared, self._device = prepared, device

    def rows(self) -> int:
        return self._prepared.manifest.rows

    def batches(self, part: WorkerPass) -> Iterator[Batch]:
        return self._columns.batches(part.rows(), part.sizes)

    @cached_property
    def _columns(self) -> ColumnReader:
        cache = Settings.read().cache / "prepared"
        store, max_bytes = Store(self._prepared.root), self._prepared.cache_bytes
        columns = load_columns(store, self._prepared.manifest, cache, max_bytes=max_bytes)
        return ColumnReader(columns, self._device)
