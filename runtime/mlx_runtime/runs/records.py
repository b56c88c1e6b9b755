"""The record of a run, `run.json`: enough to list, assess and repeat the run if everything else is lost.

Only the driver that owns the run writes it, atomically.
"""

import contextlib
import importlib.metadata
import json
import math
import os
import platform
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlx_runtime.errors import MlxError, StorageError
from mlx_runtime.runs.folder import RESERVE, RUN_NAME, RunFolder, attempt_name, read_errors
from mlx_runtime.storage.documents import (
    COUNT,
    FLAG,
    NAME,
    NUMBER,
    SCALAR,
    TEXT,
    TIME,
    Kind,
    from_json,
    list_of,
    mapping_of,
    mapping_with,
    misfit,
    now,
    one_of,
)
from mlx_runtime.storage.files import join_path, split_options, storage_at, to_json
from mlx_runtime.storage.leases import heartbeat, is_alive, lease, this_process
from mlx_runtime.storage.local import write_atomic
from mlx_runtime.storage.redaction import FILES, redact, redact_override

LAST_PAUSES_S = (1, 4, 8)
"""Pauses before the last record of a run is written to an object store again."""

LAST_S = 15.0
"""Time after which the last record of a run is not written again."""

LIVING = ("PENDING", "WAITING", "RUNNING")

REPLACED = "replaced"
"""Field of the record of a run that is about to resume: the previous record, restored if that fails."""

LABELS = "labels.json"
"""File with the tags and the note of a run, which its users may change at any time."""

PACKAGES = ("mlx-runtime", "torch", "torchmetrics", "ray", "hydra-core", "hydra-zen", "numpy")
"""Packages whose versions are recorded."""

DIFF_BYTES = 1 << 20
"""Maximum size of the recorded uncommitted changes."""

LAUNCHED, LAUNCHED_FILE = "MLX_LAUNCHED", ".mlx-launched.json"
"""Variable with the path of a file in which another machine has recorded the command and the code of its launch."""

LAUNCHER_FACTS = ("command", "overrides", "git")
"""Facts that the launcher of a run or data job records, because they are unknown to its job."""

ENDING = ("end", "error", "stop_reason")
"""Fields of an ended record; a driver that continues the run begins without them."""

_DRIVER = {
    **dict.fromkeys(("start", "end"), TIME.or_null()),
    **dict.fromkeys(("status", "command", "host", "error"), TEXT.or_null()),
    "overrides": list_of(TEXT).or_null(),
    "pid": COUNT.or_null(),
    "job": mapping_with({"id": TEXT, "address": TEXT}, needs=("id", "address")).or_null(),
}
_CHECKPOINT = mapping_with(
    {
        **{"epoch": COUNT, "step": COUNT, "path": TEXT.or_null(), "value": NUMBER.or_null()},
        **{"trial": COUNT, "std": NUMBER.or_null()},  # of a sweep
    },
    needs=("epoch",),
)
_POSITIVE = Kind("a positive number", lambda value: COUNT.fits(value) and value > 0)
SHAPE: dict[str, Kind] = _DRIVER | {
    **dict.fromkeys(("experiment", "run"), NAME),
    "status": Kind("a status", lambda value: isinstance(value, str) and value.isalpha()),
    "heartbeat": TIME,
    **dict.fromkeys(("attempt", "files", "size_bytes"), COUNT),
    "attempts": list_of(mapping_with(_DRIVER)),
    **dict.fromkeys(("boot", "pid_started", "device", "monitor", "experiment_class", "stop_reason"), TEXT.or_null()),
    **dict.fromkeys(("output", "filling", "code", "settings"), TEXT.or_null()),  # of a data job
    "waits_for": TEXT.or_null(),  # resources, if the status is WAITING
    **dict.fromkeys(("epoch", "epochs", "failures", "workers", "seed", "parameters"), COUNT.or_null()),
    "mode": one_of("max", "min").or_null(),
    "metrics": mapping_of(NUMBER.or_null()).or_null(),
    "best": _CHECKPOINT.or_null(),
    "latest": _CHECKPOINT.or_null(),
    "definition": mapping_with(
        {
            "overrides": list_of(TEXT),
            **dict.fromkeys(("search", "scheduler", "metric"), TEXT),
            **dict.fromkeys(("trials", "seed"), COUNT),
            **dict.fromkeys(("folds", "seeds"), _POSITIVE.or_null()),
            "mode": one_of("max", "min"),
        },
        needs=("overrides", "search", "scheduler", "metric", "mode", "trials", "folds", "seed"),
    ),
    "trials": list_of(
        mapping_with(
            {"trial": COUNT, "values": mapping_of(TEXT), "runs": list_of(RUN_NAME.or_null()), "trained": _POSITIVE},
            needs=("trial", "values", "runs"),
        )
    ),
    "git": mapping_with({"commit": TEXT, "diff": TEXT.or_null()}, needs=("commit",)).or_null(),
    "mirror": mapping_with({"uri": TEXT, "id": TEXT, "unfinished": FLAG}, needs=("uri", "id", "unfinished")).or_null(),
    "packages": mapping_of(TEXT.or_null()).or_null(),
    "sweep": mapping_with(
        {"name": NAME, **dict.fromkeys(("fold", "seed"), COUNT.or_null()), "trial": COUNT, "values": mapping_of(TEXT)},
        needs=("name", "trial"),
    ).or_null(),
    "datasets": mapping_of(mapping_of(COUNT)),
    "fold": mapping_with({"fold": COUNT, "folds": COUNT, "rows": TEXT}).or_null(),
    "values": mapping_of(SCALAR).or_null(),  # of conf.yaml by full key, without secrets
    REPLACED: Kind("a record", lambda value: value is None or misfit(value, SHAPE) is None),
}
"""Types of the fields in the record of a run or a data job. They are checked, because the file is not trusted."""


