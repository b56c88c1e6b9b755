"""The mirror of one run in a repository, updated while the run trains, in a thread of its driver."""

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mlx_runtime.companions.hub.claims import FILE, REFRESH_S, Claim, claim_of
from mlx_runtime.companions.hub.contents import StagedRun, latest_step, stage_run
from mlx_runtime.companions.hub.detection import refuse_secrets
from mlx_runtime.companions.hub.remote import CONF, MAX_FILES, MirroredRun
from mlx_runtime.companions.hub.repository import Address, OutdatedError, Repository
from mlx_runtime.errors import MlxError, StorageError, UsageError, short_message
from mlx_runtime.events import Notice, WarningNotice
from mlx_runtime.runs import records
from mlx_runtime.runs.folder import RunFolder
from mlx_runtime.runs.snapshots import CODE
from mlx_runtime.runs.tables import plural
from mlx_runtime.storage.files import size_text
from mlx_runtime.storage.leases import heartbeat

BURST, INTERVAL_S = 20, 45.0
"""Number of commits without a pause, and the interval of further ones: at most 100 an hour; the Hub accepts 128."""

CONFLICTS_S = (0.0, 1.0, 4.0, 15.0)
"""Pauses before a commit is repeated because the repository has changed, for example on its web page."""

RETRY_S = 15.0
"""Pause after an upload that failed in spite of retries."""

POLL_S = 0.2
"""Interval at which the wait for the last upload checks for interrupts from another thread."""


class SupersededError(UsageError):
    """Another driver has claimed the run."""


class Allowance:
    """Limits commits, so that a run that saves often uploads only its newest state."""

    def __init__(self) -> None:
        self._used_until = time.monotonic()  # by commits of `INTERVAL_S` each

    def wait_s(self) -> float:
        """Return the time until the next commit is allowed, in seconds."""
        return max(0.0, self._used_until - (BURST - 1) * INTERVAL_S - time.monotonic())

    def take(self, commits: int = 1) -> None:
        self._used_until = max(self._used_until, time.monotonic()) + commits * INTERVAL_S


