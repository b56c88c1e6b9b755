"""Files and folders in the storage as users name them; paths that lead outside it are refused."""

import os
from dataclasses import dataclass
from pathlib import Path

from mlx_runtime.errors import StorageError, UsageError, short_message, suggest
from mlx_runtime.storage.files import Storage, is_uri, joined


@dataclass(frozen=True)
class StoragePath:
    """A file or folder below the root of the storage.

    Attributes:
        root: folder or URI of the storage.
        parts: parts of the path below the root; empty for the root itself.
    """

    root: str
    parts: tuple[str, ...]

    @property
    def title(self) -> str:
        """Folder or URI for the user."""
        return joined(self.root, *self.parts)

    @property
    def path(self) -> str:
        """Path in the file system of the storage."""
        return Storage(self.root).of(*self.parts)

    @classmethod
    def parse(cls, root: str, text: str | None) -> "StoragePath":
        """Parse what a user typed.

        Args:
            root: root of the storage.
            text: a path below the root, or a full path or URI that leads into it; None for the root.

        Raises:
            UsageError: it lies outside the storage, or does not exist.
        """
        storage = Storage(root)
        parts = _local_parts(storage, text or "") if storage.local else _remote_parts(root, text or "")
        found = cls(root, parts)
        if not found._exists(storage):
            siblings = storage.names(*parts[:-1]) if parts else []
            suggestion = suggest(parts[-1], siblings) if parts and len(siblings) <= 1000 else ""
            raise UsageError(f"there is no {found.title}.{suggestion}")
        return found

    def _exists(self, storage: Storage) -> bool:
        if storage.local:
            return os.path.lexists(self.path)
        try:
            return bool(storage.fs.get_file_info(self.path).type.name != "NotFound")
        except OSError as error:
            raise StorageError(f"cannot read {storage.root}: {short_message(error)}") from error


def _local_parts(storage: Storage, text: str) -> tuple[str, ...]:
    """Return the parts of a path with links resolved, except in the last part, which may be a link itself."""
    if is_uri(text) and is_uri(storage.root):
        text = "/".join(_remote_parts(storage.root, text))
    elif is_uri(text):
        raise _outside(text, storage.path)
    root = Path(storage.path)
    path = root / Path(text).expanduser()
    if path.name == "..":
        path = path.resolve()
    real = path.parent.resolve() / path.name if path != root else root
    if not real.is_relative_to(root):
        raise _outside(text, storage.path)
    return real.relative_to(root).parts


def _remote_parts(root: str, text: str) -> tuple[str, ...]:
    path = text
    if is_uri(text):
        base, whole = root.partition("?")[0].rstrip("/"), text.partition("?")[0].rstrip("/")
        if whole != base and not whole.startswith(f"{base}/"):
            raise _outside(text, base)
        path = whole.removeprefix(base)
    elif text.startswith("/"):
        raise _outside(text, root)
    parts = tuple(part for part in path.split("/") if part not in ("", "."))
    if ".." in parts:
        raise _outside(text, root)
    return parts


def _outside(text: str, root: str) -> UsageError:
    return UsageError(f"{text} lies outside the storage {root}; MLX_STORAGE=FOLDER selects another storage")
