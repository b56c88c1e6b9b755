"""The folder of a run: its paths, its number, and the driver that owns it.

<storage>/<experiment>/run_001/       or sweep_001/, with run.json, code.zip and logs/driver.log
    run.json              status, versions, command, best metrics (see `records`)
    conf.yaml             the resolved config
    examples.pt           example rows, if the experiment has `predict` (see `examples`)
    code.zip              the experiment's code (see `snapshots`)
    metrics.jsonl         one line per report (see `tracking`)
    events.out.tfevents.* TensorBoard
    checkpoints/epoch_0001/  state.pt, checkpoint.json (see `checkpoints`)
    logs/driver.log       output of the driver; rank_0.log and so on, of the workers (see `logs`)
    evaluations/*.json    results of `mlx train eval`, one file each
    report.html           a page about the run, on request (see `report`)
    .attempt-001          one file per driver that has claimed the run: its process and its last heartbeat
    .reserve              space for recording the end of the run on a full disk
    .stop, .locate        requests to the driver: to end the run, and to write positions.json (see `positions`)

Functions that touch the storage raise StorageError if it does not answer, or refuses to write.
"""

import contextlib
import fnmatch
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_runtime.errors import ConfigError, StorageError, UsageError, short_message, suggest
from mlx_runtime.settings import Settings
from mlx_runtime.storage.documents import COUNT, Kind, from_json, name_problem
from mlx_runtime.storage.files import Storage, is_uri, join_path, split_options, storage_at, storage_errors, to_json
from mlx_runtime.storage.local import regular

_OVERRIDE = re.compile(r"~|--|[+]{0,2}[A-Za-z_][\w.@/]*=")
"""Pattern of the start of an override or option."""

RESERVE = ".reserve"
EVALUATIONS = "evaluations"
RUN, SWEEP = "run_", "sweep_"
ATTEMPT = ".attempt-"


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run."""

    path: Path  # folder on this machine; with a URI, a working copy
    uri: str | None = None  # URI of the run on an object store

    STOP, LOCATE = ".stop", ".locate"  # files that are requests to the driver

    @property
    def experiment(self) -> str:
        return self.path.parent.name

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def location(self) -> str:
        """URI of the run, or its folder if it has none."""
        return self.uri or str(self.path)

    @property
    def root(self) -> str:
        """Root of the storage of the run."""
        base, options = split_options(self.location)
        return base.removesuffix(f"/{self.title}") + options

    @property
    def title(self) -> str:
        """Name for commands and messages, like `digits/run_003`."""
        return f"{self.experiment}/{self.name}"

    @property
    def record(self) -> Path:
        return self.path / "run.json"

    @property
    def conf(self) -> Path:
        return self.path / "conf.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> str:
        """Folder or URI of the checkpoints."""
        return join_path(self.location, "checkpoints")

    def read(self, *parts: str) -> bytes:
        """Return the content of a file of the run; raise OSError if it is missing or the storage does not answer."""
        return storage_at(self.location).read(*parts)

    def document(self, *parts: str) -> bytes:
        """Return the content of a small file, like `read`, but within the limit for documents."""
        return storage_at(self.location).document(*parts)

    def push(self, *files: Path, must: bool = False) -> None:
        """Copy files to the object store, if the run is on one. Without `must`, failures are ignored."""
        if self.uri is None:
            return
        try:
            for file in files:
                storage_at(self.uri).upload(file, *file.relative_to(self.path).parts)
        except (OSError, StorageError) as error:
            if must:
                raise StorageError(f"cannot write {self.uri}: {short_message(error)}") from error

    def pull(self, *patterns: str) -> None:
        """If the run is on an object store, download the files whose names match, in place of local ones.

        Files in subfolders are kept, because each attempt of a tracker writes its own.
        """
        if self.uri is None:
            return
        storage = storage_at(self.uri)
        self.path.mkdir(parents=True, exist_ok=True)
        with storage_errors(f"cannot read {self.uri}"):
            here, there = [file.name for file in self.path.iterdir() if file.is_file()], storage.names()
            for pattern in patterns:
                for name in fnmatch.filter(here, pattern):
                    (self.path / name).unlink(missing_ok=True)
                for name in fnmatch.filter(there, pattern):
                    storage.download(self.path / name, name)

    def names(self) -> list[str]:
        """Return the names of the files and subfolders of the run."""
        with storage_errors(f"cannot read {self.location}"):
            return storage_at(self.location).names()

    def attempts(self, names: Iterable[str] | None = None) -> int:
        """Return the number of drivers that have claimed this run so far, according to `names`, or now."""
        return max((_number(name, ATTEMPT) for name in (self.names() if names is None else names)), default=0)

    def claim_attempt(self, number: int, lease: Mapping[str, Any] | None = None) -> bool:
        """Become the driver of a run. Return True for exactly one of several callers.

        Raise StorageError if the storage cannot prevent two drivers from claiming the same run.
        """
        storage, name = storage_at(self.location), attempt_name(number)
        content = to_json(dict(lease or {})).encode()
        with storage_errors(f"cannot write {self.location}"):
            if number == 1 and not storage.exclusive:
                storage.write(content, name)  # a new run was claimed with its folder
                return True
            try:
                return storage.create_exclusively(content, name)
            except StorageError as error:
                raise StorageError(
                    f"{error}, so two drivers could train {self.title} at once. "
                    f"Start a new run with its config and weights: mlx train run --from {self.title} "
                    "cfg.restore_checkpoint_path=CHECKPOINT"
                ) from error

    def ask(self, request: str) -> None:
        """Leave a request, `STOP` or `LOCATE`, for the driver of the run, on any machine."""
        with storage_errors(f"cannot write {self.location}"):
            storage_at(self.location).write(b"", request)

    def withdraw(self, request: str) -> None:
        """Remove a request, which the driver has answered or nobody waits for."""
        with contextlib.suppress(OSError, StorageError):
            storage_at(self.location).remove_file(request)

    def has_begun(self) -> bool:
        """Return True if the run has a config, so that it can be resumed, or if the storage does not answer."""
        with contextlib.suppress(OSError):
            return storage_at(self.location).size_bytes(self.conf.name) is not None
        return True

    def in_sweep(self) -> bool:
        """Return True if the run belongs to a sweep, according to its record."""
        with contextlib.suppress(OSError, ValueError):
            return bool(from_json(self.document(self.record.name), {}).get("sweep"))
        return False

    def reserve_space(self) -> None:
        """Reserve a megabyte for recording the end of the run: a full disk still accepts empty files and folders."""
        with open(self.path / RESERVE, "wb", opener=regular) as stream:
            stream.write(b"\0" * (1 << 20))
            stream.flush()
            os.fsync(stream.fileno())


@contextlib.contextmanager
def read_errors(run: RunFolder, name: str) -> Iterator[None]:
    """Raise errors of the block as a StorageError about a file of the run."""
    try:
        yield
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or short_message(error)
        raise StorageError(f"cannot read {join_path(run.location, name)}: {why}") from error


ROW = {"step": COUNT, "epoch": COUNT}
"""Fields that every line of metrics.jsonl has."""


def read_rows(content: bytes, shape: Mapping[str, Kind] = ROW) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Yield the lines of metrics.jsonl, or of another file of JSON lines, with their values, or None for a damaged one.

    An incomplete last line is left out, because the run may be writing it.
    """
    for line in content.splitlines(keepends=True):
        row = None
        with contextlib.suppress(ValueError):
            row = from_json(line, shape, needs=tuple(shape))
        if row is not None or line.endswith(b"\n"):
            yield line, row


