"""Truncate append-only files of a run to a checkpoint, and rename a damaged `metrics.jsonl`."""

import contextlib
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from mlx_runtime.errors import StorageError
from mlx_runtime.runs.folder import RunFolder
from mlx_runtime.storage.documents import COUNT, from_json
from mlx_runtime.storage.files import storage_at, storage_errors
from mlx_runtime.storage.local import open_regular, write_atomic


def cut(
    folder: RunFolder, files: Iterable[Path], sizes: Mapping[str, int], step: int, warn: Callable[[str], object]
) -> None:
    """Truncate files to their sizes in a checkpoint at a global step, and remove those created after it.

    Each is replaced by a new file, because a driver that was wrongly considered dead may still have the old one open.

    Raises:
        StorageError: the run folder cannot be written.
    """
    with storage_errors(f"cannot write {folder.path}"):
        write_atomic(folder.metrics, _rows(folder, sizes.get(folder.metrics.name, 0), step, warn))
        for file in files:
            if file.name in sizes and file != folder.metrics:
                with open_regular(str(file)) as lines:
                    write_atomic(file, lines.read(sizes[file.name]))
            elif file != folder.metrics:
                file.unlink()
                if folder.uri is not None:
                    with contextlib.suppress(OSError, StorageError):
                        storage_at(folder.uri).remove_file(file.name)


def _rows(folder: RunFolder, size_bytes: int, step: int, warn: Callable[[str], object]) -> bytes:
    """Return the rows of metrics.jsonl up to a checkpoint. If some are damaged, rename the file, and warn."""
    file, content = folder.metrics, b""
    with contextlib.suppress(OSError), open_regular(str(file)) as stream:
        content = stream.read(size_bytes)
    rows = [line for line in content.splitlines(keepends=True) if _is_row(line, step)]
    kept = b"".join(rows)
    if len(kept) < size_bytes:
        aside = file.with_name(f"damaged_{file.name}_{uuid.uuid4().hex[:8]}")
        try:
            file.rename(aside)
            warn(
                f"{file.name} is damaged; it was renamed to {aside.name}, and its readable rows ({len(rows)}) are kept"
            )
        except FileNotFoundError:
            warn(f"{file.name} is missing, so the metrics of earlier epochs are lost")
    return kept


def _is_row(line: bytes, step: int) -> bool:
    with contextlib.suppress(ValueError):
        return bool(from_json(line, {"step": COUNT, "epoch": COUNT}, needs=("step", "epoch"))["step"] <= step)
    return False
