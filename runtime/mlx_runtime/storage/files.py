"""Storages: a folder or an object store, with the few operations that runs and prepared datasets need.

A root is a folder or a URI like `s3://bucket/runs?region=eu-west-1`; the options after `?` are those of pyarrow's file
systems. Folders are accessed without pyarrow, so that commands that only look at runs start fast.
"""

import contextlib
import errno
import json
import math
import os
import re
import shutil
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from mlx_runtime.errors import ConfigError, StorageError, short_message
from mlx_runtime.storage.local import IrregularError, open_regular, opened, remove_tree, write_atomic

if TYPE_CHECKING:
    import pyarrow.fs


DOCUMENT_BYTES = 64 << 20
"""Maximum size of a document; the record of a sweep of 100,000 trials has a third of it."""

SCHEMES = ("file", "s3", "gs", "gcs", "abfs", "abfss", "hdfs", "viewfs")
"""Schemes of URIs whose file system pyarrow has."""


def is_uri(root: str) -> bool:
    return "://" in root


def joined(root: str, *parts: str) -> str:
    """Return a path or URI below a root: the parts go before the options of a URI."""
    if not is_uri(root):
        return os.path.join(root, *parts)  # noqa: PTH118 - listings do this for each run
    base, options = split_options(root)
    return "/".join([base.rstrip("/"), *parts]) + options


def split_options(root: str) -> tuple[str, str]:
    """Return a URI without its options, and the options with their `?`. A folder has none, whatever its name."""
    if not is_uri(root):
        return root, ""
    base, mark, options = root.partition("?")
    return base, mark + options


