"""Compute the SHA-256 of files while they are written or read, so that nothing is read twice."""

import contextlib
import hashlib
import io
import os
from typing import Any, BinaryIO

READ_BYTES = 1 << 20


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

    def __enter__(self) -> "HashingWriter":
        return self

    def __exit__(self, *_: object) -> None:
        with self._file:
            self._file.flush()
            with contextlib.suppress(OSError, AttributeError, ValueError):  # an object store has no descriptor
                os.fsync(self._file.fileno())


class HashingReader(io.RawIOBase):
    """A seekable file that hashes the bytes it returns. Read errors, which callers may hide, are kept in `failure`.

    Hashing needs every byte in order. Readers of archives skip little and rarely seek back, so skipped bytes are read
    only for the hash; `finish` reads those at the end.
    """

    def __init__(self, file: Any) -> None:
        self._file, self._digest = file, hashlib.sha256()
        self.failure: OSError | None = None
        self._position = self._hashed = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = self._file.seek(offset, whence)
        return self._position

    def readinto(self, buffer: Any) -> int:
        try:
            if self._hashed < self._position <= self._hashed + READ_BYTES:
                self._hash_until(self._position)
            self._file.seek(self._position)
            size: int = self._file.readinto(buffer)
        except OSError as error:
            self.failure = error
            raise
        if self._position <= self._hashed < self._position + size:
            self._digest.update(memoryview(buffer)[self._hashed - self._position : size])
            self._hashed = self._position + size
        self._position += size
        return size

    def finish(self) -> tuple[str, int]:
        """Read the rest. Return the SHA-256 of the whole file, in hexadecimal, and its size in bytes."""
        self._hash_until(None)
        return self._digest.hexdigest(), self._hashed

    def _hash_until(self, stop: int | None) -> None:
        self._file.seek(self._hashed)
        while data := self._file.read(READ_BYTES if stop is None else min(READ_BYTES, stop - self._hashed)):
            self._digest.update(data)
            self._hashed += len(data)