def run_folder(root: str, experiment: str, run: str) -> RunFolder:
    """Return the folder of a run in the storage, without touching the disk."""
    if not is_uri(root):
        return RunFolder(Path(root, experiment, run))
    copies = Settings.read().cache / "runs" / hashlib.sha256(root.encode()).hexdigest()[:12]
    return RunFolder(copies / experiment / run, join_path(root, experiment, run))


def next_name(storage: Storage, experiment: str, kind: str = RUN, name: str = "") -> str:
    """Return the name of the next run or sweep; with `name`, raise UsageError if a folder with this suffix exists."""
    found = storage.names(experiment)
    if name and kind + name in found:
        raise UsageError(f"{experiment}/{kind}{name} exists already; choose another name, or resume it")
    return kind + (name or f"{1 + max((_number(item, kind) for item in found), default=0):03d}")


def claim_run(
    root: str,
    experiment: str,
    kind: str = RUN,
    *,
    name: str = "",
    again: bool = False,
    announce: Callable[[str], object] = lambda name: None,
) -> RunFolder:
    """Create the next `run_NNN` of an experiment; two callers at the same instant get different ones.

    Args:
        kind: `RUN` or `SWEEP`.
        name: suffix instead of the next number; raise UsageError if the folder exists.
        again: claim the folder with this name even if it exists, after an interrupted claim.
        announce: called with the name of each folder just before it is created.
    """
    if problem := name_problem("cfg.name", experiment):
        raise ConfigError(problem)
    storage = storage_at(root)
    try:
        if storage.local:
            Path(storage.of(experiment)).mkdir(parents=True, exist_ok=True)
        claimed = False
        while not claimed:
            folder = run_folder(root, experiment, kind + name if again else next_name(storage, experiment, kind, name))
            announce(folder.name)
            claimed = storage.claim_folder(experiment, folder.name) or again
        try:
            if folder.uri is not None:
                shutil.rmtree(folder.path, ignore_errors=True)  # left over from a storage that was emptied
                folder.path.mkdir(parents=True)
            elif kind == RUN:
                (folder.path / "checkpoints").mkdir(exist_ok=again)
            folder.reserve_space()
        except OSError:
            shutil.rmtree(folder.path, ignore_errors=True)
            raise
    except OSError as error:
        why = error.strerror or short_message(error)
        raise StorageError(
            f"cannot write runs to {root}: {why}. Choose another folder with cfg.storage_path=FOLDER"
        ) from error
    return folder