class Mirror:
    """The mirror of a run, opened before the run begins.

    Args:
        uri: repository, like `hf://user/name`. It need not exist yet.
        announce: called with lines that list the files, before the first upload to the repository.

    Raises:
        UsageError: the Hub refuses, or the repository contains something else.
        UnreachableError: the Hub does not answer.
    """

    def __init__(self, uri: str, announce: Callable[[str], object] = lambda text: None) -> None:
        self.announce = announce
        address = Address.parse(uri)
        if address.revision is not None:
            raise UsageError(f"{uri} names a revision, which cannot change; write {address._replace(revision=None)}")
        self.repository = Repository(address)
        self.repository.require_token()
        self._found = MirroredRun.of(self.repository)
        self._head = self._found.head if self._found is not None else self.repository.head()
        self.repository.require_write(self._head)
        self._checked = False

    @property
    def uri(self) -> str:
        return str(self.repository.address)

    @property
    def public(self) -> bool:
        """True if the repository existed already, and is public."""
        return self._head is not None and not self._head.private

    def check(self, run: RunFolder | None) -> None:
        """Check that this machine may mirror an existing run, or a new run, to the repository.

        Raises:
            UsageError: the repository contains another run or a newer state of this one, or another driver has claimed
                it.
        """
        if self._found is None:
            return
        claim = self._found.claim
        if self._found.begun:  # otherwise a driver died before it mirrored anything
            of = f"{self.uri} holds {claim.title} of {claim.host} (attempt {claim.attempt}, step {claim.step})"
            if run is None:
                raise UsageError(
                    f"{of}, and this is a new run: continue that one with --resume auto, or name another repository"
                )
            if (records.load_record(run).get("mirror") or {}).get("id") != claim.id:
                raise UsageError(f"{of}, which is not {run.title} of this machine; name another repository")
        claim.refuse_held(self.repository)
        if self._found.begun and run is not None and (claim.attempt, claim.step) > (run.attempts(), latest_step(run)):
            raise UsageError(
                f"{of}, which is newer than {run.title} here (attempt {run.attempts()}, step {latest_step(run)}): "
                "continue from it with --resume auto"
            )

    def claim(self, run: RunFolder, attempt: int) -> Claim:
        """Become the driver that writes to the repository, and create it if necessary.

        Raises:
            SupersededError: another driver was faster.
        """
        self._begun = self._found is not None and self._found.begun
        step = self._found.claim.step if self._found is not None and self._begun else 0
        self._claim = Claim.of(_id(run), run.experiment, run.name, attempt, step)
        if self._head is None:
            self._head = self.repository.create()
        self._parent = self._head.commit
        self.write(f"Attempt {attempt} of {run.title}", None)
        return self._claim

    def push(self, run: RunFolder) -> tuple[Claim, int]:
        """Upload a run that is not training. Return the claim, and the number of uploaded files."""
        record = records.load_record(run)
        with stage_run(run, weights=True, report=self.announce) as state:
            self._check(state)
            self.claim(run, max(1, run.attempts()))
            count = self.write(_title(state, record), state, status=records.status_of(record))
            return self._claim, count

    def write(self, title: str, state: StagedRun | None, status: str = "RUNNING") -> int:
        """Commit a state of the run, or only the claim. Return the number of uploaded files.

        Raises:
            SupersededError: another driver has committed.
            OutdatedError: the Hub refuses each commit as outdated, although no other driver has committed.
            UsageError: the config or the code holds likely secrets, or the run has too many files.
        """
        if state is not None:
            self._check(state)
        committed, step = self._claim, self._claim.step if state is None else state.step
        self._claim = self._claim.next(status=status, step=step)
        pauses = iter(CONFLICTS_S)
        while True:
            added: dict[str, Path] = {}
            removed: list[str] = []
            if state is not None:
                added, removed = state.changes(self.repository.files(self._parent))
                if not self._begun:
                    self._begun = True
                    self.announce(self._announcement(added))
            with heartbeat(lambda: self._refresh(committed), REFRESH_S):
                uploaded = self.repository.upload(added)
            try:
                content = {**uploaded, FILE: self._claim.content()}
                self._parent = self.repository.commit(title, self._parent, content, removed)
                return len(added)
            except OutdatedError:
                if self._arrived():
                    return len(added)
                pause_s = next(pauses, None)
                if pause_s is None:
                    raise
                time.sleep(pause_s)

    def _check(self, state: StagedRun) -> None:
        """Raise a UsageError if a state must not be uploaded. Config and code are read once: they stay the same."""
        if len(state.files) > MAX_FILES:
            raise UsageError(f"the run has {len(state.files):,} files; {self.uri} may have {MAX_FILES:,}")
        if not self._checked:
            for name in state.files & {CONF, CODE}:
                refuse_secrets(state.target / name, self.uri)
            self._checked = True

    def _announcement(self, files: Mapping[str, Path]) -> str:
        """Return lines about a first upload: files by the first part of their paths, and what changes them."""
        size = size_text(sum(file.stat().st_size for file in files.values()))
        names = ", ".join(sorted({path.partition("/")[0] for path in files}))
        visibility = "public: everybody can read it" if self.public else "private"
        return (
            f"mirror    first upload to {self.uri} ({visibility}): {plural(len(files), 'file')}, {size}: {names}\n"
            "          to change this: cfg.hub.mirror, cfg.keep_checkpoints, .gitignore; to change the visibility: "
            f"{self.repository.settings_page}"
        )

    def _refresh(self, committed: Claim) -> None:
        """Refresh the claim, so that it does not expire during an upload that takes longer than `LEASE_S`."""
        with contextlib.suppress(MlxError):  # `write` will fail with the same error
            content = {FILE: committed.content()}
            self._parent = self.repository.commit("Upload of a checkpoint", self._parent, content)

    def _arrived(self) -> bool:
        """Return True if the last commit has arrived although its answer was lost; accept commits of other tools."""
        head = self.repository.require()
        present = claim_of(self.repository, head)
        if present is None or present.driver != self._claim.driver:
            who = f"attempt {present.attempt} on {present.host}" if present is not None else "somebody"
            raise SupersededError(f"{self.uri} was taken over by {who}; this driver no longer writes to it")
        self._parent = head.commit
        return present.commits == self._claim.commits


