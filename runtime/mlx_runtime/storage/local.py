"""Files on this machine: replaced atomically, removed without following links."""

import contextlib
import errno
import fcntl
import hashlib
import os
import stat
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO


class IrregularError(OSError):
    """The file is not a document: it is a pipe, a device, or huge."""


def write_atomic(path: Path, content: str | bytes, allowed: Callable[[], None] = lambda: None) -> None:
    """Replace the content of a file so that readers see the old or the new content, never a part.

    `allowed` is called before the new file is renamed, and raises to keep the old one. A new file that another process
    removes with `discard_unfinished` after that call can no longer be renamed.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        with temporary.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        allowed()
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def regular(path: str, flags: int) -> int:
    """Opener for `open` that raises IrregularError for a pipe or a device, which could block forever."""
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket, or a pipe that nobody reads
            raise IrregularError(errno.EINVAL, "it is not a regular file", path) from error
        raise
    kind = os.fstat(descriptor).st_mode
    if stat.S_ISREG(kind) or stat.S_ISDIR(kind):  # `open` refuses folders
        return descriptor
    os.close(descriptor)
    raise IrregularError(errno.EINVAL, "it is not a regular file", path)


def open_regular(path: str) -> BinaryIO:
    """Open a regular file for reading."""
    return open(path, "rb", opener=regular)


def read_regular(file: Path, kind: type[Exception]) -> bytes:
    """Return the content of a user's file; raise an error of this kind if it is a pipe, a device or a folder."""
    try:
        with open_regular(str(file)) as stream:
            return stream.read()
    except (IrregularError, IsADirectoryError) as error:
        raise kind(f"{file} is not a regular file") from error


def discard_unfinished(path: Path) -> None:
    """Remove the temporary files of unfinished calls to `write_atomic` for a file."""
    for temporary in path.parent.glob(f".{path.name}.*"):
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def one_at_a_time(folder: Path, subject: str) -> Iterator[None]:
    """Let one process on this machine at a time run the block for a subject, with a lock in a folder.

    If the folder cannot be written, processes do not wait for each other.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"{hashlib.sha256(subject.encode()).hexdigest()[:16]}.lock"
            fcntl.flock(stack.enter_context(path.open("w")), fcntl.LOCK_EX)
        yield
