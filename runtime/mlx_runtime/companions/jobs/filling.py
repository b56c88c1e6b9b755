"""A folder in the storage that one job fills, completely or not at all.

<storage>/data/
    digits/                appears when the job is done; job.json records what created it
    .digits.part-3f2a9c41  while the job runs; after a kill, the next job removes it

On an object store, the result of an earlier job is removed first, files are written in place, and the folder is
complete when the status in its `job.json` is SUCCEEDED.
"""

import contextlib
import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from mlx_runtime.errors import StorageError, UsageError
from mlx_runtime.runs import records
from mlx_runtime.storage import leases
from mlx_runtime.storage.documents import now
from mlx_runtime.storage.files import Storage, parent_of, storage_at, to_json
from mlx_runtime.storage.local import IrregularError
from mlx_runtime.storage.publishing import Publication, leftovers, recover

JOBS = ".jobs"
"""Folder in the storage with the records and logs of data jobs."""

RECORD = "job.json"
"""Name of the file that records the job of a folder, and whether the folder is complete."""


class Output:
    """The folder that a data job fills, in a folder or on an object store.

    The methods of `Storage` that read work as well. Any task on any node may write files.

    Args:
        root: Folder, which must exist, or URI.
    """

    def __init__(self, root: str) -> None:
        self._storage = storage_at(root)
        self.written: list[str] = []  # paths of the files written by this object
        self.opaque = False  # other files may have been written, too

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # as when it is unpickled
            raise AttributeError(name)
        self.opaque = self.opaque or name in ("path", "root")
        return getattr(self._storage, name)

    @property
    def folder(self) -> Path:
        """The folder itself, for plain `open(...)` and libraries that need a path.

        Raises:
            UsageError: The output is on an object store, which has no folders; use `write`, `create` or `upload`.
            StorageError: The folder does not exist on this node.
        """
        if not self._storage.local:
            raise UsageError(
                f"{self._storage.root} is not a folder on this machine; use self.output.write, .create or .upload"
            )
        self.check_visible()
        self.opaque = True
        return Path(self._storage.path)

    def write(self, data: bytes | str, *parts: str) -> None:
        """Store a file atomically.

        Args:
            data: Content of the file.
            parts: Path below the output, like `"train", "shard_000.npy"`; folders are created.

        Raises:
            StorageError: The folder of the output does not exist on this node.
            OSError: The storage refuses the write.
        """
        self._make_folders(parts)
        self._storage.write(data.encode() if isinstance(data, str) else data, *parts)

    def create(self, *parts: str) -> BinaryIO:
        """Open a file of the output for writing; otherwise like `write`."""
        self._make_folders(parts)
        return self._storage.create(*parts)

    def upload(self, file: Path, *parts: str) -> None:
        """Copy a file on this node to the output; otherwise like `write`."""
        self._make_folders(parts)
        self._storage.upload(file, *parts)

    def _make_folders(self, parts: Sequence[str]) -> None:
        self.written.append("/".join(Path(*parts).parts))
        if self._storage.local:
            self.check_visible()
            folder = Path(self._storage.path)
            for name in Path(*parts).parts[:-1]:  # never the output itself, which is gone after the end of the job
                folder /= name
                folder.mkdir(exist_ok=True)

    def check_visible(self) -> None:
        if not Path(self._storage.path).is_dir():
            raise StorageError(
                f"{os.uname().nodename} does not see {self._storage.path}; the storage must be a folder that all nodes "
                "share, or an object store: set cfg.storage_path or MLX_STORAGE"
            )


