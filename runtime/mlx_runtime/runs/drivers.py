"""The driver of a run: whether one is alive, and becoming it. Plain runs, which are new, do not need this."""

import contextlib
import time
from typing import Any

from mlx_runtime.errors import StorageError, UsageError
from mlx_runtime.runs.folder import RunFolder
from mlx_runtime.runs.records import LIVING, REPLACED, load_record, status_of
from mlx_runtime.settings import Settings
from mlx_runtime.storage.leases import holder, lease
from mlx_runtime.storage.local import discard_unfinished

LOOK_S = 0.5
"""Interval at which `wait_for_end` looks."""


def refuse_living(folder: RunFolder) -> dict[str, Any]:
    """Return the record of a run to resume; raise UsageError if a driver is training it."""
    record = load_record(folder)
    name = f"{folder.experiment} {folder.name}"
    job = record.get("job") or {}
    status = status_of(record)
    if status == "PENDING" and job:
        ours = Settings.read().job
        if ours is None or ours["id"] != job["id"]:
            raise UsageError(
                f"{name} is about to start as the job {job['id']}. Wait, or end it with: mlx xp stop {name}"
            )
    elif status in LIVING:
        raise UsageError(
            f"{name} is being trained by {holder(record)}. Wait for it, or end it with: mlx xp stop {name}"
        )
    return record.get(REPLACED) or record


def wait_for_end(folder: RunFolder, most_s: float) -> None:
    """Wait until a run has no driver: that of a lost machine seems alive until its lease expires."""
    deadline = time.monotonic() + most_s
    with contextlib.suppress(StorageError):  # it has no record yet
        while status_of(load_record(folder)) in ("WAITING", "RUNNING") and time.monotonic() < deadline:
            time.sleep(LOOK_S)


def take_over(folder: RunFolder) -> int:
    """Become the driver of a run whose driver has ended. Return the number of this attempt.

    A request to stop the earlier driver is withdrawn.

    Raises:
        UsageError: the driver of the run is alive, or another one has just taken over.
    """
    number = folder.attempts() + 1  # before the record is read, which another driver may be about to write
    refuse_living(folder)
    folder.withdraw(folder.STOP)  # before the claim: a request after it is for this driver
    if not folder.claim_attempt(number, lease()):
        raise UsageError(
            f"another driver has just taken over {folder.title}; wait for it, or end it with: mlx xp stop "
            f"{folder.experiment} {folder.name}"
        )
    for file in (folder.record, folder.conf):  # temporary files of a driver that only seemed dead
        discard_unfinished(file)
    return number
