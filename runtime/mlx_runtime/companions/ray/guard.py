"""Submits the job of a run or sweep again when it is lost, with its node or because its process was killed.

    python -m mlx_runtime.companions.ray.guard FOLDER

starts the guard of a folder, in place of an earlier one: a detached actor, if possible on another node than this
process. Ray restarts it elsewhere when its node is lost, so it keeps nothing but the folder: the record names the job
to watch, and counts the retries. It ends with the run.

It acts only if the job was killed before it could decide how the run continues. As it decides by the record, two
drivers never write one run: each claims an attempt, see `supervision`.
"""

import contextlib
import itertools
import re
import shlex
import signal
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

import ray
from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mlx_runtime.companions.ray import supervision
from mlx_runtime.errors import short_message
from mlx_runtime.exits import clean_exit
from mlx_runtime.runs import drivers, records
from mlx_runtime.runs.folder import RunFolder, named_run
from mlx_runtime.settings import Settings
from mlx_runtime.storage import documents
from mlx_runtime.storage.leases import is_alive

POLL_S = 5.0
"""Interval for looking at the job."""

START_S = 120.0
"""Maximum time for the actor to start."""

NAMESPACE = "mlx"

KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)


class Guard:
    """The actor. Its thread watches the job of a folder."""

    def __init__(self, location: str) -> None:
        context = ray.get_runtime_context()
        self._watch, self._actor = Watch(location, context.gcs_address), context.current_actor
        threading.Thread(target=self._run, name="guard", daemon=True).start()

    def ready(self) -> None:
        """Return when the actor runs."""

    def _run(self) -> None:
        answered, problem = time.monotonic(), ""
        while time.monotonic() - answered < supervision.PATIENCE_S:
            try:
                if self._watch.has_ended():
                    break
                answered = time.monotonic()
            except Exception as error:  # Ray and the storage raise various types while they do not answer
                problem = short_message(error)
                print(f"guard of {self._watch.location}: {problem}", file=sys.stderr, flush=True)
            time.sleep(POLL_S)
        else:
            with contextlib.suppress(Exception):
                self._watch.give_up(problem)
        ray.kill(self._actor, no_restart=True)


class Watch:
    """The decisions of a guard.

    Args:
        location: folder of the run.
        address: address of the cluster.
    """

    def __init__(self, location: str, address: str) -> None:
        self.location, self._address = location, address
        self._lost: tuple[str, float] | None = None  # the job that is lost, and when that was noticed

    def give_up(self, problem: str) -> None:
        """Record that a run could not be submitted again."""
        folder = named_run(self.location, "", "")
        stored = records.load_record(folder)
        if stored["status"] == "PENDING" and stored.get("retries"):
            records.Record(folder, stored).finish("FAILED", error=f"its job could not be submitted again: {problem}")

    def has_ended(self) -> bool:
        """Return True if the run has ended for good. Submit its job again if that is lost."""
        folder = named_run(self.location, "", "")
        stored = records.load_record(folder)
        job = stored.get("job") or {"id": "", "address": ""}
        if not job["address"].startswith("http"):  # resumed elsewhere
            return True
        client = JobSubmissionClient(self._address)  # each time, because a new head may have another address
        details = self._details(client, job["id"])
        if details is None:  # the last submission has failed, or this actor was lost before it
            if not stored.get("retries"):
                return True
            launched = client.get_job_info(_launched()["id"])
            _submit(client, job["id"], launched)
            return False
        if supervision.__name__ not in shlex.split(details.entrypoint):  # launched again, without retries
            return True
        if not details.status.is_terminal():
            if _lost_node(details) is None:  # a restarted head keeps listing the job as running
                return False
        elif details.status != JobStatus.FAILED or details.driver_exit_code not in (None, *KILLED):
            return True
        status, stopped = stored["status"], stored.get("stop_reason") in (None, signal.SIGTERM.name)
        if status not in records.LIVING and not (status == "STOPPED" and stopped):
            return True
        alive = status in records.LIVING and status != "PENDING" and is_alive(stored)
        if alive or drivers.claiming_driver(folder, stored):
            return False  # until its lease has expired
        return self._submit_again(client, folder, stored, details)

    def _submit_again(
        self, client: JobSubmissionClient, folder: RunFolder, stored: Mapping[str, Any], lost: JobDetails
    ) -> bool:
        """Record that a run is pending, and submit its job again. Return True if the run has ended instead."""
        words, why = shlex.split(lost.entrypoint), _reason(lost)
        most, died = int(words[words.index(supervision.__name__) + 1]), stored.get("retries", 0) + 1
        if self._lost is None or self._lost[0] != stored["job"]["id"]:
            self._lost = stored["job"]["id"], time.monotonic()
        claimed, names = folder.attempts(), folder.names()
        folder.path.mkdir(parents=True, exist_ok=True)  # with a URI, another node may have the working copy
        if RunFolder.STOP in names or died > most:
            record = records.Record(folder, stored, attempt=claimed, waits_for=None)
            folder.withdraw(RunFolder.STOP)
            if RunFolder.STOP in names:
                record.finish("STOPPED")
            else:
                record.finish("FAILED", error=f"{why}, after {most} of {most} retries")
            return True
        if stored["status"] == "PENDING" and time.monotonic() < self._lost[1] + supervision.pause_s(died):
            return False  # the job has not even begun
        taken = {item.submission_id for item in client.list_jobs()}
        title = re.sub(r"[^A-Za-z0-9_.-]", "-", f"{folder.experiment}-{folder.name}")
        job = next(name for number in itertools.count(claimed + 1) if (name := f"{title}.{number}") not in taken)
        facts: dict[str, Any] = dict.fromkeys(("boot", "pid", "pid_started", "host", "waits_for"))
        facts |= {"status": "PENDING", "start": documents.now(), "attempt": claimed}
        facts |= {"retries": died, "job": _launched() | {"id": job}}
        records.Record(folder, supervision.with_attempt(stored, why), **facts)
        if records.load_record(folder)["job"]["id"] == job:  # otherwise, another driver has just claimed the run
            _submit(client, job, lost)
        return False

    def _details(self, client: JobSubmissionClient, job: str) -> JobDetails | None:
        """Return the facts about a job; None if the cluster does not know it."""
        try:
            return client.get_job_info(job)
        except RuntimeError:
            if any(item.submission_id == job for item in client.list_jobs()):
                raise
            return None


