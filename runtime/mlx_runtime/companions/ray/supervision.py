"""The entry point of jobs with `--retries`: starts the driver of a run or sweep, and another one when it dies.

    python -m mlx_runtime.companions.ray.supervision RETRIES FOLDER main.py --run=FOLDER ...

It is the parent process of the driver and imports neither torch nor Ray, so it survives most of the reasons for which
a driver dies. Drivers are fenced as always: each claims an attempt in the folder. Between two of them, this process
owns the record, and it gives up if anyone else has claimed the run. If this process or its node is lost, the job ends.
"""

import contextlib
import ctypes
import datetime
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from mlx_runtime.companions.jobs.endings import TERMINATED, DriverEnd
from mlx_runtime.companions.ray.jobs import SUPERVISED, end_as_stopped
from mlx_runtime.errors import StorageError
from mlx_runtime.exits import clean_exit
from mlx_runtime.runs import records
from mlx_runtime.runs.folder import RunFolder, attempt_name, named_run
from mlx_runtime.runs.logs import LogFile, log_name
from mlx_runtime.settings import Settings
from mlx_runtime.storage import documents, leases
from mlx_runtime.workers.deadlocks import answer_request
from mlx_runtime.workers.fork_server import exit_reason

PAUSE_S, MAX_PAUSE_S = 5.0, 300.0
"""Pause before another driver starts, doubled after each one that ends within `STEADY_S`, and its maximum."""

STEADY_S = 600.0
"""Time after which a driver has worked, so that the pauses begin at `PAUSE_S` again."""

MAX_REQUEUES = 100
"""Maximum number of preemptions after which a run continues."""

POLL_S = 1.0
"""Interval for looking at requests to stop during a pause."""

PATIENCE_S = 600.0
"""Maximum time for a storage that does not answer."""

_PR_SET_PDEATHSIG = 1

Result = TypeVar("Result")


