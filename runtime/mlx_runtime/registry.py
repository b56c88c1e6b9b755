"""The record of a run, `run.json`: enough to list, judge and repeat it when everything else is gone.

Only the driver writes it, whole and atomically.
"""

import contextlib
import datetime
import importlib.metadata
import os
import platform
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlx_runtime.documents import (
    COUNT,
    NUMBER,
    TEXT,
    TIME,
    Kind,
    from_json,
    list_of,
    mapping_of,
    mapping_with,
    misfit,
    one_of,
)
from mlx_runtime.errors import StorageError, UsageError, first_line
from mlx_runtime.layout import RunFolder
from mlx_runtime.redaction import FILES, redacted, redacted_override
from mlx_runtime.settings import Settings
from mlx_runtime.storage import discard_unfinished, to_json, write_atomic

HEARTBEAT_S = 10
"""How often a living driver refreshes its record."""

CLAIM_S = 0.5
"""How long a driver that has claimed a run has to say who it is."""

STALE_S = 60
"""A RUNNING run that is silent for so long has lost its driver."""

LIVING = ("PENDING", "RUNNING")

REPLACED = "replaced"
"""Field of a PENDING record: the record of the run before, put back if the job fails to resume it."""

PACKAGES = ("mlx-runtime", "torch", "torchmetrics", "ray", "hydra-core", "hydra-zen", "numpy")

_DRIVER = {
    "start": TIME.or_null(),
    "end": TIME.or_null(),
    "status": TEXT.or_null(),
    "command": TEXT.or_null(),
    "overrides": list_of(TEXT).or_null(),
    "host": TEXT.or_null(),
    "pid": COUNT.or_null(),
    "job": mapping_with({"id": TEXT, "address": TEXT}, needs=("id", "address")).or_null(),
}
_CHECKPOINT = mapping_with(
    {"epoch": COUNT, "step": COUNT, "path": TEXT.or_null(), "value": NUMBER.or_null()}, needs=("epoch",)
)
SHAPE: dict[str, Kind] = _DRIVER | {
    "experiment": TEXT,
    "run": TEXT,
    "status": Kind("a status", lambda value: isinstance(value, str) and value.isalpha()),
    "heartbeat": TIME,
    "boot": TEXT.or_null(),
    "pid_started": TEXT.or_null(),
    "attempt": COUNT,
    "attempts": list_of(mapping_with(_DRIVER)),
    "error": TEXT.or_null(),
    "epoch": COUNT.or_null(),
    "epochs": COUNT.or_null(),
    "failures": COUNT.or_null(),
    "workers": COUNT.or_null(),
    "seed": COUNT.or_null(),
    "parameters": COUNT.or_null(),
    "device": TEXT.or_null(),
    "monitor": TEXT.or_null(),
    "mode": one_of("max", "min").or_null(),
    "metrics": mapping_of(NUMBER.or_null()).or_null(),
    "best": _CHECKPOINT.or_null(),
    "latest": _CHECKPOINT.or_null(),
    "git": mapping_with({"commit": TEXT, "diff": TEXT.or_null()}, needs=("commit",)).or_null(),
    "packages": mapping_of(TEXT.or_null()).or_null(),
    "files": COUNT,
    REPLACED: Kind("a record", lambda value: value is None or misfit(value, SHAPE) is None),
}
"""Fields of the record of a run or a data job that others rely on. Anybody may have written the file."""


