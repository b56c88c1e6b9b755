"""Launched jobs of any scheme: how they are launched, asked and ended, and the records of runs that wait for them.

For the scheme of their addresses, `companions.COMPANIONS` names a module with two functions:

client_of(job, *, alive)    the `JobClient` of a job `{"id": ..., "address": ...}`; None if it cannot be asked
job_statuses(jobs)          the statuses of jobs by address and id, perhaps with a reason: `PENDING (Priority)`
"""

import abc
import contextlib
import shlex
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mlx_runtime.driver.arguments import Request
from mlx_runtime.errors import ClusterError, MlxError, RunStopped, StorageError, full_message, short_message
from mlx_runtime.runs import drivers, records, snapshots
from mlx_runtime.runs.folder import RUN, SWEEP, RunFolder, claim_run
from mlx_runtime.settings import Settings
from mlx_runtime.storage import documents
from mlx_runtime.storage.files import storage_root
from mlx_runtime.storage.redaction import redact

if TYPE_CHECKING:
    from mlx_runtime.driver.request import RunConfig


@dataclass(frozen=True)
class JobState:
    """State of a job: PENDING, RUNNING, STOPPED, SUCCEEDED or FAILED, with the cluster's explanation."""

    status: str
    message: str = ""
    return_code: int | None = None  # of the command, once it has ended
    metadata: Mapping[str, str] = field(default_factory=dict)  # given when it was submitted

    @property
    def ended(self) -> bool:
        return self.status in ("SUCCEEDED", "FAILED", "STOPPED")

    @property
    def reason(self) -> str:
        """First line of the message, without the log that may follow it."""
        return self.message.strip().partition("\n")[0].partition(", last available logs")[0]

    @property
    def exit_code(self) -> int:
        """Exit code of a process that represents the job: 128 + N if signal N killed the job."""
        if self.return_code is not None:
            return self.return_code if self.return_code >= 0 else 128 - self.return_code
        return {"SUCCEEDED": 0, "STOPPED": 128 + signal.SIGTERM}.get(self.status, 1)

    def __str__(self) -> str:
        """The status for a table, like `PENDING (Priority)`."""
        return f"{self.status} ({self.message})" if self.message else self.status


class JobClient(Protocol):
    """The jobs of a cluster. Methods raise `ClusterError` if it does not answer, or does not know the job."""

    def state(self, job: str) -> JobState: ...

    def log(self, job: str) -> str:
        """Return the output of a job so far."""

    def follow(self, job: str, write: Callable[[str], object], tail: int | None = None) -> JobState:
        """Write the output of a job until it ends, beginning with the last `tail` lines, and return its last state."""

    def stop(self, job: str) -> None:
        """Remove a job that has not begun; end any other one, with time for a checkpoint."""


class SubmittedJob(Protocol):
    """A job that a cluster has accepted."""

    @property
    def facts(self) -> Mapping[str, str]:
        """Facts to print by title."""

    def follow(self) -> int:
        """Print the output of the job until it ends. Return its exit code."""

    def wait(self) -> str:
        """Return the status of the job; the cluster decides how long it waits for the job to begin."""


class Launch(Protocol):
    """An experiment and options that have passed the checks of a cluster."""

    def submit_run(self) -> SubmittedJob:
        """Submit the run of the config, or the run to resume."""

    def submit_sweep(
        self, sweep: RunFolder | None, name: str, words: Sequence[str], definition: Mapping[str, Any]
    ) -> SubmittedJob:
        """Submit `mlx train sweep` with these words, for an existing sweep or a new one of this name."""


