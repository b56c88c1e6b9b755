"""Compute the SHA-256 of files while they are written or read, so that nothing is read twice.

Files that are read as a whole have one. Files that are read in parts have one per block, to verify each part.
"""

import contextlib
import hashlib
import io
import os
from collections.abc import Sequence
from typing import Any, BinaryIO

READ_BYTES = 1 << 20

SEGMENT_BYTES = 8 << 20
"""Size of the segments that are verified one by one; the last block of a file may be smaller."""


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


class SegmentWriter(HashingWriter):
    """A `HashingWriter` that hashes each segment on its own."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        self._finished: list[str] = []  # hashes of complete segments

    def write(self, data: Any) -> int:
        whole = memoryview(data).cast("B")
        rest = whole
        while rest.nbytes:
            part = rest[: SEGMENT_BYTES - self.size_bytes % SEGMENT_BYTES]
            rest = rest[super().write(part) :]
            if self.size_bytes % SEGMENT_BYTES == 0:
                self._finished.append(self._digest.hexdigest())
                self._digest = hashlib.sha256()
        return whole.nbytes

    @property
    def digests(self) -> list[str]:
        """SHA-256 of each segment of the written bytes, in hexadecimal."""
        return [*self._finished, self.sha256] if self.size_bytes % SEGMENT_BYTES else [*self._finished]


class SegmentReader:
    """Reads parts of a seekable file, and verifies the SHA-256 of their digests."""

    def __init__(self, file: Any, digests: Sequence[str]) -> None:
        self._file, self._digests = file, digests
        self._number, self._content = -1, memoryview(b"")

    def read_into(self, target: memoryview, start: int) -> None:
        """Fill a buffer with the bytes from `start` on.

        Raises:
            ValueError: the file is too short, or its content has changed.
        """
        while target.nbytes:
            number, offset = divmod(start, SEGMENT_BYTES)
            if number != self._number:
                self._number, self._content = number, self._segment(number)
            part = self._content[offset : offset + target.nbytes]
            if not part.nbytes:
                raise ValueError(f"it ends before byte {start:,}")
            target[: part.nbytes] = part
            target, start = target[part.nbytes :], start + part.nbytes

    def _segment(self, number: int) -> memoryview:
        self._file.seek(number * SEGMENT_BYTES)
        content = self._file.read(SEGMENT_BYTES)
        if number >= len(self._digests) or hashlib.sha256(content).hexdigest() != self._digests[number]:
            raise ValueError("its SHA-256 is not the one it was saved with")
        return memoryview(content)


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
