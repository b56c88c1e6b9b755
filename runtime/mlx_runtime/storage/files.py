"""Storages: folders and object stores, with the few operations that runs and prepared datasets need.

A root is a folder or a URI like `s3://bucket/runs?region=eu-west-1`, which a companion or another package opens.
"""

import abc
import contextlib
import errno
import json
import math
import os
import re
import shutil
import stat
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar
from urllib.parse import unquote, urlsplit

from mlx_runtime import companions
from mlx_runtime.errors import ConfigError, MlxError, StorageError, short_message
from mlx_runtime.storage.local import IrregularError, open_regular, write_atomic

T = TypeVar("T")

DOCUMENT_BYTES = 64 << 20
"""Maximum size of a document; the record of a sweep of 100,000 trials takes a third of it."""

SCHEMES = ("s3", "gs", "gcs", "abfs", "abfss", "hdfs", "viewfs")
"""URI schemes of the companion `stores`."""


def is_uri(root: str) -> bool:
    return "://" in root


def join_path(root: str, *parts: str) -> str:
    """Return a path or URI below a root. In a URI, the parts precede the options."""
    if not is_uri(root):
        return os.path.join(root, *parts)  # noqa: PTH118 - listings do this for each run
    base, options = split_options(root)
    return "/".join([base.rstrip("/"), *parts]) + options


def split_options(root: str) -> tuple[str, str]:
    """Split a URI into the part before its options, and the options with their `?`. Folders have no options."""
    if not is_uri(root):
        return root, ""
    base, mark, options = root.partition("?")
    return base, mark + options


class Stored(NamedTuple):
    """A file or folder in a listing."""

    path: str  # below the root of the storage
    size_bytes: int = 0  # 0 for a folder
    modified_s: float = 0.0  # seconds since 1970; 0 if unknown
    is_file: bool = True

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


class Storage(abc.ABC):
    """A folder or an object store. Methods raise OSError if it does not answer or refuses an operation.

    Each `*parts` is a path below the root, like `"digits", "run_001", "run.json"`; without parts, it is the root.

    Args:
        root: The folder or URI, as the user gave it.
        path: Path of the root in its file system, without a trailing slash.
    """

    local = False
    """True for a folder on this machine, which may be a network file system."""

    exclusive = True
    """False if `create_exclusively` raises a StorageError, so that runs cannot be taken over by another driver."""

    def __init__(self, root: str, path: str) -> None:
        self.root, self.path = root, path.rstrip("/")
        if not self.path:
            raise StorageError(f"cannot reach {root}: it names no folder")

    @abc.abstractmethod
    def listed(self, *parts: str, recursive: bool = False) -> list[Stored]:
        """Return the files and folders in a folder; an empty list if it does not exist."""

    @abc.abstractmethod
    def find(self, *parts: str) -> Stored | None:
        """Return a file or folder, or None if it does not exist."""

    @abc.abstractmethod
    def open(self, *parts: str) -> Any:
        """Open a seekable binary file for reading. Raises FileNotFoundError if it does not exist."""

    @abc.abstractmethod
    def create(self, *parts: str) -> BinaryIO:
        """Open a file for writing; on an object store, it exists only once it is complete and closed."""

    @abc.abstractmethod
    def create_exclusively(self, data: bytes, *parts: str) -> bool:
        """Create a file unless it exists. Of several simultaneous callers, exactly one gets True.

        Raises:
            StorageError: The storage has no such operation, so callers cannot know which one created the file.
        """

    @abc.abstractmethod
    def remove_file(self, *parts: str) -> None:
        """Remove a file if it exists."""

    @abc.abstractmethod
    def remove_folder(self, *parts: str) -> None:
        """Remove a folder with everything in it, without following links. Raises OSError if something is left."""

    def claim_folder(self, *parts: str) -> bool:
        """Create a folder unless it exists. Return True for at most one of several callers at the same instant."""
        mine = f".claim-{uuid.uuid4().hex}"
        self.write(b"", *parts, mine)
        # A listing includes all earlier writes, so at least one of two callers sees the other and backs off.
        if self.names(*parts) == [mine]:
            return True
        self.remove_file(*parts, mine)
        return False

    def retry(self, action: Callable[[], T]) -> T:
        """Return the result of an action, which an object store repeats after an outage."""
        return action()

    def of(self, *parts: str) -> str:
        """Return the path in the storage's file system, given parts below the root."""
        return "/".join([self.path, *parts])

    def below(self, *parts: str) -> list[Stored]:
        """Return all files in a folder and its subfolders."""
        return [item for item in self.listed(*parts, recursive=True) if item.is_file]

    def names(self, *parts: str) -> list[str]:
        """Return the names in a folder, sorted; an empty list if it does not exist."""
        return sorted(item.name for item in self.listed(*parts))

    def size_bytes(self, *parts: str) -> int | None:
        """Return the size of a file, or None if it does not exist."""
        found = self.find(*parts)
        return found.size_bytes if found is not None and found.is_file else None

    def copy(self, old: str, new: str) -> None:
        """Copy a file within the storage."""
        with self.open(old) as source, self.create(new) as target:
            shutil.copyfileobj(source, target, 1 << 20)

    def move(self, old: str, new: str) -> None:
        """Rename a folder; on an object store file by file."""
        for item in self.below(old):
            self.copy(item.path, f"{new}{item.path.removeprefix(old)}")
            self.remove_file(item.path)

    def read(self, *parts: str) -> bytes:
        with self.open(*parts) as stream:
            content: bytes = stream.read()
        return content

    def document(self, *parts: str) -> bytes:
        """Return the content of a small file; raise IrregularError if it is larger than `DOCUMENT_BYTES`."""
        with self.open(*parts) as stream:
            content: bytes = stream.read(1 << 16)
            if len(content) == 1 << 16:  # to read the limit at once would allocate as much, even for a small file
                content += stream.read(DOCUMENT_BYTES + 1 - len(content))
        if len(content) > DOCUMENT_BYTES:
            raise IrregularError(errno.EFBIG, f"it has more than {DOCUMENT_BYTES:,} bytes", self.of(*parts))
        return content

    def write(self, data: bytes, *parts: str) -> None:
        """Replace the content of a file so that readers see the old or the new content, never a part."""
        with self.create(*parts) as stream:
            stream.write(data)

    def upload(self, file: Path, *parts: str) -> None:
        """Copy a file on this machine to the storage."""
        with file.open("rb") as source, self.create(*parts) as target:
            shutil.copyfileobj(source, target, 1 << 20)

    def download(self, file: Path, *parts: str) -> None:
        """Copy a file from the storage to this machine."""
        file.parent.mkdir(parents=True, exist_ok=True)
        with self.open(*parts) as source, file.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)


