"""Publish folders atomically: whichever process is killed, readers find either the old or the new content.

In a folder on this machine, content is staged next to its target, which it replaces once it is complete:

    epoch_0004                  the target
    .epoch_0004.part-3f2a9c41   staged content, or its remains after a kill
    .epoch_0004.old-3f2a9c41    content that is being replaced; `recover` puts it back after a kill
    .epoch_0004.gone-3f2a9c41   content that is being removed

An object store cannot rename. There, files with unique names are written in place, and their folder is published
once its marker, the one file that names the others, exists; it is written last.
"""

import contextlib
import hashlib
import os
import re
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from mlx_runtime.storage.files import Storage
from mlx_runtime.storage.local import write_atomic

_LEFTOVER = re.compile(r"\.(?P<target>.+)\.(?P<kind>part|old|gone)-[0-9a-f]{4,}")


class Publication:
    """One attempt to publish a folder, as a context manager that removes its files unless `commit` was called.

    Args:
        storage: Storage that holds the folder directly below its root.
        name: Name of the folder.
        marker: Name of the file without which the folder is not considered published.
        in_place: Write files in place even if the storage could rename, for folders that several writers and
            readers share. Object stores always do.
    """

    def __init__(self, storage: Storage, name: str, marker: str, *, in_place: bool = False) -> None:
        self._storage, self._name, self._marker = storage, name, marker
        self.id = uuid.uuid4().hex[:8]  # differs from that of any other attempt
        self._staged = storage.local and not in_place
        self.folder = f".{name}.part-{self.id}" if self._staged else name
        self._files: list[str] = []
        self._committed = False

    def __enter__(self) -> "Publication":
        if self._storage.local:
            Path(self._storage.of(self.folder)).mkdir(parents=True, exist_ok=not self._staged)
        return self

    def unique(self, file: str) -> str:
        """Return a name for a file that no other attempt writes to, like `state-3f2a9c41.pt` for `state.pt`."""
        path = Path(file)
        return file if self._staged else f"{path.stem}-{self.id}{path.suffix}"

    def create(self, file: str) -> BinaryIO:
        """Open a new file of the folder for writing; its name is from `unique`."""
        self._files.append(file)
        return self._storage.create(self.folder, file)

    def expect(self, files: list[str]) -> None:
        """Add files that other processes write to `folder`; their names are from `unique`."""
        self._files += files

    def commit(self, marker: bytes) -> None:
        """Publish the folder, replacing an older one of the same name.

        Raises:
            OSError: The storage refuses it, or `recover` has run in the meantime.
        """
        self._storage.write(marker, self.folder, self._marker)
        if self._staged:
            old = f".{self._name}.old-{self.id}"
            replaces = _exists(self._storage, self._name)
            if replaces:
                self._storage.move(self._name, old)
            self._storage.move(self.folder, self._name)
            if replaces:
                with contextlib.suppress(OSError):  # `recover` removes leftovers
                    self._storage.remove_folder(old)
        self._committed = True

    def commit_first(self, marker: bytes) -> bool:
        """Publish a folder written in place, unless another attempt has already published it. Return True on success.

        On an object store, the last of two simultaneous attempts wins.
        """
        if self._storage.local:
            path = Path(self._storage.of(self._name, self._marker))
            whole = path.with_name(f".{path.name}.{self.id}")
            write_atomic(whole, marker)  # readers must never see a part of it
            try:
                os.link(whole, path)
                self._committed = True
            except FileExistsError:
                pass
            finally:
                whole.unlink()
        elif self._storage.size_bytes(self._name, self._marker) is None:
            self.commit(marker)
        return self._committed

    def remove_others(self) -> None:
        """Remove files that other attempts left in a folder written in place; no other attempt may still be running."""
        if not self._staged:
            for file in self._storage.names(self._name):
                if file not in (self._marker, *self._files):
                    self._storage.remove_file(self._name, file)

    def __exit__(self, *_: object) -> None:
        if self._committed:
            return
        with contextlib.suppress(OSError):
            if self._staged:
                recover(self._storage, self._name, lambda name: name.endswith(self.id))
            else:
                for file in self._files:
                    self._storage.remove_file(self._name, file)


def unpublish(storage: Storage, name: str, marker: str) -> None:
    """Remove a folder without ever leaving a partial one under its name. Raises OSError if something is left."""
    if storage.local:
        gone = f".{name}.gone-{uuid.uuid4().hex[:8]}"
        storage.move(name, gone)
        storage.remove_folder(gone)
    else:
        storage.remove_file(name, marker)
        storage.remove_folder(name)


def leftovers(storage: Storage, name: str | None = None) -> list[tuple[str, str, str]]:
    """Return the temporary folders next to all targets, or next to one: name, target and kind."""
    matches = filter(None, map(_LEFTOVER.fullmatch, storage.names() if storage.local else ()))
    return [(match[0], match["target"], match["kind"]) for match in matches if name in (None, match["target"])]


def recover(
    storage: Storage, name: str | None = None, abandoned: Callable[[str], bool] = lambda leftover: True
) -> None:
    """Clean up after killed attempts for one target, or for all: restore replaced content, and remove staged content.

    Leftovers are removed only if `abandoned` returns True for their names: nobody else may be writing to them.
    """
    for leftover, target, kind in leftovers(storage, name):
        if kind == "old" and not _exists(storage, target):
            storage.move(leftover, target)
        elif abandoned(leftover):
            with contextlib.suppress(OSError):
                storage.remove_folder(leftover)


def _exists(storage: Storage, name: str) -> bool:
    return Path(storage.of(name)).exists()


class HashingWriter:
    """A file that counts and hashes the bytes written to it. A `with` block writes it to disk and closes it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._digest = file, hashlib.sha256()
        self.size_bytes = 0

    def write(self, data: Any) -> int:
        self._file.write(data)
        self._digest.update(data)
        size = memoryview(data).nbytes
        self.size_bytes += size
        return size

    def flush(self) -> None:
        self._file.flush()

    @property
    def sha256(self) -> str:
        """SHA-256 of the written bytes, in hexadecimal."""
        return self._digest.hexdigest()

    def take_sha256(self) -> str:
        """Return the SHA-256 of the bytes written since the last call, if this is the only way in which it is used."""
        found, self._digest = self.sha256, hashlib.sha256()
        return found

    def __enter__(self) -> "HashingWriter":
        return self

    def __exit__(self, *_: object) -> None:
        with self._file:
            self._file.flush()
            with contextlib.suppress(OSError, AttributeError, ValueError):  # an object store has no descriptor
                os.fsync(self._file.fileno())


def sha256_of(file: BinaryIO) -> tuple[str, int]:
    """Return the SHA-256 of an open file, in hexadecimal, and its size in bytes; the file is then at its beginning."""
    digest = hashlib.sha256()
    while data := file.read(1 << 20):
        digest.update(data)
    size_bytes = file.tell()
    file.seek(0)
    return digest.hexdigest(), size_bytes
