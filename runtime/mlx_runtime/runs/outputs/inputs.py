"""Inputs: files that several runs may read, in the storage, until no run names them any more.

<storage>/.inputs/<SHA-256 of its content>

The config of a run has the SHA-256. A file is removed with the last run that names it, unless it is so new that the run
it was stored for may not have written its record yet.
"""

import os
import re
import time

from mlx_runtime.runs.queries.listing import map_concurrently
from mlx_runtime.storage.files import Storage, Stored, join_path, storage_at, storage_errors

INPUTS = ".inputs"
"""Folder in the storage."""

NEW_S = 900.0
"""Maximum time between storing an input and writing the record of its run, also on a cluster."""

_DIGEST = re.compile(rb"\b[0-9a-f]{64}\b")


def keep_input(storage: Storage, sha256: str, size_bytes: int) -> bool:
    """Keep an input for a run that is about to start. Return False if it is not in the storage, or will be removed.

    Args:
        storage: the folder of inputs.
        sha256: the name of the input.
        size_bytes: its size.
    """
    found = storage.find(sha256)
    if found is None or found.size_bytes != size_bytes:
        return False
    if not storage.local:
        return time.time() - found.modified_s < NEW_S / 2  # otherwise, uploading it again makes it new
    try:
        os.utime(storage.of(sha256))
    except FileNotFoundError:  # removed in the meantime
        return False
    return True


def remove_unused_inputs(root: str) -> int:
    """Remove the inputs in the storage at `root` that no run or sweep names. Return their number.

    Raises:
        StorageError: the storage or the record of a run cannot be read; nothing was removed.
    """
    inputs = storage_at(join_path(root, INPUTS))
    with storage_errors(f"cannot read {inputs.root}"):
        old = [item.name for item in inputs.listed() if _is_old(inputs, item.name)]
    if not old:
        return 0
    used = _names_in_runs(root)
    with storage_errors(f"cannot remove unused files in {inputs.root}"):
        return sum(_remove(inputs, name) for name in old if name not in used)


def _names_in_runs(root: str) -> set[str]:
    """Return the digests in the records and configs of all runs and sweeps."""
    storage = storage_at(root)

    def names_in(folder: Stored) -> list[bytes]:
        files = [(*folder.path.split("/"), name) for name in ("run.json", "conf.yaml")]
        with storage_errors(f"cannot read {join_path(root, folder.path)}"):
            return [
                name
                for file in files
                if storage.find(*file) is not None
                for name in _DIGEST.findall(storage.document(*file))
            ]

    with storage_errors(f"cannot read {root}"):
        experiments = [item.name for item in storage.listed() if not item.is_file and not item.name.startswith(".")]
        folders = [item for name in experiments for item in storage.listed(name) if not item.is_file]
    return {name.decode() for names in map_concurrently(names_in, folders) for name in names}


def _is_old(inputs: Storage, name: str) -> bool:
    found = inputs.find(name)
    if found is None:
        return False
    times = [found.modified_s] if found.is_file else [item.modified_s for item in inputs.below(name)]
    newest_s = max(times, default=found.modified_s)
    return newest_s > 0 and time.time() - newest_s > NEW_S  # 0 if the storage does not know it


def _remove(inputs: Storage, name: str) -> bool:
    """Remove an input, unless `keep_input` has made it new since it was listed."""
    hidden = name
    if inputs.local and not name.startswith("."):
        try:
            inputs.move(name, hidden := f".{name}")  # `keep_input` finds it before this, or not at all
        except FileNotFoundError:  # another process has removed it
            return False
    if not _is_old(inputs, hidden):
        if hidden != name:
            inputs.move(hidden, name)
        return False
    (inputs.remove_file if (found := inputs.find(hidden)) and found.is_file else inputs.remove_folder)(hidden)
    return True