def list_runs(root: str, experiment: str | None = None, *, sweeps: bool = False) -> list[RunFolder]:
    """Return all runs, or those of one experiment, oldest first per experiment, optionally with the sweeps."""
    storage = storage_at(root)
    with storage_errors(f"cannot read {root}"):
        experiments = storage.names() if experiment is None else [experiment]
        runs = {
            name: _run_names(storage, name, sweeps)
            for name in experiments
            if not name.startswith(".") and (not storage.local or Path(storage.of(name)).is_dir())
        }
    return [run_folder(root, name, run) for name in runs for run in sorted(runs[name], key=_number)]


def find_run(root: str, experiment: str, run: str = "latest") -> RunFolder:
    """Return a run or sweep by name (`run_003`) or number (`3`), or the `latest` run, ignoring those of sweeps.

    Raise UsageError, with similar names, if there is no such run.
    """
    named = {folder.name: folder for folder in list_runs(root, experiment, sweeps=True)}
    if not named:
        known = {folder.experiment for folder in list_runs(root)}
        raise UsageError(f"no runs of {experiment!r} in {root}.{suggest(experiment, known)}")
    if run == "latest":
        for name in reversed(named):
            if not name.startswith(SWEEP) and not named[name].in_sweep():
                return named[name]
        raise UsageError(f"all runs of {experiment} belong to sweeps; name one, like {experiment}/{name}")
    wanted = f"run_{int(run):03d}" if run.isdecimal() else run
    if wanted not in named:
        raise UsageError(f"{experiment} has no run {run!r}.{suggest(wanted, [*named, 'latest'], 'mlx xp ls')}")
    return named[wanted]


def names_run(word: str) -> bool:
    """Return True if a word of a command line is the name, path or URI of a run, rather than an override or option."""
    return not _OVERRIDE.match(word)


def refuse_empty(names: Mapping[str, str | None]) -> None:
    """Refuse the empty name of a run after an option, as a shell passes it for an unset variable."""
    for option, name in names.items():
        if name is not None and not name.strip():
            raise UsageError(f"{option} names no run: {name!r}; write {option} run_003, or {option} latest")


def named_run(text: str, root: str, experiment: str) -> RunFolder:
    """Return the run for a name typed by a user: `run_003`, `3`, `latest`, `digits/run_003`, or its path or URI.

    Root and experiment are used if the text does not contain them.
    """
    base, options = split_options(text.rstrip("/"))
    claimed = False
    with contextlib.suppress(OSError):  # too long for a path
        claimed = any(Path(text, name).exists() for name in ("run.json", RESERVE))
    path = base if is_uri(text) else str(Path(base).resolve())
    if (is_uri(text) or claimed) and path.count("/") >= 2 + 2 * is_uri(text):
        above, name, run = path.rsplit("/", 2)
        return find_run(above + options, name, run)
    name, _, run = text.rpartition("/")
    if is_uri(text) or text.startswith("/") or "/" in name:
        raise UsageError(f"{text} is not the folder of a run; choose a run of: mlx xp ls")
    return find_run(root, name or experiment, run)


def attempt_name(number: int) -> str:
    """Return the name of the file by which the driver of an attempt claims a run."""
    return f"{ATTEMPT}{number:03d}"


def _run_names(storage: Storage, experiment: str, sweeps: bool) -> list[str]:
    """Return the names of the runs in an experiment's folder."""
    runs = [name for name in storage.names(experiment) if _number(name) or (sweeps and name.startswith(SWEEP))]
    if storage.local:
        return runs
    # On an object store, a number that two callers claimed at the same time remains as an empty folder.
    with ThreadPoolExecutor(16) as pool:
        contents = pool.map(lambda run: storage.names(experiment, run), runs)
        return [run for run, names in zip(runs, contents, strict=True) if names]


RUN_NAME = Kind("the name of a run, like run_003", lambda value: isinstance(value, str) and _number(value) > 0)


def _number(name: str, prefix: str = RUN) -> int:
    match = re.fullmatch(rf"{re.escape(prefix)}(\d{{3,9}})", name)
    return int(match[1]) if match else 0