class Record:
    """The record of a run, kept up to date on disk. Statuses: PENDING WAITING RUNNING SUCCEEDED FAILED STOPPED PRUNED.

    Methods raise StorageError if the run folder cannot be written.

    Args:
        folder: Folder of the run.
        before: Stored record of a run to resume; the fields of its end are dropped.
        fields: Initial fields. With `REPLACED`, the run is about to resume; that of `before` is not kept.
    """

    def __init__(self, folder: RunFolder, before: Mapping[str, Any] | None = None, **fields: Any) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._ours = True
        self._ends_at = math.inf  # set when the end is recorded for the first time
        self._fields: dict[str, Any] = {"experiment": folder.experiment, "run": folder.name, "status": "PENDING"}
        self._replaced = fields.get(REPLACED) or (before or {}).get(REPLACED)
        self._fields |= {name: item for name, item in (before or {}).items() if name not in (*ENDING, REPLACED)}
        self.update(**fields)

    def __getitem__(self, name: str) -> Any:
        return self._fields.get(name)

    @property
    def resuming(self) -> bool:
        """True for a run to resume that has not begun, or never will."""
        return REPLACED in self._fields

    def update(self, **fields: Any) -> None:
        """Change fields and store the record."""
        self._update(fields)

    def _update(self, fields: Mapping[str, Any], *, must: bool = False) -> None:
        with self._lock:
            self._fields |= {"heartbeat": now(), **fields}
            if self._ours:
                self._write(self.folder.record, to_json(self._fields), must=must)

    def note(self, **fields: Any) -> None:
        """Change fields, to be stored with the next heartbeat."""
        with self._lock:
            self._fields |= fields

    def begin(self, conf: str) -> None:
        """Store conf.yaml and then the record, when the run begins; the previous record cannot be restored then."""
        with self._lock:
            self._fields.pop(REPLACED, None)
            self._write(self.folder.conf, conf, must=True)
        self.update()

    def finish(self, status: str, **fields: Any) -> None:
        """Record the end of the run, in the space reserved for it."""
        (self.folder.path / RESERVE).unlink(missing_ok=True)
        self._fields.pop(REPLACED, None)
        fields |= {"status": status} | dict.fromkeys(("end", "heartbeat"), now())
        self._ends_at = min(self._ends_at, time.monotonic() + LAST_S)
        for pause_s in LAST_PAUSES_S if self.folder.uri is not None else ():
            try:
                return self._update(fields, must=True)
            except StorageError:  # retried here, because no heartbeat follows
                if time.monotonic() + pause_s > self._ends_at:
                    break
                time.sleep(pause_s)
        self._update(fields, must=True)

    def withdraw(self) -> None:
        """Give up resuming the run, and restore its previous record. The lease of the attempt has the `stop_reason`."""
        (self.folder.path / RESERVE).unlink(missing_ok=True)
        with self._lock:
            if reason := self._fields.get("stop_reason"):
                content = to_json(lease() | {"stop_reason": reason}).encode()
                with contextlib.suppress(OSError, StorageError):
                    storage_at(self.folder.location).write(content, attempt_name(self._fields["attempt"]))
            self._write(self.folder.record, to_json(self._replaced))
            self._ours = False

    def disown(self) -> MlxError:
        """Stop writing, because another driver owns the run. Return the error that ends this driver."""
        with self._lock:
            self._ours = False
        return MlxError(f"{self.folder.title} was taken over by another driver; this one has ended")

    @contextlib.contextmanager
    def alive(self) -> Iterator[None]:
        """Refresh the heartbeat while the block runs."""

        def beat() -> None:
            with contextlib.suppress(StorageError):  # a full disk must not hide the error that ends the run
                self.update()

        with heartbeat(beat):
            yield

    def _write(self, file: Path, content: str, *, must: bool = False) -> None:
        """Replace a file of the run unless another driver has claimed the run.

        The check comes after the new file is written and before it is renamed. A driver that takes over first claims
        the run and then removes such files, so one of the two always notices the other. (An object store has no rename,
        so a driver that freezes between check and write can still replace one file.)
        """
        try:
            write_atomic(file, content, self.check_ours)
        except OSError as error:
            if self._taken_over():
                return
            raise StorageError(f"cannot write {file}: {error.strerror or error}") from error
        self.folder.push(file, must=must)

    def check_ours(self) -> None:
        if self._taken_over():
            raise PermissionError("another driver owns the run")

    def _taken_over(self) -> bool:
        attempt = self._fields.get("attempt")
        with contextlib.suppress(StorageError):
            self._ours = self._ours and (attempt is None or self.folder.attempts() <= attempt)
        return not self._ours


