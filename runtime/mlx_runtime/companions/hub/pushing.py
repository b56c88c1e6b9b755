"""Upload ended runs to their mirrors: after a failed upload, or to a repository for the first time."""

import contextlib
from collections.abc import Callable

from mlx_runtime.companions.hub.mirror import Mirror
from mlx_runtime.errors import StorageError, UsageError
from mlx_runtime.runs import drivers, records
from mlx_runtime.runs.folder import SWEEP, RunFolder, list_runs
from mlx_runtime.runs.tables import plural
from mlx_runtime.storage.files import storage_at, storage_errors, to_json


def unfinished_runs(root: str) -> list[RunFolder]:
    """Return the runs in a storage whose last upload is unfinished, unless they are training."""
    return [run for run in list_runs(root) if _unfinished(run)]


def push(run: RunFolder, uri: str | None = None, announce: Callable[[str], object] = lambda text: None) -> str:
    """Upload a run to a repository, by default its mirror. Return a message for the user.

    `announce` is called with lines that list the files, before the first upload to a repository.

    Raises:
        UsageError: the run is training or has no mirror, its config or code holds likely secrets, or the repository
            contains another run or a newer state.
        UnreachableError: the Hub does not answer.
    """
    if run.name.startswith(SWEEP):
        raise UsageError(
            f"{run.title} is a sweep, and a repository holds one run; push its best: mlx xp best {run.title}"
        )
    record = drivers.refuse_living(run)
    uri = uri or (record.get("mirror") or {}).get("uri")
    if uri is None:
        raise UsageError(f"{run.title} has no mirror; name one with --to hf://USER/NAME")
    mirror = Mirror(uri, announce)
    mirror.check(run)
    claim, count = mirror.push(run)
    if drivers.refuse_living(run) != record:
        raise UsageError(f"{run.title} has changed during the upload; repeat the command")
    complete = {"uri": mirror.uri, "id": claim.id, "unfinished": False}
    with storage_errors(f"cannot write {run.location}"):  # a `Record` would mark the run as alive
        storage_at(run.location).write(to_json(record | {"mirror": complete}).encode(), run.record.name)
    return f"{mirror.uri} is complete: {plural(count, 'file')} of {run.title} uploaded"


def _unfinished(run: RunFolder) -> bool:
    with contextlib.suppress(StorageError):
        record = records.load_record(run)
        return bool((record.get("mirror") or {}).get("unfinished")) and records.status_of(record) not in records.LIVING
    return False