class LocalStorage(Storage):
    """A folder on this machine, or a `file:` URI of one."""

    local = True

    def __init__(self, root: str) -> None:
        folder = unquote(urlsplit(root).path) if is_uri(root) else root
        super().__init__(root, os.path.realpath(os.path.expanduser(folder)))  # noqa: PTH111 - listings do this per run

    def listed(self, *parts: str, recursive: bool = False) -> list[Stored]:
        found, waiting = [], ["/".join(parts)]
        while waiting:
            folder = waiting.pop()
            try:
                entries = list(os.scandir(self.of(folder)))
            except (FileNotFoundError, NotADirectoryError):  # removed in the meantime
                continue
            for entry in entries:
                item = _entry(f"{folder}/{entry.name}".lstrip("/"), entry.stat)
                if item is not None:
                    found.append(item)
                    waiting += [item.path] if recursive and entry.is_dir(follow_symlinks=False) else []
        return found

    def find(self, *parts: str) -> Stored | None:
        return _entry("/".join(parts), Path(self.of(*parts)).stat)

    def names(self, *parts: str) -> list[str]:
        try:
            return sorted(os.listdir(self.of(*parts)))
        except FileNotFoundError:
            return []

    def open(self, *parts: str) -> BinaryIO:
        return open_regular(self.of(*parts))

    def create(self, *parts: str) -> BinaryIO:
        return open(self.of(*parts), "wb")  # noqa: PTH123

    def write(self, data: bytes, *parts: str) -> None:
        write_atomic(Path(self.of(*parts)), data)

    def create_exclusively(self, data: bytes, *parts: str) -> bool:
        try:
            with Path(self.of(*parts)).open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except FileExistsError:
            return False
        return True

    def claim_folder(self, *parts: str) -> bool:
        try:
            Path(self.of(*parts)).mkdir()
        except FileExistsError:
            return False
        return True

    def move(self, old: str, new: str) -> None:
        Path(self.of(old)).rename(self.of(new))

    def remove_file(self, *parts: str) -> None:
        Path(self.of(*parts)).unlink(missing_ok=True)

    def remove_folder(self, *parts: str) -> None:
        shutil.rmtree(self.of(*parts) if parts else self.path, onerror=_raise_unless_gone)


