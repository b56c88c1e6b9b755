"""Columns of prepared datasets: written batch by batch, mapped into memory, read in batches.

If they are in an object store, workers first copy the files to a folder on their machine.
"""

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mlx_runtime.companions.prepared.store import MANIFEST, Manifest, PreparedSet, Store
from mlx_runtime.data.batches import Batch, device_copies, dtype_name
from mlx_runtime.data.sampling import WorkerPass
from mlx_runtime.errors import StorageError
from mlx_runtime.settings import Settings
from mlx_runtime.storage import documents
from mlx_runtime.storage.files import storage_errors
from mlx_runtime.storage.local import one_at_a_time
from mlx_runtime.storage.publishing import Publication, recover

CHUNK_BYTES = 1 << 20
"""Number of bytes gathered at once: one gather serves many small batches, and a chunk fits in the cache of a CPU."""

_STAND_INS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types in place of types that NumPy lacks, by bytes per element."""


def as_numpy(column: torch.Tensor) -> "np.ndarray[Any, Any]":
    """Return a tensor as stored: in C order, with types that NumPy lacks as integers of the same size."""
    column = column.detach().cpu().contiguous()
    try:
        return column.numpy()
    except TypeError:
        return column.view(_STAND_INS[column.element_size()]).numpy()


class ColumnWriter:
    """Writer of a prepared dataset, batch by batch of rows in order; see `column_writer`."""

    def __init__(self, store: Store, publication: Publication, manifest: Manifest, streams: Mapping[str, Any]) -> None:
        self._store, self._publication, self._manifest, self._streams = store, publication, manifest, streams

    def write(self, batch: Batch) -> None:
        """Append rows."""
        with storage_errors(f"cannot write a prepared dataset to {self._store.root}"):
            for column, data in batch.items():
                self._streams[column].write(as_numpy(data))

    def commit(self) -> Manifest:
        """Publish the dataset. Return its manifest, or that of a faster writer."""
        with storage_errors(f"cannot write a prepared dataset to {self._store.root}"):
            size_bytes = sum(stream.tell() for stream in self._streams.values())
            for stream in self._streams.values():
                stream.close()
            manifest = dataclasses.replace(self._manifest, size_bytes=size_bytes, created=documents.now())
            if not self._publication.commit_first(manifest.text().encode()):
                present = self._store.find(manifest.name)
                if present is not None:
                    return present
                self._publication.commit(manifest.text().encode())  # files of the previous attempt are damaged
        return manifest


@contextlib.contextmanager
def column_writer(store: Store, manifest: Manifest, like: Batch, attempt: str) -> Iterator[ColumnWriter]:
    """Provide the writer of a prepared dataset, which cannot be found before `commit`.

    It is removed if `commit` is not called. Each writer of a dataset has its own files; the first to commit wins.

    Args:
        store: Store to write to.
        manifest: Description of the dataset, still without its columns.
        like: A batch of any length with the names, types and shapes of the columns.
        attempt: From `Store.attempt`, which removes the files of a writer that was killed.

    Raises:
        StorageError: The storage refuses an operation; also raised by the writer.
    """
    publication, streams = Publication(store.storage, manifest.name, MANIFEST, in_place=True), dict[str, Any]()
    columns = {
        column: (f"{attempt}-{publication.id}-{index}.npy", dtype_name(tensor), tuple(tensor.shape[1:]))
        for index, (column, tensor) in enumerate(like.items())
    }
    with contextlib.ExitStack() as stack:
        with storage_errors(f"cannot write a prepared dataset to {store.root}"):
            stack.enter_context(publication)
            for column, (file, _, shape) in columns.items():
                stream = streams[column] = publication.create(file)
                stack.callback(_close, stream)
                dtype = np.lib.format.dtype_to_descr(as_numpy(like[column]).dtype)
                header = {"descr": dtype, "fortran_order": False, "shape": (manifest.rows, *shape)}
                np.lib.format.write_array_header_1_0(stream, header)
        yield ColumnWriter(store, publication, dataclasses.replace(manifest, columns=columns), streams)


def _close(stream: Any) -> None:
    with contextlib.suppress(OSError):
        stream.close()


class PreparedReader:
    """Reader of a prepared dataset. The batches of a chunk are disjoint parts of its memory, which they keep alive."""

    window_rows = 1

    def __init__(self, prepared: PreparedSet, device: torch.device) -> None:
        self._prepared, self._device = prepared, device

    def rows(self) -> int:
        return self._prepared.manifest.rows

    def batches(self, part: WorkerPass, prefetch: int | None = None) -> Iterator[Batch]:
        columns, sizes = self._columns, part.sizes
        row_bytes = sum(column[0].numel() * column.element_size() for column in columns.values())
        per_chunk = max(1, CHUNK_BYTES // max(1, row_bytes * max(sizes, default=1)))
        groups = [sizes[first : first + per_chunk] for first in range(0, len(sizes), per_chunk)]
        chunks, on_gpu = self._chunks(part.rows(), groups), self._device.type == "cuda"
        for group, chunk in zip(groups, chunks, strict=True):
            moved = device_copies(self._device)(chunk) if on_gpu else chunk
            parts = [torch.split(column, group) for column in moved.values()]
            for batch in zip(*parts, strict=True):
                yield dict(zip(columns, batch, strict=True))

    def _chunks(self, rows: torch.Tensor, groups: list[list[int]]) -> Iterator[Batch]:
        """Yield the rows of each group of batches, in pinned memory if they are for a GPU."""
        for of_chunk in torch.split(rows, [sum(group) for group in groups]):
            yield {name: self._gather(column, of_chunk) for name, column in self._columns.items()}

    @cached_property
    def _columns(self) -> dict[str, torch.Tensor]:
        cache = Settings.read().cache / "prepared"
        store, max_bytes = Store(self._prepared.root), self._prepared.max_bytes
        return load_columns(store, self._prepared.manifest, cache, max_bytes=max_bytes)

    def _gather(self, column: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        if self._device.type == "cpu":
            return column.index_select(0, rows)
        pinned = torch.empty((len(rows), *column.shape[1:]), dtype=column.dtype, pin_memory=True)
        torch.index_select(column, 0, rows, out=pinned)
        return pinned


def load_columns(store: Store, manifest: Manifest, cache: Path, *, max_bytes: float) -> dict[str, torch.Tensor]:
    """Return the columns of a prepared dataset, {name: (rows, ...)}, mapped into memory. They are read-only.

    Files in an object store are first copied to `cache`, which keeps at most `max_bytes`.
    """
    try:
        if store.storage.local:
            return _map_columns(Path(store.storage.of(manifest.name)), manifest)
        return _copy_columns(store, manifest, cache, max_bytes)
    except (OSError, ValueError, TypeError, RuntimeError) as error:  # raised by numpy and torch for invalid files
        raise StorageError(
            f"the prepared dataset {manifest.name} in {store.root} cannot be read: {error}. "
            "Is it visible from every node? --no-prepared reads samples instead"
        ) from error


def _copy_columns(store: Store, manifest: Manifest, cache: Path, max_bytes: float) -> dict[str, torch.Tensor]:
    """Return the columns of a copy on this machine; of several processes, one fetches it while the others wait."""
    copies = Store(str(cache))
    with one_at_a_time(cache / ".locks", manifest.name):
        if copies.find(manifest.name) == manifest:
            copies.note_use(manifest.name)
        else:
            recover(copies.storage, manifest.name)
            copies.clean(max(0.0, max_bytes - manifest.size_bytes))
            with Publication(copies.storage, manifest.name, MANIFEST) as publication:
                for file, _, _ in manifest.columns.values():
                    store.storage.download(cache / publication.folder / file, manifest.name, file)
                publication.commit(manifest.text().encode())
        return _map_columns(cache / manifest.name, manifest)  # mapped files stay readable if somebody removes them


def _map_columns(folder: Path, manifest: Manifest) -> dict[str, torch.Tensor]:
    columns = {}
    for name, (file, dtype, _) in manifest.columns.items():
        if not isinstance(kind := getattr(torch, dtype, None), torch.dtype):
            raise ValueError(f"{name} is of the unknown type {dtype!r:.40}")
        mapped = np.load(folder / file, mmap_mode="r")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the array is not writable
            columns[name] = torch.from_numpy(mapped).view(kind)
    return columns