def _lost_node(details: JobDetails) -> str | None:
    """Return the address of the node of a driver if it has been lost."""
    nodes = {node["NodeID"]: node for node in ray.nodes() if not node["Alive"]}
    node = nodes.get(details.driver_node_id or "")
    return str(node["NodeManagerAddress"]) if node else None


def _reason(lost: JobDetails) -> str:
    """Return the error of an attempt whose job was lost."""
    if address := _lost_node(lost):
        return f"the node {address} of the driver was lost"
    if lost.driver_exit_code in KILLED:
        return "the job of the driver was killed"
    return f"the job of the driver has failed: {(lost.message or 'without a message').strip().splitlines()[0]}"


def _launched() -> dict[str, str]:
    """Return the job that has started the guard."""
    launched = Settings.read().job
    assert launched is not None, "this actor inherits the environment of a job"
    return launched


def _submit(client: JobSubmissionClient, job: str, like: JobDetails) -> None:
    """Submit a job like an earlier one."""
    environment = dict(like.runtime_env or {})
    environment["env_vars"] = environment.get("env_vars", {}) | {"MLX_JOB": job}
    client.submit_job(entrypoint=like.entrypoint, submission_id=job, runtime_env=environment, metadata=like.metadata)


def start(location: str) -> None:
    """Start the guard of a folder on the cluster of this job, in place of an earlier one."""
    ray.init(logging_level="ERROR", log_to_driver=False)
    here = ray.get_runtime_context().get_node_id()
    others = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != here]
    options: dict[str, Any] = {"name": f"guard of {location}", "namespace": NAMESPACE, "lifetime": "detached"}
    if others:
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(others[0], soft=True)
    deadline = time.monotonic() + START_S
    with contextlib.suppress(ValueError):  # there is none
        # It would keep the code of an earlier job in the cluster, instead of that of this one.
        ray.kill(ray.get_actor(options["name"], options["namespace"]), no_restart=True)
    while True:
        try:
            guard = ray.remote(Guard).options(**options, max_restarts=-1, num_cpus=0).remote(location)
            break
        except ValueError:  # the earlier one has not ended yet
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
    ray.get(guard.ready.remote(), timeout=START_S)


if __name__ == "__main__":
    from mlx_runtime.companions.ray import guard  # not __main__, which the actor could not import

    with clean_exit():
        guard.start(sys.argv[1])
