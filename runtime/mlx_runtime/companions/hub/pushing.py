"""Upload ended runs to their mirrors: after a failed upload, or to a repository for the first time."""

import contextlib
from collections.abc import Callable

from mlx_runtime.companions.hub.contents import SweepSummary
from mlx_runtime.companions.hub.mirror import Mirror
from mlx_runtime.errors import StorageError, UsageError
from mlx_runtime.runs import drivers, records
from mlx_runtime.runs.folder import RunFolder, list_runs
from mlx_runtime.runs.tables import plural
from mlx_runtime.storage.files import storage_at, storage_errors, to_json


def unfinished_runs(root: str) -> list[RunFolder]:
    """Return the runs in a storage whose last upload is unfinished, unless they are training."""
    return [run for run in list_runs(root) if _unfinished(run)]


def push(
    run: RunFolder,
    uri: str | None = None,
    announce: Callable[[str], object] = lambda text: None,
    sweep: SweepSummary | None = None,
) -> str:
    """Upload a run to a repository, by default its mirror. Return a message for the user.

    With `sweep`, the run is the best one of that sweep, and the repository becomes the mirror of the sweep.

    `announce` is called with lines that list the files, before the first upload to a repository.

    Raises:
        UsageError: the run is training or has no mirror, or the repository contains another run or a newer state.
        UnreachableError: the Hub does not answer.
    """
    drivers.refuse_living(run)
    owner = run if sweep is None else sweep.folder
    record = drivers.refuse_living(owner)
    uri = uri or (record.get("mirror") or {}).get("uri")
    if uri is None:
        raise UsageError(f"{owner.title} has no mirror; name one with --to hf://USER/NAME")
    mirror = Mirror(uri, announce)
    mirror.check(run, None if sweep is None else owner)
    claim, count = mirror.push(run, sweep)
    if drivers.refuse_living(owner) != record:
        raise UsageError(f"{owner.title} has changed during the upload; repeat the command")
    complete = {"uri": mirror.uri, "id": claim.id, "unfinished": False}
    with storage_errors(f"cannot write {owner.location}"):  # a `Record` would mark the run as alive
        storage_at(owner.location).write(to_json(record | {"mirror": complete}).encode(), owner.record.name)
    of = run.title if sweep is None else f"{owner.title} and its best run, {run.title},"
    return f"{mirror.uri} is complete: {plural(count, 'file')} of {of} uploaded"


def _unfinished(run: RunFolder) -> bool:
    with contextlib.suppress(StorageError):
        record = records.load_record(run)
        return bool((record.get("mirror") or {}).get("unfinished")) and records.status_of(record) not in records.LIVING
    return False
