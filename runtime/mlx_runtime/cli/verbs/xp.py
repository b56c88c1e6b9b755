"""The verbs of `mlx xp` that contact the driver of a run or its cluster, or start TensorBoard."""

import contextlib
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_runtime import companions
from mlx_runtime.cli.options import job_statuses
from mlx_runtime.errors import ClusterError, MlxError, UsageError
from mlx_runtime.extras import require
from mlx_runtime.runs import records
from mlx_runtime.runs.folder import RunFolder, find_run
from mlx_runtime.runs.logs import last_lines, log_name
from mlx_runtime.runs.queries.listing import Row, summarize
from mlx_runtime.runs.queries.lookup import refuse_elsewhere, resolve_run, storage_root
from mlx_runtime.runs.tables import format_duration
from mlx_runtime.settings import Settings
from mlx_runtime.storage.files import is_uri, join_path, parent_of, size_text, storage_at, storage_errors
from mlx_runtime.storage.leases import holder, is_alive
from mlx_runtime.workers.deadlocks import ANSWER_S, read_answer

if TYPE_CHECKING:
    from mlx_runtime.companions.jobs.launching import JobClient

FOLLOW_S = 1.0  # interval for reading the stored log of a live run; five times as long in an object store
EXIT_CODES = {"SUCCEEDED": 0, "PRUNED": 0, "STOPPED": 143}  # of ended runs; 1 for FAILED and STALE
STOP_S = 60  # maximum time for `stop` to wait for a step and a checkpoint
ASK_S = 0.2  # interval for reading the answer to `ps`
MOST_RANKS = 10_000  # of workers that did not answer, because anybody may have written the answer
ANSWERS_S = 15.0  # limit for an answer; three times as long in an object store, where the driver looks every 10 s


def stop(folder: RunFolder) -> str:
    """Ask a run to save a checkpoint and end, wherever its driver is, and wait for it. Return a line to print."""
    title = f"{folder.experiment} {folder.name}"
    record = records.load_record(folder)
    status = records.status_of(record, job_status(record))
    if status not in records.LIVING:
        raise UsageError(f"{title} is {status}; there is nothing to stop")
    if status == "PENDING" and (client := client_of(record)) is not None:
        client.stop(record["job"]["id"])
        folder.path.mkdir(parents=True, exist_ok=True)  # with a URI, another machine may have the working copy
        pending = records.Record(folder, record)
        pending.withdraw() if records.REPLACED in record else pending.finish("STOPPED")
        return f"{title} was STOPPED before it began"
    folder.ask(folder.STOP)
    deadline = time.monotonic() + STOP_S
    while status in records.LIVING:
        if time.monotonic() > deadline:
            if (client := client_of(record)) is None:
                raise MlxError(
                    f"{title} was asked to stop and is still {status} after {STOP_S} s; a step may take longer"
                )
            client.stop(record["job"]["id"])
            return f"{title} did not end within {STOP_S} s; stopping its job"
        time.sleep(0.5)
        record = records.load_record(folder)
        status = records.status_of(record)
    return f"{title} is {status}"


def refuse_living(folder: RunFolder, *, force: bool = False) -> None:
    """Raise UsageError if a run is alive or, without `force`, if nobody knows, because its record cannot be read."""
    [row] = summarize([folder], job_statuses)
    title = f"{folder.experiment} {folder.name}"
    if row.status in records.LIVING:
        raise UsageError(f"{title} is {row.status}; stop it first: mlx xp stop {title}")
    if row.problem is not None and not force:
        raise UsageError(f"{row.problem}; it may still be running. To remove it anyway, add --force")


def size_title(folder: RunFolder) -> str:
    """Return a line with the number and size of a run's files."""
    with storage_errors(f"cannot read {folder.location}"):
        files = storage_at(folder.location).below()
    size = size_text(sum(file.size_bytes for file in files))
    return f"{folder.title}, {len(files):,} files, {size}, in {folder.location}"


def remove(folder: RunFolder, *, force: bool = False) -> None:
    """Remove the folder of a run, or a link to it, and its working copy on this machine, unless it has been resumed."""
    refuse_living(folder, force=force)
    with storage_errors(f"{folder.location} was removed only in part"):
        storage, name = parent_of(folder.location)
        if storage.local and Path(storage.of(name)).is_symlink():
            storage.remove_file(name)
        else:
            storage.remove_folder(name)
    if folder.uri is not None:
        shutil.rmtree(folder.path, ignore_errors=True)


def logs(
    folder: RunFolder,
    write: Callable[[str], object],
    *,
    follow: bool | None = None,
    rank: int | None = None,
    tail: int | None = None,
) -> int:
    """Write the output of a run, from its cluster or, if that is down, from its folder. Return an exit code.

    With `follow`, wait until the run ends, and return its exit code; None waits only if the run is alive. Without, the
    code is 0. `rank` selects a worker; None means the driver, whose output includes that of all workers. `tail` is the
    number of lines to start with.
    """
    record = records.load_record(folder)
    job = job_status(record)
    status = records.status_of(record, job)
    code = 0 if follow is False else EXIT_CODES.get(status, 1)
    if follow is None:  # if the driver was killed, its job may start another
        follow = status in records.LIVING or job == "RUNNING"
    client = client_of(record) if rank is None else None
    with contextlib.suppress(ClusterError):  # the cluster may go down; the output is stored
        if client is not None and follow:
            return client.follow(record["job"]["id"], write, tail).exit_code
        if client is not None:
            text = client.log(record["job"]["id"])
            write(text if tail is None else last_lines(text, tail))
            return code
    followed = _stored_logs(folder, write, follow=follow, rank=rank, tail=tail)
    return followed if follow else code


