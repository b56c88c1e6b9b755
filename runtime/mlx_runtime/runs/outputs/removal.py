"""Removal of data and runs from the storage, except what is in use or has changed since the user confirmed."""

import contextlib
import os
import shutil
import stat
import uuid
from dataclasses import dataclass
from pathlib import Path

from mlx_runtime.errors import StorageError, UsageError, short_message
from mlx_runtime.runs import drivers, records
from mlx_runtime.runs.folder import RunFolder, run_folder
from mlx_runtime.runs.outputs.filling import RECORD, job_record, job_status
from mlx_runtime.runs.outputs.usage import REMOVING, RUN, Survey, survey
from mlx_runtime.runs.queries import lookup
from mlx_runtime.runs.queries.listing import AskJobs, summarize
from mlx_runtime.runs.queries.lookup import StoragePath
from mlx_runtime.storage.files import Storage, join_path, size_text, storage_at
from mlx_runtime.storage.local import open_folder

MANIFEST = "manifest.json"
"""Last file of a prepared dataset; without it, the dataset is incomplete."""


def refuse_in_use(path: StoragePath, found: Survey) -> None:
    """Raise UsageError if a surveyed path is the storage itself, belongs to a run, or is being read or written."""
    if not path.parts:
        raise UsageError(f"{path.title} is the storage itself; name a folder in it")
    storage = storage_at(path.root)
    above = [path.parts[:count] for count in range(1, len(path.parts))]
    runs = [path.parts + run for run in sorted(found.runs)]
    runs += [parts for parts in above if storage.size_bytes(*parts, RUN) is not None]
    for parts in runs:
        if not any(REMOVING in part for part in parts):  # not the rest of a partly removed run
            _refuse_run(path.root, parts)
    for parts in [path.parts + job for job in sorted(found.jobs)] + above:
        record = job_record(storage, *parts)
        if record is not None and job_status(record) in records.LIVING:
            raise UsageError(
                f"{join_path(path.root, *parts)} is being filled by process {record.get('pid')} on {record.get('host')}"
                "; end that first"
            )
    if found.reading:
        read = join_path(path.root, *path.parts, *min(found.reading))
        raise UsageError(f"{read} is being read; wait for the runs that read it")


def _refuse_run(root: str, parts: tuple[str, ...]) -> None:
    above = join_path(root, *parts[:-2])
    folder = run_folder(above, *parts[-2:]) if len(parts) > 1 else RunFolder(Path(join_path(root, *parts)))
    with contextlib.suppress(StorageError):  # a run that has not begun has no record
        drivers.refuse_living(folder)
    storage = f"MLX_STORAGE={above} " if len(parts) > 2 else ""
    command = f"{storage}mlx xp rm {' '.join(parts[-2:])}"
    raise UsageError(f"{join_path(root, *parts)} is a run; remove it with: {command}")


def remove(path: StoragePath) -> None:
    """Remove a file or folder; call `refuse_in_use` first. If it is a link, its target is kept."""
    storage = storage_at(path.root)
    if storage.local:
        _remove_local(storage, path)
    else:
        _remove_objects(storage, path)


def _remove_local(storage: Storage, path: StoragePath) -> None:
    """Remove from a folder on this machine. A folder is renamed first, so that no partial folder keeps its name."""
    *above, name = path.parts
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(open_folder(storage.path, *above))
            if not stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                os.unlink(name, dir_fd=folder)
                return
            hidden = name
            if REMOVING not in name:
                hidden = f".{name.lstrip('.')}{REMOVING}{uuid.uuid4().hex[:8]}"
                os.rename(name, hidden, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError as error:
            raise StorageError(f"cannot remove {path.title}: {error.strerror or error}; nothing was removed") from error
    try:
        shutil.rmtree(storage.of(*above, hidden))
    except OSError as error:
        cause = f"{error.strerror or error}: {error.filename}"
        raise _partly_removed(path, StoragePath(path.root, (*above, hidden)), cause) from error


def _remove_objects(storage: Storage, path: StoragePath) -> None:
    cause = "objects were added in the meantime"
    try:
        if storage.size_bytes(*path.parts) is not None:
            storage.remove_file(*path.parts)
            return
        for mark in (RECORD, MANIFEST):  # without it, a partial folder is not mistaken for a complete one
            storage.remove_file(*path.parts, mark)
        storage.remove_folder(*path.parts)
    except OSError as error:
        cause = short_message(error)
    if survey(path, 0, 0).top.files:
        raise _partly_removed(path, path, cause)


def _partly_removed(path: StoragePath, rest: StoragePath, cause: str) -> StorageError:
    left = survey(rest, 0, 0).top
    return StorageError(
        f"only a part of {path.title} was removed ({cause}): {left.files:,} files, {size_text(left.size_bytes)}, are "
        f"left. Make them removable, then: mlx data rm {'/'.join(rest.parts)}"
    )


@dataclass(frozen=True)
class RunRemoval:
    """A run that may be removed, and the facts for the user's confirmation."""

    folder: RunFolder
    path: StoragePath
    files: int
    size_bytes: int
    warning: str = ""

    @property
    def title(self) -> str:
        return f"{self.folder.title}, {self.files:,} files, {size_text(self.size_bytes)}, in {self.folder.location}"


def plan_run(folder: RunFolder, ask: AskJobs | None = None) -> RunRemoval:
    """Measure a run. Raise UsageError if it is alive, or not in the storage."""
    path = StoragePath.parse(lookup.storage_root(), folder.location)
    [row] = summarize([folder], ask)
    title = f"{folder.experiment} {folder.name}"
    if row.status in records.LIVING:
        raise UsageError(f"{title} is {row.status}; stop it first: mlx xp stop {title}")
    if driver := drivers.claiming_driver(folder, row.record):
        raise UsageError(f"{title} is being resumed by process {driver.get('pid')} on {driver.get('host')}")
    top = survey(path, 0, 0).top
    warning = f"{row.problem}; it may still be running" if row.problem else ""
    return RunRemoval(folder, path, top.files, top.size_bytes, warning)


def remove_run(plan: RunRemoval, ask: AskJobs | None = None) -> None:
    """Remove the folder of a run and its working copy on this machine, unless it has changed since `plan_run`."""
    folder = plan.folder
    if plan_run(folder, ask) != plan:
        raise UsageError(f"{folder.title} has changed since it was measured; nothing was removed. See: mlx xp ls")
    remove(plan.path)
    if folder.uri is not None:
        shutil.rmtree(folder.path, ignore_errors=True)