class Supervisor:
    """Starts drivers of a run or sweep, one after another, until one of them ends for good.

    Args:
        folder: folder of the run or sweep, whose record is PENDING for this job.
        command: command of a driver.
        retries: maximum number of drivers that are started after one has died.
    """

    def __init__(self, folder: RunFolder, command: Sequence[str], retries: int) -> None:
        self._folder, self._command, self._retries = folder, command, retries
        self._record: records.Record | None = None  # of this process, once a driver has died
        self._stopping = False
        self._died = self._requeued = self._short = 0
        self._libc = ctypes.CDLL(None)  # here, because little is safe between fork and exec

    def run(self) -> int:
        """Return the exit code of the last driver, as a shell does."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        while True:
            before, claimed = _patiently(self._stored), _patiently(self._folder.attempts)
            started = time.monotonic()
            pid, code = self._drive()
            end = _patiently(lambda: self._end_of(pid, code, claimed, before))  # noqa: B023 - called at once
            if end is None:
                return self._give_up(code)
            self._died += end.next == "retry"
            self._requeued += end.next == "requeue"
            exhausted = self._died > self._retries or self._requeued > MAX_REQUEUES
            why = "the run was preempted" if end.status == "STOPPED" else f"the driver {exit_reason(code)}"
            if self._stopping or exhausted or end.next == "done":
                return self._close(end, why)
            self._short = 1 if time.monotonic() - started > STEADY_S else self._short + 1
            title = f"retry {self._died} of {self._retries}" if end.next == "retry" else f"requeue {self._requeued}"
            claimed = _patiently(self._folder.attempts)
            self._pause(why, claimed, title)
            if _patiently(self._folder.attempts) > claimed:
                return self._give_up(code)
            if self._stopping:
                return self._close(DriverEnd(TERMINATED, "WAITING"), why)

    def _stop(self, *_: object) -> None:
        self._stopping = True

    def _drive(self) -> tuple[int, int]:
        """Run a driver. Return its process id and exit code."""
        driver = subprocess.Popen(
            self._command,
            env=os.environ | {SUPERVISED: "1"},
            preexec_fn=lambda: self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),
        )
        with contextlib.ExitStack() as stack:
            if self._record is not None:
                stack.enter_context(self._record.alive())  # until the driver has claimed the run
            asked = False
            while driver.poll() is None:
                time.sleep(POLL_S / 2)
                if self._stopping and not asked and driver.poll() is None:
                    # Ray sends SIGTERM to the driver as well, but others may not. Repeating it would end the run
                    # without a checkpoint.
                    asked = True
                    with contextlib.suppress(StorageError):
                        self._folder.ask(RunFolder.STOP)
            if asked:
                self._folder.withdraw(RunFolder.STOP)
        return driver.pid, driver.returncode

    def _end_of(self, pid: int, code: int, claimed: int, before: Mapping[str, Any]) -> DriverEnd | None:
        """Return the end of a driver; None if another process has claimed the run.

        `claimed` and `before` are the number of attempts and the record before the driver was started.
        """
        newest, record = self._folder.attempts(), self._stored()
        if newest == claimed:
            return DriverEnd(code, "PENDING")
        lease: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            lease = records.parse_record(self._folder.document(attempt_name(newest)))
        if (lease.get("boot"), lease.get("pid")) != (leases.this_process()["boot"], pid):
            return None
        if record.get("attempt") != newest:  # it had just claimed the run, or has put the previous record back
            put_back = records.REPLACED not in record and record["status"] != "PENDING"
            return DriverEnd(code, "FAILED" if put_back else "RUNNING")
        saved = record.get("latest") not in (None, before.get("latest"))
        return DriverEnd(code, record["status"], record.get("stop_reason"), saved)

    def _pause(self, why: str, claimed: int, title: str) -> None:
        """Own the record for a while, as the reason for which the run waits, then leave it to the next driver."""
        seconds = min(PAUSE_S * 2.0 ** (self._short - 1), MAX_PAUSE_S)
        begins = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=seconds)
        self._print(f"retry     {why}; {title} begins at {begins:%H:%M:%S} UTC")
        facts = leases.this_process() | {"status": "WAITING", "start": documents.now(), "attempt": claimed}
        facts |= {"waits_for": f"{title} at {begins:%H:%M:%S} UTC: {why}"}
        stored = _with_attempt(_patiently(self._stored), why)
        record = self._record = _patiently(lambda: records.Record(self._folder, stored, **facts))
        with record.alive():
            until = time.monotonic() + seconds
            while time.monotonic() < until and not self._stopping:
                time.sleep(POLL_S)
                names = _patiently(self._folder.names)
                self._stopping = self._stopping or RunFolder.STOP in names
                if RunFolder.LOCATE in names:
                    answer_request(self._folder, [], 0)
        if not self._stopping:
            _patiently(lambda: record.update(status="PENDING", waits_for=None))

    def _close(self, end: DriverEnd, why: str) -> int:
        """Record the end of the run, unless its driver has done so. Return the exit code of this process."""
        code = end.exit_code
        self._folder.withdraw(RunFolder.STOP)
        stored, attempt = _patiently(self._stored), _patiently(self._folder.attempts)
        unrecorded = stored["status"] in records.LIVING
        if unrecorded and (self._stopping or end.next == "retry" or self._record is not None):
            record = records.Record(
                self._folder, stored, attempt=attempt, waits_for=None, stop_reason=stored.get("stop_reason")
            )
            if self._stopping and records.REPLACED in stored:
                record.withdraw()
            elif self._stopping:
                record.finish("STOPPED")
            else:
                error = f"{why}, after {self._died - (end.next == 'retry')} of {self._retries} retries"
                record.finish("FAILED", error=error)
                self._print(f"error: {error}")
        if code and self._stored()["status"] == "STOPPED" and (job := Settings.read().job):
            end_as_stopped(job)
        return code

    def _give_up(self, code: int) -> int:
        self._print(f"{self._folder.title} was taken over by another driver, so this job ends")
        return code if code >= 0 else 128 - code

    def _stored(self) -> dict[str, Any]:
        return records.load_record(self._folder)

    def _print(self, text: str) -> None:
        """Print a line, and append it to the log of the drivers."""
        print(text, flush=True)
        log = LogFile(self._folder, log_name())
        log.write(f"{text}\n")
        log.close()


def _with_attempt(stored: Mapping[str, Any], why: str) -> dict[str, Any]:
    """Return the record of a run with its last attempt, which is over, in the history."""
    ended = {**stored, "error": why, "end": stored.get("end") or documents.now()}
    ended |= {"status": "FAILED"} if stored["status"] in records.LIVING else {}
    return {**stored, "attempts": records.attempts(ended)}


def _patiently(call: Callable[[], Result]) -> Result:
    """Call a function that needs the storage, for `PATIENCE_S` if it does not answer."""
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            return call()
        except StorageError:
            if time.monotonic() > until:
                raise
            time.sleep(5 * POLL_S)


def main(words: Sequence[str]) -> None:
    retries, location, *driver = words
    folder = named_run(location, "", "")
    folder.path.mkdir(parents=True, exist_ok=True)
    sys.exit(Supervisor(folder, [sys.executable, "-u", *driver], int(retries)).run())


if __name__ == "__main__":
    with clean_exit():
        main(sys.argv[1:])