def lost_driver(folder: RunFolder) -> str | None:
    """Return a line about a run whose driver could not record its end, with the command that resumes it, or None."""
    record = records.load_record(folder)
    if (
        record["status"] not in ("RUNNING", "WAITING")
        or records.status_of(record, job_status(record)) in records.LIVING
    ):
        return None
    return f"the driver of {folder.title} was killed, or its machine was lost. Resume: {resume_command(folder, record)}"


def resume_command(folder: RunFolder, record: Mapping[str, Any]) -> str:
    """Return the command that resumes a run where it has trained."""
    kind = companions.jobs_at(job["address"]) if (job := record.get("job")) else None
    return f"mlx train {kind.launch if kind else 'run'} --resume={folder.title}"


def _stored_logs(
    folder: RunFolder, write: Callable[[str], object], *, follow: bool, rank: int | None, tail: int | None
) -> int:
    seen, ended = 0, False
    while True:
        record = records.load_record(folder)
        status = records.status_of(record)
        content = _read_log(folder, rank)
        if content is None and not (follow and status in records.LIVING):
            raise UsageError(f"{folder.title} has no stored {log_name(rank)}; it is {status}")
        if grown := content is not None and len(content) > seen:
            text = content[seen:].decode(errors="replace")
            write(last_lines(text, tail) if tail is not None and not seen else text)
            seen = len(content)
        if not follow:
            return 0
        if ended and not grown and status not in records.LIVING:
            return EXIT_CODES.get(status, 1)
        # The driver prints its last lines after recording the end, and after the last upload of a mirror.
        ended = status not in records.LIVING and not ("boot" in record and is_alive(record))
        time.sleep(FOLLOW_S if folder.uri is None else 5 * FOLLOW_S)


def _read_log(folder: RunFolder, rank: int | None) -> bytes | None:
    """Return the stored part of a log, or None if there is no such log."""
    name = log_name(rank)
    with storage_errors(f"cannot read {join_path(folder.location, name)}"):
        try:
            return folder.read(name)
        except FileNotFoundError:
            return None


def client_of(record: Mapping[str, Any]) -> "JobClient | None":
    """Connect to the cluster of a run's job. Return None without a job, or if the cluster does not answer for it."""
    job = record.get("job")
    kind = companions.jobs_at(job["address"]) if job else None
    if job is None or kind is None:
        return None
    client: JobClient | None = companions.part(kind.client).client_of(job, alive=record["status"] in records.LIVING)
    return client


def job_status(record: Mapping[str, Any]) -> str | None:
    """Return the status of a run's job on its cluster; None if it cannot be asked."""
    job = record.get("job")
    key = (job["address"], job["id"]) if job else None
    return job_statuses({key}).get(key) if key else None


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
    limit_s = ANSWERS_S * (3 if folder.uri else 1)
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
        time.sleep(ASK_S)
    try:
        return read_answer(folder)
    except (OSError, ValueError) as error:
        raise MlxError(f"the answer of the driver of {folder.title} cannot be read: {error}") from error


def positions_title(found: Mapping[str, Any]) -> str:
    """Return the line above the table."""
    reason = f", waits for {found['waits_for']}" if found["waits_for"] else ""
    return f"{found['run']} {found['status']} for {format_duration(found['duration_s'])}{reason}"


def positions_table(found: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return one row per worker, as text by column."""
    answers = {item["rank"]: item for item in found.get("workers", ())}
    ranks = {*answers, *range(min(found.get("world_size", 0), MOST_RANKS))}
    return [_position_cells(rank, answers.get(rank)) for rank in sorted(ranks)]


def _position_cells(rank: int, item: Mapping[str, Any] | None) -> dict[str, str]:
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


def board(name: str | None, run: str | None, port: int) -> None:
    """Serve TensorBoard on a port of 127.0.0.1 until it is stopped.

    It displays a run, an experiment or the whole storage. Unlike in other commands, any folder may be given as a path.
    """
    there = Settings.read().on is not None
    if not there:
        check_board(port)
    if name is not None and "/" in name:
        refuse_elsewhere(name)
        path = name if is_uri(name) else str(Path(name).resolve())
    else:
        path = storage_root()
        if name is not None:
            found = find_run(path, name, run or "latest")
            path = found.location if run else join_path(path, name)
    if not (storage_at(path).below() if is_uri(path) else Path(path).is_dir()):
        raise UsageError(f"there are no runs in {path} yet; start one with: mlx train run")
    if there:
        companions.part("ray.remote_job").mirror(path)
    elif is_uri(path):
        companions.part("stores.board").serve(path, lambda copies: board_command(copies, port))
    else:
        os.execv(sys.executable, board_command(path, port))


def check_board(port: int) -> None:
    """Raise MissingLibraryError without TensorBoard, and UsageError if a port of this machine is not free."""
    require("tensorboard", "the page")
    check_port("127.0.0.1", port)


def check_port(host: str, port: int) -> int:
    """Return a port if it is free, or any free one for 0; raise UsageError if it is not."""
    try:
        with socket.create_server((host, port)) as free:
            return int(free.getsockname()[1])
    except OSError as error:
        cure = "choose another with --port, or any with --port 0"
        raise UsageError(f"cannot serve on port {port}: {os.strerror(error.errno or 0)}; {cure}") from error


def board_command(folder: str, port: int) -> list[str]:
    """Return the command that serves TensorBoard for a folder."""
    options = ["--logdir", folder, "--host", "127.0.0.1", "--port", str(port)]
    return [sys.executable, "-m", "tensorboard.main", *options]
