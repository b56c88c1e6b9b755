"""Complete the mirrors of runs that have ended: after an upload that failed, or to a repository for the first time."""

import contextlib
from collections.abc import Callable

from mlx_runtime.errors import StorageError, UsageError
from mlx_runtime.runs import records
from mlx_runtime.runs.folder import RunFolder, list_runs
from mlx_runtime.runs.mirrors.mirror import Mirror
from mlx_runtime.storage.files import to_json
from mlx_runtime.storage.local import write_atomic


def unfinished(root: str) -> list[RunFolder]:
    """Return the runs in a storage whose last upload is unfinished, unless they are training."""
    return [run for run in list_runs(root) if _unfinished(run)]


def push(run: RunFolder, uri: str | None = None, announce: Callable[[str], object] = lambda text: None) -> str:
    """Upload a run to a repository, by default the one that it was mirrored to. Return a line about it.

    `announce` is called with lines that name what is uploaded, before the first upload to a repository.

    Raises:
        UsageError: a driver trains the run, it has no mirror, or the repository holds another run or a newer state.
        UnreachableError: the Hub does not answer.
    """
    if run.uri is not None:
        raise UsageError(f"{run.title} is in {run.root}; only runs on a local disk are mirrored")
    record = records.refuse_living(run)
    uri = uri or (record.get("mirror") or {}).get("uri")
    if uri is None:
        raise UsageError(f"{run.title} has no mirror; name one with --to hf://USER/NAME")
    mirror = Mirror(uri, announce)
    mirror.check(run)
    claim, count = mirror.push(run)
    if records.refuse_living(run) != record:
        raise UsageError(f"{run.title} has changed during the upload; repeat the command")
    complete = {"uri": mirror.uri, "id": claim.id, "unfinished": False}
    try:
        write_atomic(run.record, to_json(record | {"mirror": complete}))  # a `Record` would look alive
    except OSError as error:
        raise StorageError(f"cannot write {run.record}: {error.strerror or error}") from error
    return f"{mirror.uri} is complete: {count} file{'s' * (count != 1)} of {run.title} uploaded"


def _unfinished(run: RunFolder) -> bool:
    with contextlib.suppress(StorageError):
        record = records.recorded(run)
        return bool((record.get("mirror") or {}).get("unfinished")) and records.status_of(record) not in records.LIVING
    return False
