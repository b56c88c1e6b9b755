"""`mlx xp ps`: where each worker of a run is, according to its driver."""

import time
from collections.abc import Mapping
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


def locate(name: str, run: str | None) -> dict[str, Any]:
    """Return the status of a living run and, unless it has not begun, the positions of its workers.

    Raises:
        UsageError: the run has ended.
        MlxError: its driver does not answer.
    """
    folder = resolve_run(name, run)
    record, status = _living(folder)
    row = Row(folder, status, record)
    answer = {} if status == "PENDING" else _ask(folder, record)
    found = {"run": folder.title, "status": status, "waits_for": row.waits_for, "duration_s": row.duration_s}
    return found | answer


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


def _ask(folder: RunFolder, record: Mapping[str, Any]) -> dict[str, Any]:
    limit_s = LIMIT_S * (3 if folder.uri else 1)
    folder.ask(folder.LOCATE)
    deadline = time.monotonic() + limit_s
    while folder.LOCATE in folder.names():
        if time.monotonic() > deadline:
            folder.withdraw(folder.LOCATE)
            _living(folder)  # it may have ended meanwhile
            raise MlxError(
                f"the driver of {folder.title} has not answered for {limit_s:.0f} s: {holder(record)}. Its process is "
                f"frozen, or its machine cannot reach {folder.root}. Its output: mlx xp logs {folder.experiment} "
                f"{folder.name} --no-follow"
            )
        time.sleep(POLL_S)
    try:
        return read_answer(folder)
    except (OSError, ValueError) as error:
        raise MlxError(f"the answer of the driver of {folder.title} cannot be read: {error}") from error


def title(found: Mapping[str, Any]) -> str:
    """Return the line above the table."""
    reason = f", waits for {found['waits_for']}" if found["waits_for"] else ""
    return f"{found['run']} {found['status']} for {format_duration(found['duration_s'])}{reason}"


def table(found: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return one row per worker, as text by column."""
    answers = {item["rank"]: item for item in found.get("workers", ())}
    return [_cells(rank, answers.get(rank)) for rank in range(max([found.get("world_size", 0) - 1, *answers]) + 1)]


def _cells(rank: int, item: Mapping[str, Any] | None) -> dict[str, str]:
    if item is None:
        line = f"no answer within {ANSWER_S:.0f} s: a stopped process, or an unreachable node"
        return {"rank": str(rank), "node": "-", "step": "-", "age": "-", "line": line}
    step = f"{item['stage']} {item['step']}" if item["stage"] else "before the first pass"
    return {
        "rank": str(rank),
        "node": item["host"],
        "step": f"{item['epoch'] + 1}: {step}",
        "age": format_duration(item["seconds"]) if item["stage"] and item["seconds"] else "",
        "line": item["at"],
    }
