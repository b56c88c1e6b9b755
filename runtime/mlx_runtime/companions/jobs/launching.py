"""Launched jobs of any scheme: how they are launched, asked and ended, and the records of runs that wait for them.

For the scheme of their addresses, `companions.COMPANIONS` names a module with two functions:

client_of(job, *, alive)    the `JobClient` of a job `{"id": ..., "address": ...}`; None if it cannot be asked
job_statuses(jobs)          the statuses of jobs by address and id, perhaps with a reason: `PENDING (Priority)`
"""

import abc
import codecs
import contextlib
import shlex
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mlx_runtime.driver.arguments import Request
from mlx_runtime.errors import ClusterError, MlxError, RunStopped, StorageError, full_message, short_message
from mlx_runtime.runs import drivers, records, snapshots
from mlx_runtime.runs.folder import RUN, SWEEP, RunFolder, claim_run
from mlx_runtime.runs.logs import last_lines
from mlx_runtime.settings import Settings
from mlx_runtime.storage import documents
from mlx_runtime.storage.files import storage_root
from mlx_runtime.storage.redaction import redact

if TYPE_CHECKING:
    from mlx_runtime.driver.request import RunConfig

FOLLOW_S = 1.0  # interval for reading the output of a job
STARTUP_S = 30.0  # maximum wait for a job to begin, in order to report failures during startup
SILENCE_S = 60.0  # maximum silence of a cluster while the output of a job is followed
FAILED_LOG_LINES = 40


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


class PollingClient(abc.ABC):
    """A client of jobs whose output is a file that grows. It is read again and again, but only what is new."""

    @abc.abstractmethod
    def state(self, job: str) -> JobState: ...

    @abc.abstractmethod
    def stop(self, job: str) -> None: ...

    @abc.abstractmethod
    def source(self, job: str) -> str | None:
        """Return where the output of a job is now, or None if there is none yet, or no more."""

    @abc.abstractmethod
    def read(self, job: str, source: str, start: int) -> bytes:
        """Return the output at a source from a byte on."""

    def log(self, job: str) -> str:
        if (source := self.source(job)) is None:
            raise ClusterError(f"there is no output of {job} yet, or no more")
        return self.read(job, source, 0).decode(errors="replace")

    def follow(self, job: str, write: Callable[[str], object], tail: int | None = None) -> JobState:
        """Write the output as it grows, also while the job waits, perhaps again, and return its last state.

        Raises ClusterError if the cluster does not answer for `SILENCE_S`, does not know the job any more, or has no
        output of a job that has ended.
        """
        source, seen, decoder = None, 0, codecs.getincrementaldecoder("utf-8")("replace")
        known, deadline = False, time.monotonic() + SILENCE_S
        while True:
            state = None
            try:
                state, found = self.state(job), source
                content = self.read(job, source, seen) if source is not None else b""
                if not content:
                    found = self.source(job)
            except ClusterError as error:
                deleted = state is None and "NotFound" in str(error)  # as kubectl calls it
                if deleted or time.monotonic() > deadline:
                    raise
                time.sleep(FOLLOW_S)
                continue
            deadline = time.monotonic() + SILENCE_S
            if content:
                text = decoder.decode(content)
                write(text if tail is None or seen else last_lines(text, tail))
                seen += len(content)
            elif found != source:
                source, seen, known = found, 0, True
                continue
            elif state.ended and not known:
                raise ClusterError(f"there is no output of {job} any more, which has {state}")
            elif state.ended:
                return state
            time.sleep(FOLLOW_S)


@dataclass(frozen=True)
class SubmittedJob:
    """A job that a cluster has accepted.

    Attributes:
        facts: facts to print by title.
        run: its run or sweep, which the job begins within `STARTUP_S` or reports why not; None if the job may stay in a
            queue for days.
    """

    client: JobClient
    id: str
    facts: Mapping[str, str]
    run: RunFolder | None = None

    def follow(self) -> int:
        """Print the output of the job until it ends. Return its exit code."""
        return self.client.follow(self.id, partial(print, end="", flush=True)).exit_code

    def wait(self) -> str:
        """Return the status of the job, once its run has begun; PENDING if it has not, or if the cluster is silent.

        Raises:
            ClusterError: the job has failed.
        """
        deadline = time.monotonic() + (STARTUP_S if self.run is not None else 0)
        while True:
            state = JobState("PENDING")
            with contextlib.suppress(ClusterError):  # it has accepted the job
                state = self.client.state(self.id)
            begun = self.run is None or records.load_record(self.run)["status"] != "PENDING"
            if state.ended or begun or time.monotonic() >= deadline:
                break
            time.sleep(0.3)
        if self.run is None:
            return str(state)  # with the reason for which it waits
        if state.ended and state.exit_code:
            log = ""
            with contextlib.suppress(ClusterError):  # there is none
                log = last_lines(self.client.log(self.id), FAILED_LOG_LINES)
            raise ClusterError(f"{self.id} failed during startup: {state.reason}\n{log}".rstrip())
        return state.status if state.ended or begun else "PENDING"


class Launch(abc.ABC):
    """An experiment and options that have passed the checks of a cluster."""

    config: "RunConfig"

    @abc.abstractmethod
    def submit_run(self) -> SubmittedJob:
        """Submit the run to resume, or a new one."""

    @abc.abstractmethod
    def submit_sweep(
        self, sweep: RunFolder | None, name: str, words: Sequence[str], definition: Mapping[str, Any]
    ) -> SubmittedJob:
        """Submit `mlx train sweep` with these words, for an existing sweep or a new one of this name."""


class ClaimingLaunch(Launch):
    """A launch from a machine that sees the storage: the folder of the run or sweep is created here."""

    def submit_run(self, driver: Sequence[str] = ("main.py",), **metadata: str) -> SubmittedJob:
        """Claim the run, or find the one to resume, and submit it.

        `driver` is the script or module of the job, before the arguments of main.py; `metadata` is kept with the job.

        If the cluster rejects the job, the record becomes FAILED, or is restored if the run was to be resumed.
        """
        config = self.config
        run = config.run or self._claim(RUN)
        before = drivers.refuse_living(run) if config.run else {}
        origin = config.origin.location if config.origin else None
        request = Request(config.overrides, origin=origin, claimed=run.location)
        return self._submit_driver(run, before, [*driver, *request.words], metadata)

    def submit_sweep(
        self, sweep: RunFolder | None, name: str, words: Sequence[str], definition: Mapping[str, Any]
    ) -> SubmittedJob:
        folder = sweep or self._claim(SWEEP, name)
        before = drivers.refuse_living(folder) if sweep else {}
        command = ["-m", "mlx_runtime", "train", "sweep", f"--resume={folder.location}", *words]
        new = {} if sweep else {"definition": dict(definition), "trials": []}
        return self._submit_driver(folder, before, command, {}, **new)

    def _claim(self, kind: str, name: str = "") -> RunFolder:
        """Create the folder of a run, or that of a sweep with its code."""
        cfg = self.config.cfg
        folder = claim_run(storage_root(cfg.storage_path), cfg.name, kind, name=name)
        if kind == SWEEP:
            snapshots.store(Path.cwd(), folder)
        return folder

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
