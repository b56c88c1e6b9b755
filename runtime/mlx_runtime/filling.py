"""A folder of the storage that one job fills, whole or not at all.

<storage>/data/
    digits/            appears when the job is done; job.json says what made it
    .digits.part-3f2a  while it works; what a killed job left is removed by the next one

An object store cannot rename a folder, so there files are written where they belong, and the folder is whole once its
`job.json` says SUCCEEDED. Nothing that was written before counts until then.
"""

import contextlib
import os
import shutil
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from mlx_runtime import registry
from mlx_runtime.errors import StorageError, UsageError
from mlx_runtime.storage import Storage, to_json

RECORD = "job.json"
"""Name of the file that says what made a folder, and whether it is whole."""

PART, OLD = ".part-", ".old-"
"""What folders are named by that a job is filling, and that it replaces."""


class Output(Storage):
    """The folder that a data job fills, in a folder or on an object store alike.

    What `Storage` offers for reading works as well. Files may be written by any task on any node.

    Args:
        root: folder or URI; the folder must exist.
    """

    @property
    def folder(self) -> Path:
        """The folder itself, for plain `open(...)` and libraries that want a path.

        Raises:
            UsageError: it is on an object store, which has no folders; use `write`, `create` or `upload`.
            StorageError: this node does not see it.
        """
        if not self.local:
            raise UsageError(f"{self.root} is no folder of this machine; use self.output.write, .create or .upload")
        self._must_be_seen()
        return Path(self.path)

    def write(self, data: bytes | str, *parts: str) -> None:
        """Store a file: all of it or nothing.

        Args:
            data: its content.
            parts: its path below the output, like `"train", "shard_000.npy"`; folders are made.

        Raises:
            StorageError: this node does not see the output.
            OSError: the storage does not take it.
        """
        self._make_room(parts)
        super().write(data.encode() if isinstance(data, str) else data, *parts)

    def upload(self, file: Path, *parts: str) -> None:
        """Copy a file of this machine here."""
        self._make_room(parts)
        super().upload(file, *parts)

    def create(self, *parts: str) -> BinaryIO:
        """A file to write to."""
        self._make_room(parts)
        return super().create(*parts)

    def _make_room(self, parts: Sequence[str]) -> None:
        if self.local:
            self._must_be_seen()
            folder = Path(self.path)
            for name in Path(*parts).parts[:-1]:  # never the output itself: a job that has ended took it away
                folder /= name
                folder.mkdir(exist_ok=True)

    def _must_be_seen(self) -> None:
        if not Path(self.path).is_dir():
            raise StorageError(
                f"{os.uname().nodename} does not see {self.path}; the storage must be a folder that all nodes share, "
                "or an object store: set cfg.storage_path or MLX_STORAGE"
            )


class Filling:
    """A folder of the storage that one job is filling, as a context manager: only `commit` makes it count.

    Args:
        place: folder or URI.
        overwrite: replace what an earlier job left there.
        facts: for `job.json`.

    Attributes:
        output: where to write to.

    Raises:
        UsageError: the folder is there already, or another job is filling it.
        OSError: the storage does not take it.
    """

    def __init__(self, place: str, *, overwrite: bool, **facts: Any) -> None:
        self._place, self._overwrite = place, overwrite
        self._target = Storage(place)
        _put_back(self._target)
        refuse_present(place, overwrite=overwrite)
        self._name = self._target.path.rpartition("/")[2]
        self._above = Path(self._target.path).parent
        self._facts = {**registry.this_driver(), **facts, "status": "RUNNING", "filling": uuid.uuid4().hex}
        if self._target.local:
            self._above.mkdir(parents=True, exist_ok=True)
            for left in _beside(self._target):  # of jobs that were killed, not of one that begins just now
                if (left / RECORD).exists() or time.time() - left.stat().st_mtime > registry.STALE_S:
                    shutil.rmtree(left)
            part = self._above / f".{self._name}{PART}{self._facts['filling'][:8]}"
            part.mkdir()
            self.output = Output(str(part))
        else:
            self._target.remove_file(RECORD)  # from here on what is there is not whole
            self._target.remove_folder()
            self.output = Output(place)
        self._committed = False
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._write_record()
        self._heart = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def __enter__(self) -> "Filling":
        self._heart.start()
        return self

    def commit(self) -> tuple[int, int]:
        """Make the folder count. Returns how many files it has, and their bytes together.

        Raises:
            UsageError: another job has filled it meanwhile.
            OSError: the storage does not take it.
        """
        self._still_alone()
        self._end_heart()
        files = [info for info in self.output.below() if info.base_name != RECORD]
        size = sum(info.size or 0 for info in files)
        self._facts |= {"status": "SUCCEEDED", "end": registry.now(), "files": len(files), "size_bytes": size}
        self._write_record()
        if self._target.local:
            part, final = Path(self.output.path), Path(self._target.path)
            old = self._above / f".{self._name}{OLD}{self._facts['filling'][:8]}"
            if final.exists():
                final.rename(old)
            part.rename(final)
            self._committed = True
            shutil.rmtree(old, ignore_errors=True)
        self._committed = True
        return len(files), size

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self._end_heart()
        if self._committed:
            return
        with contextlib.suppress(OSError):  # the storage may be what failed
            if self._target.local:
                _removed(Path(self.output.path))
                _put_back(self._target)
            elif self._is_ours():
                stopped = isinstance(error, KeyboardInterrupt)
                self._facts |= {"status": "STOPPED" if stopped else "FAILED", "end": registry.now()}
                self._write_record()

    def _still_alone(self) -> None:
        free = self._overwrite or not Path(self._target.path).exists()
        if not (free if self._target.local else self._is_ours()):
            raise UsageError(f"another job has filled {self._place} meanwhile; what this one made is left out")

    def _write_record(self) -> None:
        with self._lock:
            self._facts["heartbeat"] = registry.now()
            self.output.write(to_json(self._facts), RECORD)

    def _beat(self) -> None:
        while not self._ended.wait(registry.HEARTBEAT_S):
            with contextlib.suppress(OSError, StorageError):  # the job will say what is wrong when it writes
                if self._target.local or self._is_ours():
                    self._write_record()

    def _is_ours(self) -> bool:
        record = job_record(self._target)
        return record is not None and bool(record.get("filling") == self._facts["filling"])

    def _end_heart(self) -> None:
        self._ended.set()
        if self._heart.is_alive():
            self._heart.join()