class Filling:
    """A folder in the storage that one job is filling, as a context manager: only `commit` publishes it.

    Methods raise OSError if the storage refuses an operation.

    Args:
        location: Folder or URI.
        overwrite: Replace the result of an earlier job.
        adopt: Id of a job that has ended and left its unfinished content, with which this one starts if it is there.
        facts: Further fields of `job.json`.

    Raises:
        UsageError: The folder exists, or another job is filling it.
    """

    def __init__(self, location: str, *, overwrite: bool, adopt: str | None = None, **facts: Any) -> None:
        self._location, self._overwrite = location, overwrite
        self._target = storage_at(location)
        self._above, name = _parent(self._target)
        recover(self._above, name, lambda leftover: False)
        refuse_present(location, overwrite=overwrite)
        if self._above.local:
            Path(self._above.path).mkdir(parents=True, exist_ok=True)
            left = f".{name}.part-{adopt}"
            recover(self._above, name, lambda leftover: leftover != left and self._is_abandoned(leftover))
        else:
            self.adopted = adopt is not None and (job_record(self._target) or {}).get("filling") == adopt
            self._target.remove_file(RECORD)  # the existing content is no longer valid
            if not self.adopted:
                self._target.remove_folder()
        self._publication = Publication(self._above, name, RECORD)
        self._facts = leases.this_process() | facts | {"status": "RUNNING", "filling": self._publication.id}
        self._publication.__enter__()
        if self._above.local:
            self.adopted = adopt is not None and self._adopt(left)
        self.output = Output(str(Path(self._above.path, self._publication.folder)) if self._above.local else location)
        self.kept = False  # leave the content for another job if this one fails
        self._committed = False
        self._lock = threading.Lock()
        self._heartbeat = contextlib.ExitStack()
        self._write_record()

    @property
    def id(self) -> str:
        """Id in the `job.json` of the folder."""
        return self._publication.id

    def __enter__(self) -> "Filling":
        self._heartbeat.enter_context(leases.heartbeat(self._beat))
        return self

    def commit(self) -> tuple[int, int]:
        """Publish the folder, unless another job has filled it. Return the number and total bytes of its files."""
        if not self._is_ours() or (self._target.local and not self._overwrite and Path(self._target.path).exists()):
            raise UsageError(f"another job has filled {self._location} in the meantime; this output is discarded")
        self._heartbeat.close()
        files = [file for file in self.output.below() if file.name != RECORD]
        size = sum(file.size_bytes for file in files)
        self._facts |= {"status": "SUCCEEDED", "end": now(), "files": len(files), "size_bytes": size}
        self._publication.commit(self._new_record())
        self._committed = True
        return len(files), size

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self._heartbeat.close()
        if not self.kept:
            self._publication.__exit__()
        if not self._committed and (self.kept or not self._target.local):
            with contextlib.suppress(OSError):  # the storage may be what failed
                if self._is_ours():
                    stopped = isinstance(error, KeyboardInterrupt)
                    self._facts |= {"status": "STOPPED" if stopped else "FAILED", "end": now()}
                    self._write_record()

    def _adopt(self, leftover: str) -> bool:
        """Take the content of an earlier job. Only one of several jobs can rename it."""
        try:
            self._above.move(leftover, self._publication.folder)
        except FileNotFoundError:
            return False
        return True

    def _new_record(self) -> bytes:
        self._facts["heartbeat"] = now()
        return to_json(self._facts).encode()

    def _write_record(self) -> None:
        with self._lock:
            self.output.write(self._new_record(), RECORD)

    def _beat(self) -> None:
        with contextlib.suppress(OSError, StorageError):  # the next write of the job reports the problem
            if self._is_ours():
                self._write_record()

    def _is_ours(self) -> bool:
        """Return False if another job has begun to fill the same folder of an object store."""
        if self._target.local:
            return True
        record = job_record(self._target)
        return record is not None and bool(record.get("filling") == self._facts["filling"])

    def _is_abandoned(self, leftover: str) -> bool:
        """Return False if a job fills the folder, or may have created it just now without a record yet."""
        folder = Path(self._above.of(leftover))
        if record := job_record(self._above, leftover):
            return job_status(record) not in records.LIVING
        with contextlib.suppress(FileNotFoundError):
            return time.time() - folder.stat().st_mtime > leases.STALE_S
        return False


def refuse_present(location: str, *, overwrite: bool) -> None:
    """Raise UsageError if another job is filling a folder, or if it exists and may not be replaced.

    With `overwrite`, the result of an earlier data job may be replaced.
    """
    target = storage_at(location)
    filler = _filler(target)
    if filler is not None:
        raise UsageError(
            f"{location} is being filled by {leases.holder(filler)}; wait for it, or choose another cfg.path"
        )
    if not (Path(target.path).exists() if target.local else target.names()):
        return
    record = job_record(target)
    if record is None:
        raise UsageError(
            f"{location} already exists, and no data job made it; choose another cfg.path, or move it away"
        )
    if not overwrite and (target.local or job_status(record) == "SUCCEEDED"):
        raise UsageError(
            f"{location} already exists, made {str(record.get('end'))[:10]}; replace it with cfg.overwrite=true, or "
            "choose another cfg.path"
        )


def job_status(record: Mapping[str, Any]) -> str:
    """Return RUNNING SUCCEEDED FAILED STOPPED, or STALE if the job died, from the `job.json` of a folder."""
    return records.status_of(record) if "heartbeat" in record else "FAILED"


def job_record(storage: Storage, *parts: str) -> dict[str, Any] | None:
    """Return the content of the `job.json` of a folder, or None without a readable one."""
    try:
        return records.parse_record(storage.document(*parts, RECORD))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, IrregularError, ValueError):
        return None


def _filler(target: Storage) -> dict[str, Any] | None:
    """Return the record of the job that is filling a folder, or has just ended."""
    above, name = _parent(target)
    folders = [name, *(leftover for leftover, _, _ in leftovers(above, name))]
    found = (job_record(above, folder) for folder in folders)
    return next((record for record in found if record and job_status(record) in records.LIVING), None)


def _parent(target: Storage) -> tuple[Storage, str]:
    return parent_of(target.path if target.local else target.root)
