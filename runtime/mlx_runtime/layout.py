"""Every path of a run, in one place: what training writes, listing reads and a restart continues.

<storage>/<experiment>/run_001/
    run.json              status, versions, command, best metrics (see `registry`)
    conf.yaml             the resolved config
    code.zip              the experiment's code (see `snapshots`)
    metrics.jsonl         one line per report (see `tracking`)
    events.out.tfevents.* TensorBoard
    checkpoints/epoch_0001/  state.pt, checkpoint.json (see `checkpoints`)
    profile/              traces of training steps, with `cfg.profile` (see `profiling`)
    logs/driver.log       what the driver printed; rank_0.log and so on, the workers (see `logs`)
    evaluations/*.json    what `mlx train eval` has measured, one file each time
    report.html           a page about the run, once somebody has asked for it (see `report`)
    .attempt-001          one file per driver that has taken on the run: which process it is, and when it was last seen
"""

import contextlib
import fnmatch
import hashlib
import os
import re
import shutil
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_runtime.errors import StorageError, UsageError, first_line, near
from mlx_runtime.settings import Settings
from mlx_runtime.storage import Storage, is_uri, joined, split_options, to_json

CONF = Path("src/conf.yaml")
"""The experiment's config, relative to the experiment folder."""

STOP_NOTE = ".stop"
"""Name of the file that asks a run to end."""

EVALUATIONS = "evaluations"
"""Name of the folder, in that of a run, of what evaluations have measured."""

ATTEMPT = ".attempt-"
"""What the names of the files begin with that drivers claim a run with."""

READ_MARK = "used-"
"""What the files begin with that mark a prepared set as being read."""

BUSY_S = 300
"""How old such a mark may be; the living refresh theirs more often."""

EXPERIMENT = Path("src/experiment.py")
"""The file that makes a folder an experiment."""