def refuse_present(place: str, *, overwrite: bool) -> None:
    """Refuse to fill a folder that is there, or that another job is filling.

    Args:
        place: folder or URI.
        overwrite: what an earlier data job left there may be replaced.

    Raises:
        UsageError: it says which, and what to do.
        OSError: the storage does not answer.
    """
    target = Storage(place)
    filler = _filler(target)
    if filler is not None:
        raise UsageError(
            f"{place} is being filled by process {filler.get('pid')} on {filler.get('host')}, last heard of "
            f"{max(0, registry.age_s(filler)):.0f} s ago; wait for it, or choose another cfg.path"
        )
    if not (Path(target.path).exists() if target.local else target.names()):
        return
    record = job_record(target)
    if record is None:
        raise UsageError(f"{place} is there already, and no data job made it; choose another cfg.path, or move it away")
    if not overwrite and (target.local or job_status(record) == "SUCCEEDED"):
        raise UsageError(
            f"{place} is there already, made {str(record.get('end'))[:10]}; replace it with cfg.overwrite=true, or "
            "choose another cfg.path"
        )


def being_filled(place: str) -> bool:
    """Whether a job is at it, or was until a moment ago."""
    return _filler(Storage(place)) is not None


def _filler(target: Storage) -> dict[str, Any] | None:
    """The record of the job that is at it, or was until a moment ago."""
    records = (job_record(target), *(job_record(Storage(str(left))) for left in _beside(target)))
    return next((record for record in records if record and job_status(record) in registry.LIVING), None)


def _put_back(target: Storage) -> None:
    """What a job had moved aside that was killed in the instant before its own took that place."""
    for beside in _beside(target):
        if OLD in beside.name and not Path(target.path).exists():
            beside.rename(target.path)


def _beside(target: Storage) -> list[Path]:
    """Folders that jobs are filling, or were when they were killed, to take the place of one."""
    if not target.local:
        return []
    path = Path(target.path)
    beginnings = (f".{path.name}{PART}", f".{path.name}{OLD}")
    found = path.parent.iterdir() if path.parent.is_dir() else ()
    return [beside for beside in found if beside.name.startswith(beginnings)]


def _removed(folder: Path, tries: int = 10) -> None:
    """Remove a folder that a task which is being ended may still be writing to."""
    (folder / RECORD).unlink(missing_ok=True)
    while folder.exists() and tries:
        shutil.rmtree(folder, ignore_errors=True)
        tries -= 1
        time.sleep(0.1 * folder.exists())


def job_status(record: Mapping[str, Any]) -> str:
    """RUNNING SUCCEEDED FAILED STOPPED, or STALE when the job is gone without a word, by a folder's `job.json`."""
    return registry.status_of(record) if "heartbeat" in record else "FAILED"


def job_record(storage: Storage, *parts: str) -> dict[str, Any] | None:
    """What a folder's `job.json` says, or None when it has none that can be read.

    Raises:
        OSError: the storage does not answer.
    """
    try:
        return registry.parsed(storage.read(*parts, RECORD))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