class Record:
    """The run's record, kept up to date on disk. Statuses: PENDING RUNNING SUCCEEDED FAILED STOPPED.

    Args:
        folder: where the run lives.
        before: the record of a run that resumes.
        held: keep the stored record as it is until `begin`; meanwhile only the driver's claim shows that it lives.
        fields: what is known at the start.
    """

    def __init__(
        self, folder: RunFolder, before: Mapping[str, Any] | None = None, *, held: bool = False, **fields: Any
    ) -> None:
        self.folder = folder
        self.held = held
        self._lock = threading.Lock()
        self._ours = True
        self._fields: dict[str, Any] = {"experiment": folder.experiment, "run": folder.name, "status": "PENDING"}
        self._fields |= before or {}
        self._replaced = fields.get(REPLACED) or self._fields.pop(REPLACED, None)
        self.update(**fields)

    def __getitem__(self, name: str) -> Any:
        return self._fields.get(name)

    def update(self, **fields: Any) -> None:
        """Change fields and store the record.

        Raises:
            StorageError: the run folder can no longer be written.
        """
        with self._lock:
            self._fields |= fields | {"heartbeat": now()}
            if not self._ours:
                return
            if self.held:
                self.folder.note_attempt(self._fields["attempt"], claim() | {"status": self._fields["status"]})
            else:
                self._write(self.folder.record, to_json(self._fields))

    def begin(self, conf: str) -> None:
        """Store the record, with the config, from here on: the run does what they say.

        Args:
            conf: conf.yaml of the run.

        Raises:
            StorageError: the run folder cannot be written.
        """
        with self._lock:
            self.held = False
            self._write(self.folder.conf, conf, must=True)
        self.update()

    def withdraw(self) -> None:
        """Give up resuming the run: its record stays, or becomes again, what it was before.

        Raises:
            StorageError: the run folder cannot be written.
        """
        self.folder.reserve.unlink(missing_ok=True)
        with self._lock:
            if self.held:
                self.folder.note_attempt(self._fields["attempt"], claim() | {"status": "FAILED"})
            if self._replaced is not None:
                self._write(self.folder.record, to_json(self._replaced))
            self._ours = False

    def _write(self, file: Path, content: str, *, must: bool = False) -> None:
        """Replace a file of the run unless another driver has claimed the run since.

        The look comes after the new file is written and before it is renamed. A driver that takes over claims first
        and then removes such files, so one of the two always notices the other (on an object store, which has no
        rename, a driver that freezes between its look and its write can still replace one file).
        """
        try:
            write_atomic(file, content, self._look)
        except _TakenOver:
            return
        except OSError as error:
            if self._taken_over():
                return
            raise StorageError(f"cannot write {file}: {error.strerror or error}") from error
        self.folder.push(file, must=must)

    def _look(self) -> None:
        if self._taken_over():
            raise _TakenOver

    def _taken_over(self) -> bool:
        """Whether another driver has claimed the run since."""
        attempt = self._fields.get("attempt")
        with contextlib.suppress(StorageError):
            self._ours = self._ours and (attempt is None or self.folder.attempts() <= attempt)
        return not self._ours

    def disown(self) -> None:
        """Write no more: the run has another driver."""
        with self._lock:
            self._ours = False

    def note(self, **fields: Any) -> None:
        """Change fields, to be stored with the next heartbeat at the latest."""
        with self._lock:
            self._fields |= fields

    def finish(self, status: str, **fields: Any) -> None:
        """Write down how the run ended, giving back the space that was held for it.

        Raises:
            StorageError: the run folder can no longer be written.
        """
        self.folder.reserve.unlink(missing_ok=True)
        self.update(status=status, end=now(), **fields)

    @contextlib.contextmanager
    def alive(self, also: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Refresh the heartbeat while the block runs, and call `also` each time."""
        done = threading.Event()

        def beat() -> None:
            while not done.wait(HEARTBEAT_S):
                with contextlib.suppress(StorageError):  # a full disk must not hide the reason a run ends for
                    self.update()
                also()

        thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


class _TakenOver(Exception):  # noqa: N818 - not a failure
    """Another driver has the run."""


def recorded(folder: RunFolder) -> dict[str, Any]:
    """What the record of a run says at present.

    Raises:
        StorageError: there is none, or it cannot be read.
    """
    try:
        return parsed(folder.read(folder.record.name))
    except (OSError, ValueError) as error:
        raise StorageError(f"cannot read {folder.place}/run.json: {first_line(error)}") from error


def parsed(content: bytes) -> dict[str, Any]:
    """The fields of a record, of the types that `SHAPE` promises.

    Raises:
        ValueError: it is no record.
    """
    found = from_json(content, SHAPE, needs=("status",))
    if found["status"] in LIVING and "heartbeat" not in found:
        raise ValueError("heartbeat is missing")
    return found


def status_of(record: Mapping[str, Any], job: str | None = None) -> str:
    """PENDING RUNNING SUCCEEDED FAILED STOPPED, or STALE for a run whose driver is gone without a word.

    Args:
        record: of the run.
        job: what its cluster says of its job, where one was asked.
    """
    status = str(record.get("status"))
    if status not in LIVING:
        return status
    if job in ("SUCCEEDED", "FAILED", "STOPPED"):
        return job
    if job is not None and status == "PENDING":
        return status  # it waits for its turn, or its environment is being made
    return status if _lives(record) else "STALE"


def _lives(record: Mapping[str, Any]) -> bool:
    """Whether the driver that wrote a record is alive: its process when it ran on this machine, else its heartbeat."""
    boot = _boot()
    if boot is not None and record.get("boot") == boot:
        return _started(record.get("pid", 0)) == record.get("pid_started")
    return age_s(record) < STALE_S


def age_s(record: Mapping[str, Any]) -> float:
    """Seconds since the last heartbeat."""
    then = datetime.datetime.fromisoformat(record["heartbeat"])
    return (datetime.datetime.now(datetime.timezone.utc) - then).total_seconds()


def refuse_living(folder: RunFolder) -> dict[str, Any]:
    """The record of a run that nobody trains at present.

    Raises:
        UsageError: its driver lives.
    """
    record = recorded(folder)
    name = f"{folder.experiment} {folder.name}"
    job = record.get("job") or {}
    status = status_of(record)
    if status == "PENDING" and job:
        ours = Settings.read().job
        if ours is None or ours["id"] != job["id"]:
            raise UsageError(
                f"{name} is about to start as the job {job['id']}. Wait, or end it with: mlx xp stop {name}"
            )
        status = "STALE"  # the launcher has written it, and ended
    driver = record if status in LIVING else resuming(folder, record)
    if driver:
        raise UsageError(
            f"{name} is being trained by process {driver.get('pid')} on {driver.get('host')}, last heard of "
            f"{max(0, age_s(driver)):.0f} s ago. Wait for it, or end it with: mlx xp stop {name}"
        )
    return record


def resuming(folder: RunFolder, record: Mapping[str, Any]) -> dict[str, Any]:
    """The driver that has claimed a run and has not changed its record yet, if it lives; else nothing.

    Raises:
        StorageError: the storage does not answer.
    """
    newest = folder.attempts()
    if newest <= record.get("attempt", newest):
        return {}
    content = folder.attempt(newest)
    if not content:
        time.sleep(CLAIM_S)  # it is about to say who it is, unless it died over that
        content = folder.attempt(newest)
    with contextlib.suppress(ValueError):
        found = parsed(content)
        return found if found["status"] in LIVING and _lives(found) else {}
    return {}


def attempts(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What a run that goes on remembers of its past: one entry per attempt, the one that has just ended included."""
    kept = ("start", "end", "status", "command", "overrides", "host", "pid", "job")
    return [*record.get("attempts", []), {name: record.get(name) for name in kept}]


def take_over(folder: RunFolder) -> int:
    """Become the driver of a run whose driver is gone. Returns the number of this attempt.

    Raises:
        UsageError: its driver lives, or another one has just taken over.
        StorageError: the storage cannot keep two drivers from taking over at once.
    """
    refuse_living(folder)
    number = folder.attempts() + 1
    if not folder.claim_attempt(number, claim()):
        raise UsageError(
            f"another driver has taken over {folder.title} at this very moment; wait for it, or for its end"
        )
    for file in (folder.record, folder.conf):  # what a driver that was taken for dead is about to rename
        discard_unfinished(file)
    return number


def claim() -> dict[str, Any]:
    """What a driver notes of itself when it claims a run."""
    return this_driver() | {"status": "RUNNING", "heartbeat": now()}


def this_driver() -> dict[str, Any]:
    """What tells this process from any other, on any machine."""
    pid = os.getpid()
    return {"host": socket.gethostname(), "boot": _boot(), "pid": pid, "pid_started": _started(pid)}


def _boot() -> str | None:
    """Tells one run of a machine's kernel from another, and one container's processes from another's."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return None


def _started(pid: int) -> str | None:
    """When a process of this machine started, in ticks since boot; None when there is none (or no /proc to ask)."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state == "Z" else fields[18]


def provenance(overrides: Sequence[str]) -> dict[str, Any]:
    """What is needed to run this again: command, code, versions, machine."""
    return {
        "command": shlex.join(redacted_override(word) for word in sys.orig_argv),
        "overrides": [redacted_override(item) for item in overrides],
        "git": _git(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
    } | this_driver()


def now() -> str:
    """The present, in UTC, to the second."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(limit_bytes: int = 1 << 20) -> dict[str, Any] | None:
    """Commit and uncommitted changes of the working directory, or None outside a repository.

    Without files that hold secrets by their names, and without the secrets that can be recognized in others.
    """

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=10, errors="replace")
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout if done.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    if commit is None:
        return None
    names = [f"{name}**" if name.endswith("/") else name for name in FILES if not name.startswith("!")]
    hidden = [f":(exclude,icase,glob)**/{name}" for name in names]
    diff = git("diff", "HEAD", "--", ".", *hidden) or ""
    return {"commit": commit.strip(), "diff": redacted(diff)[:limit_bytes]}
