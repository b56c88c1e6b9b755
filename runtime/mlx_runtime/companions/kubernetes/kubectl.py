"""Calls of kubectl, which knows the cluster and the user's credentials, and the RayJobs that it reports."""

import contextlib
import json
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlx_runtime.companions.jobs.launching import JobState, PollingClient
from mlx_runtime.companions.kubernetes.manifest import HEAD_CONTAINER, JOB_LABEL
from mlx_runtime.errors import ClusterError

ANSWER_S = 60.0
"""Timeout of a call."""

STATE_S = 10.0
"""Timeout of a call that asks for the states of jobs."""

LOGS = "/tmp/ray/session_latest/logs"
"""Folder in the pod of the head with the output of jobs."""

READ = '[ ! -f "$1" ] || tail -c "+$2" "$1"'
"""Command that prints a file, which may not be there yet, from a byte on."""

MISSING = "install kubectl, or print the manifest with --dry-run, for whoever has it"


@dataclass(frozen=True)
class Kubectl(PollingClient):
    """kubectl with the options of a launch. Methods raise `ClusterError`."""

    options: tuple[str, ...] = ()

    @classmethod
    def of(cls, context: str | None, namespace: str | None) -> "Kubectl":
        given = {"--context": context, "--namespace": namespace}
        return cls(tuple(f"{option}={value}" for option, value in given.items() if value))

    def run(self, *arguments: str, document: str = "", timeout_s: float = ANSWER_S) -> str:
        """Return the output of a call. Pass a manifest for `-f -` as `document`."""
        return self._bytes(*arguments, document=document, timeout_s=timeout_s).decode(errors="replace")

    def _bytes(self, *arguments: str, document: str = "", timeout_s: float = ANSWER_S) -> bytes:
        if (program := shutil.which("kubectl")) is None:
            raise ClusterError("there is no kubectl on the PATH", MISSING)
        command = [program, *self.options, *arguments]
        try:
            done = subprocess.run(command, input=document.encode(), capture_output=True, timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            raise ClusterError(f"kubectl {arguments[0]} did not end within {timeout_s:.0f} s") from error
        if done.returncode:
            printed = done.stderr.decode(errors="replace").splitlines()
            lines = [line for line in printed if line.strip()] or ["kubectl failed without a reason"]
            raise ClusterError("; ".join(lines).removeprefix("error: ").removeprefix("Error from server ").strip())
        return done.stdout

    def state(self, job: str) -> JobState:
        """Return the state of a job, by the name of its RayJob."""
        return _state(json.loads(self.run("get", f"rayjob/{job}", "--output=json", timeout_s=STATE_S)))

    def source(self, job: str) -> str | None:
        """Return the running pod of the head; a job that KubeRay starts again has another one."""
        labels = f"--selector={JOB_LABEL}={job},ray.io/node-type=head"
        pods = self.run("get", "pod", labels, "--field-selector=status.phase=Running", "--output=name").split()
        return pods[-1] if pods else None

    def read(self, job: str, source: str, start: int) -> bytes:
        words = ("/bin/sh", "-c", READ, "sh", f"{LOGS}/job-driver-{job}.log", str(start + 1))
        try:
            return self._bytes("exec", source, f"--container={HEAD_CONTAINER}", "--", *words)
        except ClusterError:
            if self.source(job) == source:
                raise
            return b""  # the pod has just been deleted

    def stop(self, job: str) -> None:
        """Delete a RayJob with its pods, whose hooks save a checkpoint."""
        self.run("delete", f"rayjob/{job}", "--wait=false")


def client_of(job: Mapping[str, str], *, alive: bool) -> Kubectl | None:
    """Return the client of a RayJob; None if the current context of kubectl does not know it."""
    namespace = _namespace(job["address"])
    if namespace is None:
        return None
    kubectl = Kubectl.of(None, namespace)
    with contextlib.suppress(ClusterError):
        kubectl.state(job["id"])
        return kubectl
    return None


def job_statuses(jobs: set[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """Return the status of jobs by address and id, without those that the current context of kubectl does not know."""
    found: dict[tuple[str, str], str] = {}
    for namespace in {_namespace(address) for address, _ in jobs} - {None}:
        with contextlib.suppress(ClusterError):
            answer = Kubectl.of(None, namespace).run("get", "rayjobs", "--output=json", timeout_s=STATE_S)
            known = {item["metadata"]["name"]: str(_state(item)) for item in json.loads(answer)["items"]}
            asked = {key for key in jobs if _namespace(key[0]) == namespace}
            found |= {(address, job): known[job] for address, job in asked if job in known}
    return found


def _namespace(address: str) -> str | None:
    """Return the namespace in an address like `kube://team/digits-4f1c9a`; empty for that of kubectl.

    None if this is no such address: the record that it is from may have been edited.
    """
    _, separator, path = address.partition("://")
    return path.partition("/")[0] if separator else None


def _state(rayjob: Mapping[str, Any]) -> JobState:
    """Return the state of a RayJob, with what KubeRay is doing before its command runs, perhaps again."""
    status = rayjob.get("status") or {}
    deployment = status.get("jobDeploymentStatus", "")
    if deployment == "Complete":
        return JobState(status.get("jobStatus") or "SUCCEEDED")
    if deployment in ("Failed", "ValidationFailed"):
        return JobState("FAILED", status.get("reason") or deployment)
    return JobState("RUNNING") if deployment == "Running" else JobState("PENDING", deployment)