def _raise_unless_gone(function: Any, path: str, info: Any) -> None:
    """Continue a removal if another process has removed a file first; `info` is that of `sys.exc_info`."""
    if not isinstance(info[1], FileNotFoundError):
        raise info[1]


def _entry(path: str, facts_of: Callable[[], os.stat_result]) -> Stored | None:
    """Return the entry of a path on this machine, or None if it is missing or a link that leads nowhere."""
    try:
        facts = facts_of()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        return None
    is_file = stat.S_ISREG(facts.st_mode)
    return Stored(path, facts.st_size if is_file else 0, facts.st_mtime, is_file)


def storage_at(root: str) -> Storage:
    """Return the storage at a folder or URI.

    Other packages add URI schemes with entry points in the group `mlx_runtime.storages`: the name is the scheme, the
    object a subclass of `Storage` that takes the URI.

    Raises:
        StorageError: There is no storage for the URI, or it cannot be reached.
    """
    scheme = root.partition("://")[0] if is_uri(root) else "file"
    if scheme == "file":
        opened_by: Callable[[str], Storage] = LocalStorage
    elif scheme in SCHEMES:
        opened_by = companions.part("stores.object_store").ObjectStore
    else:
        opened_by = _of_others(root, scheme)
    try:
        return opened_by(root)
    except MlxError:
        raise
    except Exception as error:  # pyarrow raises many types of exceptions
        raise StorageError(f"cannot reach {root}: {short_message(error)}") from error


def _of_others(root: str, scheme: str) -> Callable[[str], Storage]:
    from importlib.metadata import entry_points  # here, because it takes as long as importing click

    for item in entry_points(group="mlx_runtime.storages", name=scheme):
        found: Callable[[str], Storage] = item.load()
        return found
    schemes = ", ".join(("file", *SCHEMES))
    raise StorageError(f"cannot reach {root}: there is no storage for {scheme}; use a folder, or a URI of {schemes}")


@contextlib.contextmanager
def storage_errors(problem: str) -> Iterator[None]:
    """Convert an OSError in the block to a StorageError that begins with the problem, like `cannot read s3://…`."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{problem}: {short_message(error)}") from error


def parent_of(root: str) -> tuple[Storage, str]:
    """Return the storage that a folder or URI is in, and its name there."""
    base, options = split_options(root)
    above, _, name = base.rstrip("/").rpartition("/")
    return storage_at((above or ("/" if base.startswith("/") else ".")) + options), name


def storage_root(storage_path: str) -> str:
    """Return `cfg.storage_path` as an absolute folder or a URI.

    Raises:
        ConfigError: It is empty, or the URI contains a key, which every record and dashboard would show.
    """
    if not storage_path.strip():
        raise ConfigError("cfg.storage_path is empty; name a folder or a URI")
    if is_uri(storage_path) and re.search(r"://[^/?]+@|(access_key|secret_key|session_token)=", storage_path):
        raise ConfigError(
            "cfg.storage_path holds a key; leave it out, and set it in the environment, like AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY"
        )
    try:
        return storage_path if is_uri(storage_path) else str(Path(storage_path).expanduser().resolve())
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(f"{storage_path!r:.200} cannot be the storage: {short_message(error)}") from error


def prepared_root(storage_path: str, prepared_path: str | None) -> str:
    """Return the folder or URI of prepared datasets: `cfg.preparation.path`, by default a folder in the storage."""
    return prepared_path or join_path(storage_root(storage_path), ".prepared")


def size_text(size_bytes: float) -> str:
    """Return a human-readable size, like `1.2 GB`."""
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if size_bytes < 1000 or unit == "TB":
            break
        size_bytes /= 1000
    return f"{size_bytes:,.0f} bytes" if unit == "bytes" else f"{size_bytes:,.1f} {unit}"


def to_json(value: Any) -> str:
    """Return JSON text that ends with a newline. NaN and infinity, which JSON lacks, become null."""
    return json.dumps(finite(value), indent=2) + "\n"


def finite(value: Any) -> Any:
    """Return plain values with None in place of NaN and infinity, which JSON lacks."""
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
