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
from mlx_runtime.runs import RunFolder, drivers, named_run, records
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
        self._location = location
        context = ray.get_runtime_context()
        self._address, self._actor = context.gcs_address, context.current_actor
        threading.Thread(target=self._watch, name="guard", daemon=True).start()

    def ready(self) -> None:
        """Return when the actor runs."""

    def _watch(self) -> None:
        answered = time.monotonic()
        while time.monotonic() - answered < supervision.PATIENCE_S:
            try:
                if self._has_ended():
                    break
                answered = time.monotonic()
            except Exception as error:  # Ray and the storage raise various types while they do not answer
                print(f"guard of {self._location}: {short_message(error)}", file=sys.stderr, flush=True)
            time.sleep(POLL_S)
        ray.kill(self._actor, no_restart=True)

    def _has_ended(self) -> bool:
        """Return True if the run has ended for good. Submit its job again if that is lost."""
        folder = named_run(self._location, "", "")
        stored = records.load_record(folder)
        job = stored.get("job") or {"id": "", "address": ""}
        if not job["address"].startswith("http"):  # resumed elsewhere
            return True
        client = JobSubmissionClient(self._address)  # each time, because a new head may have another address
        details = self._details(client, job["id"])
        if details is None:  # this actor was lost before it could submit that job
            return not stored.get("retries") or self._submit(client, folder, stored, None)
        if supervision.__name__ not in shlex.split(details.entrypoint):  # launched again, without retries
            return True
        if not details.status.is_terminal():
            if _lost_node(details) is None:  # a new head would list the job as running for ever
                return False
        elif details.status != JobStatus.FAILED or details.driver_exit_code not in (None, *KILLED):
            return True
        status, stopped = stored["status"], stored.get("stop_reason") in (None, signal.SIGTERM.name)
        if status not in records.LIVING and not (status == "STOPPED" and stopped):
            return True
        alive = status in records.LIVING and status != "PENDING" and is_alive(stored)
        if alive or drivers.claiming_driver(folder, stored):
            return False  # until its lease has expired
        return self._submit(client, folder, stored, details)

    def _submit(
        self, client: JobSubmissionClient, folder: RunFolder, stored: Mapping[str, Any], lost: JobDetails | None
    ) -> bool:
        """Submit the job of a run again, and record that it is pending. Return True if the run has ended instead."""
        launched = Settings.read().job
        assert launched is not None, "this actor inherits the environment of a job"
        why, details = _reason(lost), lost or client.get_job_info(launched["id"])
        words = shlex.split(details.entrypoint)
        most, died = int(words[words.index(supervision.__name__) + 1]), stored.get("retries", 0) + 1
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
        if stored["status"] == "PENDING":  # the last job has not even begun
            time.sleep(supervision.pause_s(died))
        taken = {item.submission_id for item in client.list_jobs()}
        title = re.sub(r"[^A-Za-z0-9_.-]", "-", f"{folder.experiment}-{folder.name}")
        job = next(name for number in itertools.count(claimed + 1) if (name := f"{title}.{number}") not in taken)
        before = supervision.with_attempt(stored, why)
        facts: dict[str, Any] = dict.fromkeys(("boot", "pid", "pid_started", "host", "waits_for"))
        facts |= {"status": "PENDING", "start": documents.now(), "attempt": claimed}
        facts |= {"retries": died, "job": launched | {"id": job}}
        record = records.Record(folder, before, **facts)
        environment = dict(details.runtime_env or {})
        environment["env_vars"] = environment.get("env_vars", {}) | {"MLX_JOB": job}
        try:
            client.submit_job(
                entrypoint=details.entrypoint, submission_id=job, runtime_env=environment, metadata=details.metadata
            )
        except BaseException:
            record.update(**{name: stored.get(name) for name in {*facts, "attempts"} & stored.keys()})
            raise
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


def _reason(lost: JobDetails | None) -> str:
    """Return the error of an attempt whose job was lost."""
    address = _lost_node(lost) if lost else None
    return f"the node {address} of the driver was lost" if address else "the job of the driver was killed"


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
