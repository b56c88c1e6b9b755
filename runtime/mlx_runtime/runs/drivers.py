"""The driver of a run: whether one is alive, and becoming it. Plain runs, which are new, do not need this."""

import contextlib
import time
from collections.abc import Mapping
from typing import Any

from mlx_runtime.errors import StorageError, UsageError
from mlx_runtime.runs.folder import RunFolder, attempt_name
from mlx_runtime.runs.records import LIVING, load_record, parse_record, status_of
from mlx_runtime.settings import Settings
from mlx_runtime.storage.files import storage_errors
from mlx_runtime.storage.leases import holder, is_alive, lease
from mlx_runtime.storage.local import discard_unfinished

CLAIM_S = 0.5
"""Time limit between the claim of a run and the first lease of its driver."""


def refuse_living(folder: RunFolder) -> dict[str, Any]:
    """Return the record of a run; raise UsageError if a driver is training it."""
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
        status = "STALE"  # its launcher has ended
    driver = record if status in LIVING else claiming_driver(folder, record)
    if driver:
        raise UsageError(
            f"{name} is being trained by {holder(driver)}. Wait for it, or end it with: mlx xp stop {name}"
        )
    return record


def wait_for_end(folder: RunFolder, most_s: float) -> None:
    """Wait until a run has no driver: that of a lost machine seems alive until its lease expires."""
    deadline = time.monotonic() + most_s
    while time.monotonic() < deadline:
        try:
            refuse_living(folder)
        except UsageError:
            time.sleep(CLAIM_S)
        except StorageError:  # it has no record yet
            return
        else:
            return


def claiming_driver(folder: RunFolder, record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the lease of a live driver that has claimed a run but not changed its record yet, or {}."""
    newest = folder.attempts()
    if newest <= record.get("attempt", newest):
        return {}
    for pause_s in (CLAIM_S, 0.0):  # it will write its lease soon, unless it died
        with (
            storage_errors(f"cannot read {folder.location}"),
            contextlib.suppress(FileNotFoundError, IsADirectoryError, ValueError),
        ):
            driver = parse_record(folder.document(attempt_name(newest)))
            return driver if driver["status"] in LIVING and is_alive(driver) else {}
        time.sleep(pause_s)
    return {}


def take_over(folder: RunFolder) -> int:
    """Become the driver of a run whose driver has ended. Return the number of this attempt.

    A request to stop the earlier driver is withdrawn.

    Raises:
        UsageError: the driver of the run is alive, or another one has just taken over.
    """
    refuse_living(folder)
    folder.withdraw(folder.STOP)  # before the claim: a request after it is for this driver
    number = folder.attempts() + 1
    if not folder.claim_attempt(number, lease()):
        raise UsageError(
            f"another driver has just taken over {folder.title}; wait for it, or end it with: mlx xp stop "
            f"{folder.experiment} {folder.name}"
        )
    for file in (folder.record, folder.conf):  # temporary files of a driver that only seemed dead
        discard_unfinished(file)
    return number