JOB = Path("src/job.py")
"""The file that makes a folder a data job."""


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run.

    Attributes:
        path: folder on this machine; with a URI, the working copy of what is there.
        uri: of the run on an object store, or None.
    """

    path: Path
    uri: str | None = None

    @property
    def experiment(self) -> str:
        return self.path.parent.name

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def place(self) -> str:
        """Where the run is for everyone: its URI, else its folder."""
        return self.uri or str(self.path)

    @property
    def root(self) -> str:
        """Of the storage that the run is in."""
        base, options = split_options(self.place)
        return base.removesuffix(f"/{self.experiment}/{self.name}") + options

    @property
    def title(self) -> str:
        """`digits/run_003`, which every command takes."""
        return f"{self.experiment}/{self.name}"

    @property
    def record(self) -> Path:
        return self.path / "run.json"

    @property
    def conf(self) -> Path:
        return self.path / "conf.yaml"

    @property
    def code(self) -> Path:
        return self.path / "code.zip"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> str:
        """Folder or URI."""
        return joined(self.place, "checkpoints")

    @property
    def reserve(self) -> Path:
        """Space held while the run lasts, so that its end can be recorded on a disk that has filled up."""
        return self.path / ".reserve"

    def read(self, *parts: str) -> bytes:
        """Return the content of a file of the run, from where it is for everyone.

        Raises:
            OSError: there is none, or the storage does not answer.
            StorageError: there is no such storage.
        """
        return self.path.joinpath(*parts).read_bytes() if self.uri is None else Storage(self.uri).read(*parts)

    def push(self, *files: Path, must: bool = False) -> None:
        """Copy files of this machine to the object store, where the run is on one.

        Args:
            files: of the run folder.
            must: a failure is an error; else it is passed over, for files that are pushed again and again.

        Raises:
            StorageError: with `must`, the storage does not take them.
        """
        if self.uri is None:
            return
        try:
            for file in files:
                Storage(self.uri).upload(file, *file.relative_to(self.path).parts)
        except (OSError, StorageError) as error:
            if must:
                raise StorageError(f"cannot write {self.uri}: {first_line(error)}") from error

    def forget(self, *files: Path) -> None:
        """Remove files from the object store, too."""
        if self.uri is not None:
            with contextlib.suppress(OSError, StorageError):
                for file in files:
                    Storage(self.uri).remove_file(file.name)

    def pull(self, *patterns: str) -> None:
        """Bring files of a run on an object store to this machine.

        Args:
            patterns: of their names.

        Raises:
            StorageError: the storage does not answer.
        """
        if self.uri is None:
            return
        storage = Storage(self.uri)
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            for old in [file for pattern in patterns for file in self.path.glob(pattern)]:
                old.unlink()
            for info in storage.listed():
                if any(fnmatch.fnmatch(info.base_name, pattern) for pattern in patterns):
                    storage.download(self.path / info.base_name, info.base_name)
        except OSError as error:
            raise StorageError(f"cannot read {self.uri}: {first_line(error)}") from error

    def ask_to_stop(self) -> None:
        """Leave a note that the run's driver finds, wherever it is.

        Raises:
            StorageError: the storage cannot be written.
        """
        try:
            Storage(self.place).write(b"", STOP_NOTE)
        except OSError as error:
            raise StorageError(f"cannot write {self.place}: {first_line(error)}") from error

    def asked_to_stop(self) -> bool:
        with contextlib.suppress(OSError, StorageError):
            return Storage(self.place).size_bytes(STOP_NOTE) is not None
        return False

    def withdraw_stop(self) -> None:
        with contextlib.suppress(OSError, StorageError):
            Storage(self.place).remove_file(STOP_NOTE)

    def begun(self) -> bool:
        """Whether there is enough of the run to go on with it."""
        with contextlib.suppress(OSError):
            return Storage(self.place).size_bytes(self.conf.name) is not None
        return True

    def hold_reserve(self) -> None:
        """Take the space for recording the end."""
        with contextlib.suppress(OSError):
            _reserve(self.reserve)

    def attempts(self) -> int:
        """How many drivers have taken on this run so far, one after the other.

        Raises:
            StorageError: the storage does not answer.
        """
        try:
            names = Storage(self.place).names()
        except OSError as error:
            raise StorageError(f"cannot read {self.place}: {first_line(error)}") from error
        found = [re.fullmatch(rf"{re.escape(ATTEMPT)}(\d{{3,9}})", name) for name in names]
        return max((int(match[1]) for match in found if match), default=0)

    def claim_attempt(self, number: int, driver: Mapping[str, Any] | None = None) -> bool:
        """Become the driver of a run; of several at the same instant exactly one.

        Args:
            number: of the attempt.
            driver: what others should know about the driver.

        Raises:
            StorageError: the storage cannot be written, or cannot keep two drivers from taking over the same run.
        """
        storage, name = Storage(self.place), _attempt(number)
        content = to_json(dict(driver or {})).encode()
        try:
            if number > 1 or storage.exclusive:
                return storage.create_exclusively(content, name)
            storage.write(content, name)  # of a new run, whose number was claimed with its folder
        except OSError as error:
            raise StorageError(f"cannot write {self.place}: {first_line(error)}") from error
        except StorageError as error:
            raise StorageError(
                f"{error}, so two drivers could train {self.title} at once. "
                f"Start a new run with its config and weights: mlx train run --from {self.title} "
                "cfg.restore_checkpoint_path=CHECKPOINT"
            ) from error
        return True

    def note_attempt(self, number: int, driver: Mapping[str, Any]) -> None:
        """Update what others should know about the driver of an attempt.

        Raises:
            StorageError: the storage cannot be written.
        """
        try:
            Storage(self.place).write(to_json(dict(driver)).encode(), _attempt(number))
        except OSError as error:
            raise StorageError(f"cannot write {self.place}: {first_line(error)}") from error

    def attempt(self, number: int) -> bytes:
        """What the driver of an attempt has noted; nothing if it was killed before it could.

        Raises:
            StorageError: the storage does not answer.
        """
        try:
            return Storage(self.place).read(_attempt(number))
        except (FileNotFoundError, IsADirectoryError):
            return b""
        except OSError as error:
            raise StorageError(f"cannot read {self.place}: {first_line(error)}") from error


def experiment_folder(start: Path | None = None) -> Path:
    """The experiment that the working directory is.

    Raises:
        UsageError: there is no `src/experiment.py` here.
    """
    folder = start or Path.cwd()
    if not (folder / EXPERIMENT).is_file():
        raise UsageError(
            f"{folder} is not an experiment: it has no {EXPERIMENT}. "
            "Change into one, or make one with: mlx train new NAME"
        )
    return folder


def job_folder(start: Path | None = None) -> Path:
    """The data job that the working directory is.

    Raises:
        UsageError: there is no `src/job.py` here.
    """
    folder = start or Path.cwd()
    if not (folder / JOB).is_file():
        raise UsageError(
            f"{folder} is not a data job: it has no {JOB}. Change into one, or make one with: mlx data new NAME"
        )
    return folder


def commands(conf: Path = CONF) -> str:
    """The group of commands that a conf.yaml is for: `mlx data` in a data job, else `mlx train`."""
    is_job = conf.with_name(JOB.name).is_file() and not conf.with_name(EXPERIMENT.name).is_file()
    return "mlx data" if is_job else "mlx train"


def storage_root(storage_path: str) -> str:
    """The absolute folder that `cfg.storage_path` names, or its URI.

    Raises:
        UsageError: it is empty, or the URI holds a key, which every record and dashboard would show.
    """
    if not storage_path.strip():
        raise UsageError("cfg.storage_path is empty; name a folder or a URI")
    if is_uri(storage_path) and re.search(r"://[^/?]+@|(access_key|secret_key|session_token)=", storage_path):
        raise UsageError(
            "cfg.storage_path holds a key; leave it out, and set it in the environment, like AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY"
        )
    try:
        return storage_path if is_uri(storage_path) else str(Path(storage_path).expanduser().resolve())
    except (OSError, RuntimeError, ValueError) as error:
        raise UsageError(f"{storage_path!r:.200} cannot be the storage: {first_line(error)}") from error


def prepared_root(storage_path: str, prepared_path: str | None) -> str:
    """Where prepared sets are: the folder or URI that `cfg.prepared_path` names, else a folder in the storage."""
    return prepared_path or joined(storage_root(storage_path), ".prepared")


def is_read_mark(name: str, changed_s: float) -> bool:
    """Whether a file says that somebody reads the prepared set that it is in.

    Args:
        name: of the file.
        changed_s: when it was last written, in seconds since 1970.
    """
    return name.startswith(READ_MARK) and time.time() - changed_s < BUSY_S


def run_folder(root: str, experiment: str, run: str) -> RunFolder:
    """The folder of a run in a storage; knows paths, touches nothing."""
    if not is_uri(root):
        return RunFolder(Path(root, experiment, run))
    copies = Settings.read().cache / "runs" / hashlib.sha256(root.encode()).hexdigest()[:12]
    return RunFolder(copies / experiment / run, joined(root, experiment, run))


def names_folder(name: str) -> bool:
    """True if a folder of a storage can have this name, which people type and read in lists."""
    return bool(name) and name.isprintable() and name == name.strip() and name[0] != "." and not {*"/?#"} & {*name}


def claim_run(root: str, experiment: str) -> RunFolder:
    """Create the next `run_NNN` of an experiment; two callers at the same instant get different ones.

    Args:
        root: of the storage.
        experiment: whose run it is.

    Raises:
        UsageError: the experiment's name cannot be a folder.
        StorageError: the folder cannot be written, or the disk is full.
    """
    if not names_folder(experiment):
        raise UsageError(
            f"cfg.name is {experiment!r}, which cannot name a folder; leave out / ? #, line breaks and others that do "
            "not print, a leading dot, and spaces around it"
        )
    storage = Storage(root)
    try:
        if storage.local:
            Path(storage.of(experiment)).mkdir(parents=True, exist_ok=True)
        number = max((_number(name) for name in storage.names(experiment)), default=0)
        while True:
            number += 1
            folder = run_folder(root, experiment, f"run_{number:03d}")
            if storage.claim(experiment, folder.name):
                break
        try:
            if folder.uri is not None:
                shutil.rmtree(folder.path, ignore_errors=True)  # of a storage that was emptied
                folder.path.mkdir(parents=True)
            else:
                (folder.path / "checkpoints").mkdir()
            _reserve(folder.reserve)
        except OSError:
            shutil.rmtree(folder.path, ignore_errors=True)
            raise
    except OSError as error:
        raise StorageError(
            f"cannot write runs to {root}: {error.strerror or first_line(error)}. "
            "Free or unlock it, or choose another with cfg.storage_path=FOLDER"
        ) from error
    return folder


def list_runs(root: str, experiment: str | None = None) -> list[RunFolder]:
    """All runs, or those of one experiment, oldest first per experiment.

    Raises:
        StorageError: the storage does not answer.
    """
    storage = Storage(root)
    try:
        names = storage.names() if experiment is None else [experiment]
        found = {name: _numbered(storage, name) for name in names if _is_folder(storage, name)}
    except OSError as error:
        raise StorageError(f"cannot read {root}: {first_line(error)}") from error
    return [run_folder(root, name, run) for name, runs in found.items() for run in sorted(runs, key=_number)]


def find_run(root: str, experiment: str, run: str = "latest") -> RunFolder:
    """One run by name (`run_003`), number (`3`) or `latest`.

    Raises:
        UsageError: no such experiment or run; lists what there is.
    """
    runs = list_runs(root, experiment)
    if not runs:
        known = {folder.experiment for folder in list_runs(root)}
        raise UsageError(f"no runs of {experiment!r} in {root}.{near(experiment, known)}")
    if run == "latest":
        return runs[-1]
    wanted = f"run_{int(run):03d}" if run.isdecimal() else run
    for folder in runs:
        if folder.name == wanted:
            return folder
    raise UsageError(f"{experiment} has no run {run!r}.{near(wanted, (folder.name for folder in runs))}")


def named_run(text: str, root: str, experiment: str) -> RunFolder:
    """One run as a person names it: `run_003`, `3`, `latest`, `digits/run_003`, or the path or URI of its folder.

    Args:
        text: what was typed.
        root: of the storage.
        experiment: whose run it is when the text does not say.

    Raises:
        UsageError: there is no such run.
    """
    base, options = split_options(text.rstrip("/"))
    if is_uri(text) or Path(text, "run.json").is_file():
        parts = base if is_uri(text) else str(Path(base).resolve())
        if parts.count("/") < 2 + 2 * is_uri(text):
            raise UsageError(f"{text!r} is not the place of a run; it ends with name/run_003")
        above, name, run = parts.rsplit("/", 2)
        return find_run(above + options, name, run)
    name, _, run = text.rpartition("/")
    return find_run(root, name or experiment, run)


def _is_folder(storage: Storage, name: str) -> bool:
    return not name.startswith(".") and (not storage.local or Path(storage.of(name)).is_dir())


def _numbered(storage: Storage, experiment: str) -> list[str]:
    """The runs in an experiment's folder."""
    runs = [name for name in storage.names(experiment) if _number(name)]
    if storage.local:
        return runs
    # On an object store a number that two claimed at once stays behind as an empty folder.
    with ThreadPoolExecutor(16) as pool:
        contents = pool.map(lambda run: storage.names(experiment, run), runs)
        return [run for run, names in zip(runs, contents, strict=True) if names]


def _attempt(number: int) -> str:
    return f"{ATTEMPT}{number:03d}"


def _number(name: str) -> int:
    match = re.fullmatch(r"run_(\d{3,})", name)
    return int(match.group(1)) if match else 0


def _reserve(file: Path, size_bytes: int = 1 << 20) -> None:
    """Really write a megabyte: a full disk accepts empty files and folders."""
    with file.open("wb") as stream:
        stream.write(b"\0" * size_bytes)
        stream.flush()
        os.fsync(stream.fileno())