class Follower:
    """The thread that mirrors a run: its newest state after each checkpoint, and its last state at the end.

    Claims the repository. Must be created in the driver.

    Args:
        record: record of the run, in which an unfinished upload is marked.
        stop: called with the reason if another driver has claimed the run.
        notify: called with each notice for the user, also from the thread.
    """

    def __init__(
        self,
        mirror: Mirror,
        record: records.Record,
        stop: Callable[[str], object],
        notify: Callable[[Notice], object],
    ) -> None:
        self._mirror, self._record, self._stop, self._notify = mirror, record, stop, notify
        self._id = mirror.claim(record.folder, record["attempt"]).id
        self._changed = threading.Condition()
        self._dirty, self._ending, self._abandoned, self._trying_again = False, False, False, False
        self.done = threading.Event()
        self._failure: Exception | None = None  # that ended uploads
        self.allowance = Allowance()
        mirror.announce = lambda text: notify(Notice(text))
        self._mark(unfinished=True)
        threading.Thread(target=self._run, name="mirror", daemon=True).start()

    def checkpoint_saved(self) -> None:
        """Note that a checkpoint was saved. Returns immediately."""
        with self._changed:
            self._dirty = True
            self._changed.notify()

    def finish(self, timeout_s: float, *, interrupted: bool = False) -> None:
        """Upload the last state, wait until that is done, and mark the record.

        After `timeout_s`, the thread ends with the process. An interrupt ends only the wait, because the run has ended
        already; with `interrupted`, there is no wait.
        """
        with self._changed:
            self._ending = True
            self._changed.notify()
        started = time.monotonic()
        try:
            while not interrupted and not self.done.wait(POLL_S) and time.monotonic() - started < timeout_s:
                pass
        except KeyboardInterrupt:
            interrupted = True
        waited_s = time.monotonic() - started
        if self.done.is_set() and self._failure is None:
            self._mark(unfinished=False)
            self._notify(Notice(f"mirror    {self._mirror.uri} is complete (waited {waited_s:.1f} s)"))
            return
        late = "the wait for it was interrupted"
        if not interrupted:
            late = f"it was not done within cfg.hub.timeout_s={timeout_s:g}"
        why = late if self._failure is None else short_message(self._failure)
        text = f"the upload to {self._mirror.uri} is unfinished: {why}"
        if not isinstance(self._failure, SupersededError):
            run = self._record.folder
            text += f"; complete it with: mlx xp push {run.experiment} {run.name}"
        self._notify(WarningNotice(text))

    def abandon(self) -> None:
        """End all uploads, because another driver owns the run folder."""
        with self._changed:
            self._abandoned = self._ending = True
            self._changed.notify()

    def _mark(self, *, unfinished: bool) -> None:
        with contextlib.suppress(StorageError):
            self._record.update(mirror={"uri": self._mirror.uri, "id": self._id, "unfinished": unfinished})

    def _run(self) -> None:
        try:
            while not self._step():
                pass
        except Exception as error:
            self._failure = error
            if isinstance(error, SupersededError):
                self._stop(short_message(error))
            elif not self._ending:
                self._notify(WarningNotice(f"nothing more is mirrored: {short_message(error)}"))
        finally:
            self.done.set()

    def _step(self) -> bool:
        """Wait until there is something to upload, and upload it. Return True after the last state."""
        with self._changed:
            self._changed.wait_for(lambda: self._dirty or self._ending, REFRESH_S)
            dirty = self._dirty
        if dirty:
            self._pause(self.allowance.wait_s())
        with self._changed:
            last, self._dirty = self._ending, False
            if self._abandoned:
                return True
        try:
            self._upload(last=last, whole=dirty or last)
        except (StorageError, OSError) as error:
            if isinstance(error, OutdatedError):
                self.allowance.take(1 + len(CONFLICTS_S))
            if not self._trying_again:
                text = "training continues without a mirror until the upload succeeds"
                self._notify(WarningNotice(f"{text}: {short_message(error)}"))
            self._trying_again = True
            time.sleep(1)
            self._pause(RETRY_S)
            with self._changed:
                self._dirty = self._dirty or dirty
            return False
        if self._trying_again:
            self._notify(Notice(f"mirror    {self._mirror.uri} is up to date again"))
        self._trying_again = False
        self.allowance.take()
        return last

    def _upload(self, *, last: bool, whole: bool) -> None:
        folder, status = self._record.folder, self._record["status"]
        if not whole:
            self._mirror.write("Still training", None)
        elif self._record.resuming:  # the run never resumed, so the repository has its state
            self._mirror.write("Not resumed", None, status="STOPPED")
        else:
            with stage_run(folder, weights=last, report=self._mirror.announce) as state:
                title = _title(state, records.load_record(folder))
                self._mirror.write(title, state, status=status if last else "RUNNING")

    def _pause(self, seconds: float) -> None:
        """Wait for a time, or until the run ends."""
        with self._changed:
            self._changed.wait_for(lambda: self._ending, seconds)


def _title(state: StagedRun, record: Mapping[str, Any]) -> str:
    """Return the title of a commit."""
    status = f" {record['status']}," if record["status"] not in records.LIVING else ""
    return f"{record.get('experiment')}/{record.get('run')}:{status} step {state.step}"


def _id(run: RunFolder) -> str:
    """Return the id of a run: the one of its mirror, or a new one."""
    with contextlib.suppress(MlxError):
        if found := (records.load_record(run).get("mirror") or {}).get("id"):
            return str(found)
    return uuid.uuid4().hex
