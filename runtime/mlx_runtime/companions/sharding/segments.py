"""Files that are read in parts, with a SHA-256 per segment that verifies each part."""

import hashlib
from collections.abc import Sequence
from typing import Any, BinaryIO

from mlx_runtime.storage.publishing import HashingWriter

SEGMENT_BYTES = 8 << 20
"""Size of a segment; the last one of a file may be smaller."""


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