class ClaimingLaunch(abc.ABC):
    """A launch from a machine that sees the storage: the folder of the run or sweep is created here."""

    config: "RunConfig"

    def submit_run(self) -> SubmittedJob:
        """Submit the run to resume, or a new one."""
        config = self.config
        run = config.run or self._claim(RUN)
        before = drivers.refuse_living(run) if config.run else {}
        origin = self._location(config.origin) if config.origin else None
        request = Request(config.overrides, origin=origin, claimed=self._location(run))
        return self._submit_driver(run, before, ["main.py", *request.words], {})

    def submit_sweep(
        self, sweep: RunFolder | None, name: str, words: Sequence[str], definition: Mapping[str, Any]
    ) -> SubmittedJob:
        """Submit `mlx train sweep --resume` with these words, for an existing sweep or a new one of this name."""
        folder = sweep or self._claim(SWEEP, name)
        before = drivers.refuse_living(folder) if sweep else {}
        command = ["-m", "mlx_runtime", "train", "sweep", f"--resume={self._location(folder)}", *words]
        new = {} if sweep else {"definition": dict(definition), "trials": []}
        return self._submit_driver(folder, before, command, {}, **new)

    def _claim(self, kind: str, name: str = "") -> RunFolder:
        """Create the folder of a run, or that of a sweep with its code."""
        cfg = self.config.cfg
        folder = claim_run(storage_root(cfg.storage_path), cfg.name, kind, name=name)
        if kind == SWEEP:
            snapshots.store(Path.cwd(), folder)
        return folder

    def _location(self, folder: RunFolder) -> str:
        """Return the folder or URI of a run, as its job sees it."""
        return folder.location

    @abc.abstractmethod
    def _submit_driver(
        self,
        run: RunFolder,
        before: Mapping[str, Any],
        command: Sequence[str],
        metadata: Mapping[str, str],
        **fields: Any,
    ) -> SubmittedJob:
        """Submit the driver of a claimed run or sweep, and record that it is pending.

        Args:
            run: folder of the run.
            before: record of a run to resume; empty for a new one.
            command: arguments of Python that start the driver.
            metadata: kept by the cluster with the job.
            fields: further fields of the record.
        """


@dataclass(frozen=True)
class QueuedJob:
    """A job in a queue, where it may stay for days, and facts to print by title."""

    client: JobClient
    id: str
    facts: Mapping[str, str]

    def follow(self) -> int:
        """Print the output of the job until it ends. Return its exit code."""
        return self.client.follow(self.id, partial(print, end="", flush=True)).exit_code

    def wait(self) -> str:
        """Return the status of the job now; PENDING if the cluster does not tell, because it has accepted the job."""
        try:
            return str(self.client.state(self.id))
        except ClusterError:
            return "PENDING"


@contextlib.contextmanager
def pending(
    run: RunFolder, before: Mapping[str, Any], overrides: Sequence[str], /, **fields: Any
) -> Iterator[records.Record]:
    """Record that a claimed run waits for its job, whose driver continues the record.

    If the block, which submits the job or is its driver, fails or is interrupted before the run has begun, the run has
    failed. A run that was to be resumed has its previous record again instead.

    Args:
        run: folder of the run.
        before: record of a run to resume; empty for a new one.
        overrides: overrides of the launch.
        fields: further fields of the record, such as its `job`.
    """
    known = records.provenance(overrides)
    facts: dict[str, Any] = {name: known[name] for name in records.LAUNCHER_FACTS if name in known}
    facts |= dict.fromkeys(("boot", "pid", "pid_started", "host"))  # of the previous driver
    facts |= {"status": "PENDING", "start": documents.now(), "job": None, **fields}
    if before:
        facts |= {"attempts": records.attempts(before), records.REPLACED: before}
    run.path.mkdir(parents=True, exist_ok=True)  # with a URI, another machine may have the working copy
    record = records.Record(run, before, **facts)
    try:
        yield record
    except (MlxError, OSError, KeyboardInterrupt) as error:
        with contextlib.suppress(StorageError):  # it may be what failed
            if records.load_record(run).get("status") != "PENDING":  # the driver has recorded the end
                pass
            elif before:
                record.withdraw()
            elif not isinstance(error, RunStopped):  # the next attempt of its job begins it
                message = full_message(error) if isinstance(error, MlxError) else short_message(error)
                record.finish("FAILED", error=redact(message))
        raise


def typed_name(run: RunFolder, overrides: Sequence[str]) -> str:
    """Return the words that name a run in commands: its location, if they would look in another storage."""
    elsewhere = Settings.read().storage or any("cfg.storage_path" in item for item in overrides)
    return shlex.join([run.location] if elsewhere else [run.experiment, run.name])
