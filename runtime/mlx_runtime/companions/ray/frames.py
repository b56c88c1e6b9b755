"""Frames: what a command on a cluster prints and writes, as lines in the log of its job, where Ray merges all output.

A frame is a key, with which no other line of the log begins, and a JSON object:

    {"kind": "out", "data": DATA}                  bytes for stdout; `err` is for stderr
    {"kind": "file", "path": PATH, "data": DATA}   the next bytes of a file; the path is relative
    {"kind": "ask", "text": TEXT}                  a question to confirm, without whose answer the command does nothing
    {"kind": "exit", "code": CODE}                 the last frame

DATA is base64. Whoever can write to the log of the job can send frames, so `Reader` checks each.
"""

import base64
import io
import json
import os
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from mlx_runtime.errors import ClusterError
from mlx_runtime.settings import Settings
from mlx_runtime.storage.documents import stays_below

CHUNK_BYTES, LINE_BYTES, OTHER = 12_000, 1 << 20, 300
"""Maximum bytes in a frame that is sent, characters in a line that is read, and of the last line that is no frame."""

CONFIRMED = "MLX_CONFIRMED"
"""Variable with the question that the user has confirmed. Until the command reaches it, its frames are held back."""


class Frame(NamedTuple):
    kind: str
    text: str = ""  # path of a file, or a question
    data: bytes = b""
    code: int = 0


class Reader:
    """Finds the frames in a log that arrives in parts.

    Attributes:
        other: the last line that is no frame, such as an error of Ray.
    """

    def __init__(self, key: str) -> None:
        self._key, self._rest, self.other = f"{key} ", "", ""

    def feed(self, text: str) -> Iterator[Frame]:
        """Yield the frames that a part of the log completes. Raises ClusterError for a damaged one."""
        *lines, self._rest = (self._rest + text).split("\n")
        for line in (*lines, self._rest):
            if len(line) > LINE_BYTES:
                raise ClusterError(f"the cluster sent a line of more than {LINE_BYTES:,} characters")
        for line in lines:
            if line.startswith(self._key):
                yield _parse(line.removeprefix(self._key))
            elif line.strip():
                self.other = line.strip()[:OTHER]


def _parse(text: str) -> Frame:
    try:
        match json.loads(text):
            case {"kind": "out" | "err" as kind, "data": str(data)}:
                return Frame(kind, data=base64.b64decode(data, validate=True))
            case {"kind": "file", "path": str(path), "data": str(data)} if stays_below(path):
                return Frame("file", path, base64.b64decode(data, validate=True))
            case {"kind": "ask", "text": str(question)}:
                return Frame("ask", question)
            case {"kind": "exit", "code": int(code)} if 0 <= code <= 255:
                return Frame("exit", code=code)
    except (ValueError, RecursionError):
        pass
    raise ClusterError(f"the cluster sent an invalid frame: {text:.100}")


class Stream(io.RawIOBase):
    """Sends what is written to it as frames, in place of stdout or stderr."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        for start in range(0, len(content), CHUNK_BYTES):
            send(kind=self._kind, data=bytes(content[start : start + CHUNK_BYTES]))
        return len(content)


_held: list[str] | None = [] if CONFIRMED in os.environ else None


def send(**frame: Any) -> None:
    """Send a frame."""
    if "data" in frame:
        frame["data"] = base64.b64encode(frame["data"]).decode()
    line = f"{Settings.read().on} {json.dumps(frame)}\n"
    if _held is not None:
        _held.append(line)
    else:
        sys.__stdout__.write(line)  # type: ignore[union-attr]
        sys.__stdout__.flush()  # type: ignore[union-attr]


def send_file(path: str, content: bytes) -> None:
    """Send a file, or the next part of it."""
    for start in range(0, max(len(content), 1), CHUNK_BYTES):
        send(kind="file", path=path, data=content[start : start + CHUNK_BYTES])


def release(*, drop: bool = False) -> None:
    """Send the frames that were held back, or drop them, as an earlier job has sent the same."""
    global _held
    held, _held = _held or (), None
    if held and not drop:
        sys.__stdout__.write("".join(held))  # type: ignore[union-attr]
        sys.__stdout__.flush()  # type: ignore[union-attr]


def confirm(question: str) -> None:
    """Return if the user has confirmed this question; otherwise ask it, and end this process."""
    sys.stdout.flush()
    confirmed = os.environ.get(CONFIRMED) == question
    release(drop=confirmed)
    if not confirmed:
        send(kind="ask", text=question)
        sys.exit(1)