def load_record(folder: RunFolder) -> dict[str, Any]:
    """Return the stored record of a run, relocated; raise StorageError if it cannot be read."""
    return relocate(stored_record(folder), folder)


def stored_record(folder: RunFolder) -> dict[str, Any]:
    """Return the record of a run as it is stored; raise StorageError if it cannot be read."""
    with read_errors(folder, folder.record.name):
        return parse_record(folder.document(folder.record.name))


def load_labels(folder: RunFolder) -> dict[str, Any]:
    """Return the `tags` and the `note` of a run, as far as it has any; raise StorageError if they cannot be read."""
    with read_errors(folder, LABELS), contextlib.suppress(FileNotFoundError):
        return from_json(folder.document(LABELS), {"tags": list_of(TEXT), "note": TEXT.or_null()})
    return {}


def attempt_lease(folder: RunFolder, number: int) -> dict[str, Any]:
    """Return the lease by which a driver has claimed an attempt of a run; empty if it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        return parse_record(folder.document(attempt_name(number)))
    return {}


def relocate(record: dict[str, Any], folder: RunFolder) -> dict[str, Any]:
    """Return a record whose checkpoint paths are in this folder, which may be a copy of the original one."""
    found = {name: entry for name in ("best", "latest") if (entry := record.get(name)) and entry.get("path")}
    names = {name: split_options(entry["path"])[0].rpartition("/")[2] for name, entry in found.items()}
    return record | {name: found[name] | {"path": join_path(folder.checkpoints, names[name])} for name in found}


def parse_record(content: bytes) -> dict[str, Any]:
    """Return the fields of a record, with the types in `SHAPE`; raise ValueError if it is not a record."""
    record = from_json(content, SHAPE, needs=("status",))
    if record["status"] in LIVING and "heartbeat" not in record:
        raise ValueError("heartbeat is missing")
    return record


def status_of(record: Mapping[str, Any], job: str | None = None) -> str:
    """Return the status of a run: PENDING WAITING RUNNING SUCCEEDED FAILED STOPPED PRUNED, or STALE if its driver died.

    `job` is the status of its job on the cluster, if known, perhaps with a reason, as in `PENDING (Priority)`.
    """
    status, job = str(record.get("status")), (job or "").partition(" ")[0]
    if status not in LIVING:
        return job if (status, job) == ("STOPPED", "PENDING") else status  # Slurm has requeued the job by itself
    if job in ("SUCCEEDED", "FAILED", "STOPPED"):
        return job
    if job and "PENDING" in (status, job):
        return "PENDING"  # the job waits for resources or for its environment, perhaps again
    return status if is_alive(record) else "STALE"


def attempts(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the history of a run to resume: one entry per attempt, including the last one."""
    last = {name: record.get(name) for name in _DRIVER}
    if last["end"] is None:  # its driver was killed
        last |= {"end": record.get("heartbeat"), "status": "STALE"}
    return [*record.get("attempts", []), last]


def provenance(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the origin of a run with these overrides, as fields of its record, without secrets."""
    facts = {
        "command": shlex.join(redact_override(word) for word in sys.orig_argv),
        "overrides": [redact_override(item) for item in overrides],
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
    }
    file = os.environ.get(LAUNCHED)
    return facts | (json.loads(Path(file).read_bytes()) if file else {"git": _git()}) | this_process()


def launch_facts() -> bytes:
    """Return the content of `LAUNCHED_FILE`: the origin of a run that another machine will launch for this one."""
    facts = provenance(())
    return json.dumps({name: facts[name] for name in ("command", "git")}).encode()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git() -> dict[str, Any] | None:
    """Return the commit and the uncommitted changes of the working directory, or None outside a repository.

    Leaves out files whose names suggest that they hold secrets, and recognizable secrets in others.
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
    if len(diff) > DIFF_BYTES:  # cut after whole lines, so that every secret in them is recognized
        diff = diff[: diff.rfind("\n", 0, DIFF_BYTES) + 1]
    return {"commit": commit.strip(), "diff": redact(diff)}
