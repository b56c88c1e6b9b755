"""`mlx xp ps`: where each worker of a run is, according to its driver."""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mlx_runtime.cli.verbs.xp import job_status, resume_command
from mlx_runtime.errors import MlxError, UsageError
from mlx_runtime.runs import records
from mlx_runtime.runs.folder import RunFolder
from mlx_runtime.runs.queries.listing import Row
from mlx_runtime.runs.queries.lookup import resolve_run
from mlx_runtime.runs.tables import format_duration
from mlx_runtime.storage.leases import holder
from mlx_runtime.workers.deadlocks import ANSWER_S, read_answer

POLL_S = 0.2
LIMIT_S = 15.0  # for an answer; three times as long in an object store, where the driver looks every 10 s


def locate(name: str, run: str | None, notify: Callable[[str], object]) -> dict[str, Any]:
    """Return the row of a living run and, unless it has not begun, the positions of its workers.

    Raises:
        UsageError: the run has ended.
        MlxError: its driver does not answer.
    """
    folder = resolve_run(name, run)
    record, status = _living(folder)
    answer = {} if status == "PENDING" else _ask(folder, record, notify)
    row = Row(folder, status, record)
    return {"run": folder.title, "status": status, "record": record, "duration_s": row.duration_s} | answer


def _living(folder: RunFolder) -> tuple[dict[str, Any], str]:
    """Return the record and the status of a run; raise UsageError if it has ended."""
    record = records.load_record(folder)
    status = records.status_of(record, job_status(record))
    if status == "STALE":
        raise UsageError(
            f"the driver of {folder.title} was killed, or its machine was lost ({holder(record)}). "
            f"Resume: {resume_command(folder, record)}"
        )
    if status not in records.LIVING:
        cure = f"see how it went with: mlx xp logs {folder.experiment} {folder.name}"
        raise UsageError(f"{folder.title} is {status}; {cure}")
    return record, status


def _ask(folder: RunFolder, record: Mapping[str, Any], notify: Callable[[str], object]) -> dict[str, Any]:
    limit_s = LIMIT_S * (3 if folder.uri else 1)
    folder.ask(folder.LOCATE)
    began, notified = time.monotonic(), False
    while folder.LOCATE in folder.names():
        waited_s = time.monotonic() - began
        if waited_s > limit_s:
            folder.withdraw(folder.LOCATE)
            _living(folder)  # it may have ended meanwhile
            raise MlxError(
                f"the driver of {folder.title} has not answered for {limit_s:.0f} s: {holder(record)}. Its process is "
                f"frozen, or its machine cannot reach {folder.root}. Its output: mlx xp logs {folder.experiment} "
                f"{folder.name} --no-follow"
            )
        if waited_s > 2 and not notified:
            notify(f"waiting for the driver: {holder(record)}")
            notified = True
        time.sleep(POLL_S)
    try:
        return read_answer(folder)
    except (OSError, ValueError) as error:
        raise MlxError(f"the answer of the driver of {folder.title} cannot be read: {error}") from error


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines that describe a run and, unless there is a table to print, why no worker is shown."""
    record = found["record"]
    parts = [f"{found['run']} {found['status']} for {format_duration(found['duration_s'])}"]
    if attempts := len(record.get("attempts") or ()):
        parts.append(f"attempt {attempts + 1}")
    if record.get("job"):
        parts.append(f"job {record['job']['id']} of {record['job']['address']}")
    yield ", ".join(parts)
    if "pid" in record:
        yield f"driver: {holder(record)}"
    if record.get("latest"):
        latest = record["latest"]
        yield f"latest checkpoint: epoch {latest['epoch'] + 1}, {latest.get('path')}"
    if found["status"] == "WAITING" and record.get("waits_for"):
        yield f"waits for {record['waits_for']}"
    if summary := _summary(found):
        yield summary


def _summary(found: Mapping[str, Any]) -> str:
    """Return one line about who waits for whom, or about workers that do not answer; empty if there is nothing."""
    workers, size = found.get("workers", []), found.get("world_size", 0)
    silent = sorted({*range(size)} - {item["rank"] for item in workers})
    if silent:
        return f"{_ranks(silent)} did not answer within {ANSWER_S:.0f} s: stopped processes, or unreachable nodes"
    busy = [item for item in workers if not item["waits_in"]]
    if not busy or len(busy) == size:
        return ""
    waiting = _ranks([item["rank"] for item in workers if item["waits_in"]])
    at = f", in {busy[0]['at']}" if len(busy) == 1 and busy[0]["at"] else ""
    return f"{waiting} wait{'' if ' and ' in waiting else 's'} for {_ranks([item['rank'] for item in busy])}{at}"


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = [str(rank) for rank in ranks[:8]]
    last = f"{len(ranks) - 8} more" if len(ranks) > 8 else shown.pop()
    return f"ranks {', '.join(shown)} and {last}"


def table(found: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return one row per worker, as text by column."""
    return [
        {
            "rank": str(item["rank"]),
            "node": item["host"],
            "pid": str(item["pid"]),
            "step": f"{item['epoch'] + 1}: "
            + (f"{item['stage']} {item['step']}" if item["stage"] else "before the first pass"),
            "since": format_duration(item["seconds"]) if item["stage"] else "",
            "waits in": (item["waits_in"] or "").partition(" (")[0],
            "line": item["at"],
        }
        for item in found.get("workers", ())
    ]
