"""The verbs of `mlx xp` that reach the driver of a run or its cluster."""

import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from mlx_runtime.errors import ClusterError, MlxError, UsageError, printable, suggest
from mlx_runtime.runs import records
from mlx_runtime.runs.folder import RunFolder, ask_to_stop
from mlx_runtime.runs.logs import last_lines, logged_ranks, read_log
from mlx_runtime.runs.lookup import resolve_run

if TYPE_CHECKING:
    from mlx_runtime.cluster.dashboard import Dashboard

FOLLOW_S = 1.0
"""Interval at which the stored log of a live run is read; five times as long on an object store."""

EXIT_CODES = {"SUCCEEDED": 0, "STOPPED": 143}
"""Exit codes of runs whose process can no longer be asked; 1 for any other status."""

STOP_S = 60
"""How long `stop` waits for the run to finish a step and save a checkpoint."""


def stop(name: str, run: str) -> str:
    """Ask a run to save a checkpoint and end, wherever its driver is, and wait for it.

    Args:
        name: an experiment in the storage, or the path of a run's folder.
        run: `run_003`, `3` or `latest`.

    Returns:
        What happened.

    Raises:
        UsageError: there is no such run, or it is not running.
        MlxError: it has not ended in time.
    """
    folder = resolve_run(name, run)
    title = f"{folder.experiment} {folder.name}"
    record = records.recorded(folder)
    status = records.status_of(record, _job_status(record))
    if status not in records.LIVING and not records.resuming(folder, record):
        raise UsageError(f"{title} is {status}; there is nothing to stop")
    if status == "PENDING" and (dashboard := _dashboard(record)) is not None:
        dashboard.stop(record["job"]["id"])
        pending = records.Record(folder, record)
        pending.withdraw() if records.REPLACED in record else pending.finish("STOPPED")
        return f"{title} is STOPPED, before it began"
    ask_to_stop(folder)
    deadline = time.monotonic() + STOP_S
    while status in records.LIVING or records.resuming(folder, record):
        if time.monotonic() > deadline:
            if (dashboard := _dashboard(record)) is None:
                raise MlxError(
                    f"{title} was asked to stop and is still {status} after {STOP_S} s; a step may take longer"
                )
            dashboard.stop(record["job"]["id"])
            return f"{title} did not end within {STOP_S} s; stopping its job"
        time.sleep(0.5)
        record = records.recorded(folder)
        status = records.status_of(record)
    return f"{title} is {status}"


def logs(
    name: str,
    run: str,
    write: Callable[[str], object],
    *,
    follow: bool | None = None,
    rank: int | None = None,
    tail: int | None = None,
) -> int:
    """Pass on the output of a run: from its cluster while that is up, else from its folder.

    Args:
        name: an experiment in the storage, or the path of a run's folder.
        run: `run_003`, `3` or `latest`.
        write: receives pieces of text.
        follow: wait until the run ends; None waits only if it is alive.
        rank: rank of a worker; None for the driver, which prints the output of all.
        tail: number of lines to start with; None for all.

    Returns:
        The exit code: that of the run if it was followed, else 0.

    Raises:
        UsageError: there is no such run, or no log of that rank.
    """
    folder = resolve_run(name, run)
    record = records.recorded(folder)
    if follow is None:
        follow = records.status_of(record, _job_status(record)) in records.LIVING
    dashboard = _dashboard(record) if rank is None else None
    if dashboard is not None:
        job = record["job"]["id"]
        try:
            if follow:
                return dashboard.follow(job, write, tail).exit_code
            text = dashboard.log(job)
            write(text if tail is None else last_lines(text, tail))
            return 0
        except ClusterError:  # it has gone down since; the output is stored
            pass
    return _stored_logs(folder, write, follow=follow, rank=rank, tail=tail)


def _stored_logs(
    folder: RunFolder, write: Callable[[str], object], *, follow: bool, rank: int | None, tail: int | None
) -> int:
    seen = 0
    while True:
        status = records.status_of(records.recorded(folder))  # before the log, so that its end is not missed
        content = read_log(folder, rank)
        if content is None and not (follow and status in records.LIVING):
            known = logged_ranks(folder)
            if rank is not None and known:
                raise UsageError(f"{folder.title} has no rank {rank}.{suggest(str(rank), known)}")
            raise UsageError(f"{folder.title} has no stored log; it is {status}")
        if content is not None and len(content) > seen:
            text = content[seen:].decode(errors="replace")
            write(last_lines(text, tail) if tail is not None and not seen else text)
            seen = len(content)
        if not follow:
            return 0
        if status not in records.LIVING:
            return EXIT_CODES.get(status, 1)
        time.sleep(FOLLOW_S if folder.uri is None else 5 * FOLLOW_S)


def _dashboard(record: Mapping[str, Any]) -> "Dashboard | None":
    """Connect to the cluster of a run's job. Return None unless it is trusted, answers and knows the job."""
    job = record.get("job")
    if not job:
        return None
    from mlx_runtime.cluster.addresses import Address, is_trusted, untrusted_notice
    from mlx_runtime.cluster.dashboard import Dashboard

    if not is_trusted(job["address"]):
        if record.get("status") in records.LIVING:  # the stored log of any other run is complete
            print(printable(f"note: {untrusted_notice(job['address'])}"), file=sys.stderr)
        return None
    try:
        dashboard = Dashboard.connect(Address(job["address"], "its record"))
        dashboard.state(job["id"])
    except ClusterError:
        return None
    return dashboard


def _job_status(record: Mapping[str, Any]) -> str | None:
    """Return the status of a run's job on its cluster; None if it cannot be asked."""
    job = record.get("job")
    if not job:
        return None
    from mlx_runtime.cluster.dashboard import job_statuses

    key = (job["address"], job["id"])
    return job_statuses([key]).get(key)


def open_dashboard(ray_address: str | None) -> str:
    """Return the URL of a cluster's dashboard, and open it in a browser if there is a display.

    Raises:
        UsageError: there is no address.
        ClusterError: the cluster does not answer.
    """
    import webbrowser

    from mlx_runtime.cluster.addresses import Address
    from mlx_runtime.cluster.dashboard import Dashboard

    url = Dashboard.connect(Address.parse(ray_address)).address.url
    if os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY") or sys.platform == "darwin":
        webbrowser.open(url)
    return url