class Storage:
    """A folder or an object store. Its methods raise OSError if it does not answer or refuses an operation.

    Attributes:
        root: The folder or URI, as given.
        path: Path of the root in its file system.
        local: True for a folder on this machine, perhaps a shared one.

    Raises:
        StorageError: There is no file system for such a URI.
    """

    def __init__(self, root: str) -> None:
        self.root = root
        self.local = not is_uri(root) or root.startswith("file:")
        path = root
        try:
            if is_uri(root):
                import pyarrow.fs

                self.fs, path = pyarrow.fs.FileSystem.from_uri(root)
            else:
                path = os.path.realpath(os.path.expanduser(root))  # noqa: PTH111 - listings do this for each run
        except Exception as error:  # pyarrow raises many types of exceptions
            scheme, why = root.partition(":")[0], short_message(error)
            if is_uri(root) and scheme not in SCHEMES:
                why = f"there is no storage for {scheme}; use a folder, or a URI of {', '.join(SCHEMES)}"
            raise StorageError(f"cannot reach {root}: {why}") from error
        self.path = path.rstrip("/")
        if not self.path:
            raise StorageError(f"cannot reach {root}: it names no folder")

    @cached_property
    def fs(self) -> "pyarrow.fs.FileSystem":
        import pyarrow.fs

        return pyarrow.fs.LocalFileSystem()

    def of(self, *parts: str) -> str:
        """Return a path below the root, as its file system names it."""
        return "/".join([self.path, *parts])

    def listed(self, *parts: str, recursive: bool = False) -> "list[pyarrow.fs.FileInfo]":
        """Return the files and folders in a folder; nothing if there is none."""
        import pyarrow.fs

        selector = pyarrow.fs.FileSelector(self.of(*parts), allow_not_found=True, recursive=recursive)
        return list(self.fs.get_file_info(selector))

    def below(self, *parts: str) -> "list[pyarrow.fs.FileInfo]":
        """Return all files in a folder and its subfolders."""
        return [info for info in self.listed(*parts, recursive=True) if info.is_file]

    def names(self, *parts: str) -> list[str]:
        """Return the names in a folder, sorted; nothing if there is none."""
        if not self.local:
            return sorted(info.base_name for info in self.listed(*parts))
        try:
            return sorted(os.listdir(self.of(*parts)))
        except FileNotFoundError:
            return []

    def size_bytes(self, *parts: str) -> int | None:
        """Return the size of a file, or None if there is none."""
        if not self.local:
            info = self.fs.get_file_info(self.of(*parts))
            return info.size if info.is_file else None
        path = Path(self.of(*parts))
        return path.stat().st_size if path.is_file() else None

    def open(self, *parts: str) -> Any:
        """Open a file for reading; it is seekable."""
        if not self.local:
            return self.fs.open_input_file(self.of(*parts))
        return open_regular(self.of(*parts))

    def create(self, *parts: str) -> BinaryIO:
        """Open a file for writing; on an object store it appears once it is closed."""
        stream: BinaryIO = open(self.of(*parts), "wb") if self.local else self.fs.open_output_stream(self.of(*parts))  # noqa: PTH123, SIM115
        return stream

    def read(self, *parts: str) -> bytes:
        with self.open(*parts) as stream:
            content: bytes = stream.read()
        return content

    def document(self, *parts: str) -> bytes:
        """Return the content of a file that is small unless somebody has replaced it; else raise IrregularError."""
        with self.open(*parts) as stream:
            content: bytes = stream.read(DOCUMENT_BYTES + 1)
        if len(content) > DOCUMENT_BYTES:
            raise IrregularError(errno.EFBIG, f"it has more than {DOCUMENT_BYTES:,} bytes", self.of(*parts))
        return content

    def write(self, data: bytes, *parts: str) -> None:
        """Replace the content of a file so that readers see the old or the new content, never a part."""
        if self.local:
            write_atomic(Path(self.of(*parts)), data)
        else:
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

    def move(self, old: str, new: str) -> None:
        """Rename a folder; on an object store file by file."""
        if self.local:
            Path(self.of(old)).rename(self.of(new))
        else:
            for name in self.names(old):
                self.fs.move(self.of(old, name), self.of(new, name))

    def remove_file(self, *parts: str) -> None:
        """Remove a file if there is one."""
        with contextlib.suppress(FileNotFoundError):
            if self.local:
                os.unlink(self.of(*parts))  # noqa: PTH108 - like `open`
            else:
                self.fs.delete_file(self.of(*parts))

    def remove_folder(self, *parts: str) -> None:
        """Remove a folder with everything in it, without following links. Raises OSError if something is left."""
        with contextlib.suppress(FileNotFoundError):
            if not self.local:
                self.fs.delete_dir(self.of(*parts))
                return
            with opened(self.path, *parts[:-1]) if parts else opened(str(Path(self.path).parent)) as above:
                error = remove_tree(parts[-1] if parts else Path(self.path).name, above)
            if error is not None:
                raise error


@contextlib.contextmanager
def storage_errors(problem: str) -> Iterator[None]:
    """Raise an OSError of the block as a StorageError that begins with the problem, like `cannot read s3://…`."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{problem}: {short_message(error)}") from error


def parent_of(root: str) -> tuple[Storage, str]:
    """Return the storage that a folder or URI is in, and its name there."""
    base, options = split_options(root)
    above, _, name = base.rstrip("/").rpartition("/")
    return Storage((above or ("/" if base.startswith("/") else ".")) + options), name


def storage_root(storage_path: str) -> str:
    """Return the absolute folder or the URI that `cfg.storage_path` names.

    Raises:
        ConfigError: It is empty, or the URI holds a key, which every record and dashboard would show.
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
    return prepared_path or joined(storage_root(storage_path), ".prepared")


def size_text(size_bytes: float) -> str:
    """Return a human-readable size, like `1.2 GB`."""
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if size_bytes < 1000 or unit == "TB":
            break
        size_bytes /= 1000
    return f"{size_bytes:,.0f} bytes" if unit == "bytes" else f"{size_bytes:,.1f} {unit}"


def to_json(value: Any) -> str:
    """Return JSON text that ends with a newline. NaN and infinity, which JSON lacks, become null."""
    return json.dumps(_finite(value), indent=2) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
