"""The queue of a Slurm cluster, asked through its own commands."""

import contextlib
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlx_runtime.companions.jobs.launching import JobState, PollingClient
from mlx_runtime.errors import ClusterError

TIMEOUT_S = 30.0  # of a command; Slurm's own timeout for messages is 10 s
SCHEME = "slurm://"
UP = "Is the controller up? Try: scontrol ping"

ENDED = {"COMPLETED": "SUCCEEDED", "CANCELLED": "STOPPED"} | dict.fromkeys(
    ("FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "PREEMPTED"), "FAILED"
)
"""Our statuses of jobs that have ended, by Slurm's."""

WAITING = {"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "CONFIGURING"}
"""Slurm's states of jobs that have not begun, perhaps again."""


@dataclass(frozen=True)
class Queue(PollingClient):
    """The queue of a cluster. Its address in the records of runs is `slurm://` and the name of the cluster."""

    url: str

    @classmethod
    def connect(cls, url: str | None = None) -> "Queue":
        """Connect to the cluster of this machine. Raises ClusterError if it does not answer, or has another address."""
        found = re.search(r"^ClusterName\s*=\s*(\S+)", run("scontrol", "show", "config"), re.MULTILINE)
        assert found is not None, "scontrol prints every setting"
        if (here := f"{SCHEME}{found[1]}") != (url or here):
            raise ClusterError(f"this machine belongs to {here}, not to {url}")
        return cls(here)

    def submit(self, script: Path, words: Sequence[str] = ()) -> str:
        """Submit a script as a job that is held until `release`, and return its id."""
        return run("sbatch", "--parsable", "--hold", *words, str(script)).strip().partition(";")[0]

    def release(self, job: str) -> None:
        run("scontrol", "release", job)

    def stop(self, job: str) -> None:
        """Cancel a job: it is removed from the queue, or receives SIGTERM and, after Slurm's `KillWait`, SIGKILL."""
        run("scancel", job)

    def state(self, job: str) -> JobState:
        """Return the state of a job, with Slurm's reason; raises ClusterError if Slurm does not know it any more."""
        fields = self._fields(job)
        state = state_of_job(fields["JobState"], fields["Reason"])
        code, _, number = fields["ExitCode"].partition(":")
        succeeded = 0 if state.status == "SUCCEEDED" else None  # a job that never ran has the exit code 0, too
        return JobState(state.status, state.message, int(code) or -int(number) or succeeded)

    def source(self, job: str) -> str:
        return self._fields(job)["StdOut"]

    def read(self, job: str, source: str, start: int) -> bytes:
        with contextlib.suppress(FileNotFoundError), Path(source).open("rb") as stream:  # the job has not begun
            stream.seek(start)
            return stream.read()
        return b""

    def _fields(self, job: str) -> dict[str, str]:
        """Return some of the fields of a job."""
        if not job.isdecimal():  # it comes from a record, which is not trusted
            raise ClusterError(f"{job!a} is not the id of a job of Slurm")
        text = run("scontrol", "show", "job", job)
        words = r"\b(JobState|Reason|ExitCode)=(\S+)"
        return dict(re.findall(words, text) + re.findall(r"^\s+(StdOut)=(.*)$", text, re.MULTILINE))


def client_of(job: Mapping[str, str], *, alive: bool) -> Queue | None:
    """Connect to the cluster of a job; None if it is another cluster, does not answer, or has forgotten the job."""
    with contextlib.suppress(ClusterError):
        queue = Queue.connect(job["address"])
        queue.state(job["id"])
        return queue
    return None


def job_statuses(jobs: set[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """Return the status of jobs by address and id, with Slurm's reason, like `PENDING (Priority)`.

    Without those of other clusters, and those that Slurm has forgotten.
    """
    with contextlib.suppress(ClusterError):
        here = Queue.connect().url
        asked = ",".join(sorted(job for address, job in jobs if address == here and job.isdecimal()))
        found: dict[str, str] = {}
        for command in (
            ("sacct", "-XnP", "--format=JobID,State,Reason", "--jobs", asked),
            ("squeue", "--noheader", "--states=all", "--format=%i|%T|%r", "--jobs", asked),  # knows more, but forgets
        ):
            with contextlib.suppress(ClusterError):  # no accounting, or only jobs that Slurm has forgotten
                for line in run(*command).splitlines() if asked else ():
                    job, state, reason = line.split("|")[:3]
                    found[job] = str(state_of_job(state, reason))
        return {(here, job): status for job, status in found.items()}
    return {}


def state_of_job(state: str, reason: str) -> JobState:
    """Return our state of a job from that of Slurm, which may have a suffix, `CANCELLED by 0`, and its reason."""
    state = state.partition(" ")[0]
    if state in ENDED:
        return JobState(ENDED[state], "" if state in ("COMPLETED", "CANCELLED", "FAILED") else state)
    return JobState("PENDING" if state in WAITING else "RUNNING", "" if reason in ("None", "") else reason)


def run(*command: str) -> str:
    """Run a command of Slurm, and return its output. Raises ClusterError with its words if it fails."""
    program = command[0]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except FileNotFoundError as error:
        raise ClusterError(f"{program} is not on the PATH", "Run this on a login node of a Slurm cluster") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ClusterError(f"{program} does not answer: {error}", UP) from error
    if done.returncode:
        lines = [re.sub(rf"^{program}: (error: )?", "", line) for line in done.stderr.splitlines() if line.strip()]
        why = "; ".join(dict.fromkeys(lines)) or f"exit code {done.returncode}"
        limits = "See the partitions and their limits with: sinfo --long"
        raise ClusterError(f"{program} failed: {why}", limits if program == "sbatch" else UP)
    return done.stdout
