"""Every path of a run, in one place: what training writes, listing reads and a restart continues.

<storage>/<experiment>/run_001/
    run.json              status, versions, command, best metrics (see `registry`)
    conf.yaml             the resolved config
    metrics.jsonl         one line per report (see `tracking`)
    events.out.tfevents.* TensorBoard
    checkpoints/epoch_0001/state.pt
"""

import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from mlx_runtime.errors import StorageError, UsageError, near

CONF = Path("src/conf.yaml")
"""The experiment's config, relative to the experiment folder."""

EXPERIMENT = Path("src/experiment.py")
"""The file that makes a folder an experiment."""


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run. Knows paths, touches nothing."""

    path: Path

    @property
    def experiment(self) -> str:
        return self.path.parent.name

    @property
    def name(self) -> str:
        return self.path.name

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
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def reserve(self) -> Path:
        """Space held while the run lasts, so that its end can be recorded on a disk that has filled up."""
        return self.path / ".reserve"

    def checkpoint(self, epoch: int) -> Path:
        """Of an epoch as code counts, from 0; folders count from 1, as a person does and as is printed."""
        return self.checkpoints / f"epoch_{epoch + 1:04d}"


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


def storage_folder(storage_path: str) -> Path:
    """The absolute folder that `cfg.storage_path` names.

    Raises:
        StorageError: it is a URI, which this version cannot write to.
    """
    if "://" in storage_path:
        raise StorageError(
            f"cfg.storage_path is {storage_path!r}; runs are stored in folders. "
            "Give a local or shared folder, like cfg.storage_path=/mnt/runs"
        )
    return Path(storage_path).expanduser().resolve()


def prepared_root(storage_path: str, prepared_path: str | None) -> str:
    """Where prepared sets are: the folder or URI that `cfg.prepared_path` names, else a folder in the storage."""
    return prepared_path or str(storage_folder(storage_path) / ".prepared")


def claim_run(storage: Path, experiment: str) -> RunFolder:
    """Create the next `run_NNN` of an experiment; two callers at the same instant get different ones.

    Raises:
        UsageError: the experiment's name cannot be a folder.
        StorageError: the folder cannot be written, or the disk is full.
    """
    if not experiment or "/" in experiment or experiment.startswith("."):
        raise UsageError(f"cfg.name is {experiment!r}, which cannot name a folder; leave out / and a leading dot")
    parent = storage / experiment
    try:
        parent.mkdir(parents=True, exist_ok=True)
        number = max((_number(name) for name in os.listdir(parent)), default=0)
        while True:
            number += 1
            folder = RunFolder(parent / f"run_{number:03d}")
            try:
                folder.path.mkdir()  # the file system decides who was first
                break
            except FileExistsError:
                continue
        try:
            folder.checkpoints.mkdir()
            _reserve(folder.reserve)
        except OSError:
            shutil.rmtree(folder.path, ignore_errors=True)
            raise
    except OSError as error:
        raise StorageError(
            f"cannot write runs to {storage}: {error.strerror or error}. "
            "Free or unlock it, or choose another with cfg.storage_path=FOLDER"
        ) from error
    return folder


def list_runs(storage: Path, experiment: str | None = None) -> list[RunFolder]:
    """All runs, or those of one experiment, oldest first per experiment."""
    if experiment is None:
        names = sorted(path.name for path in storage.iterdir()) if storage.is_dir() else []
    else:
        names = [experiment]
    runs = []
    for name in names:
        parent = storage / name
        found = [path for path in parent.iterdir() if _number(path.name)] if parent.is_dir() else []
        runs += [RunFolder(path) for path in sorted(found, key=lambda path: _number(path.name))]
    return runs


def find_run(storage: Path, experiment: str, run: str = "latest") -> RunFolder:
    """One run by name (`run_003`), number (`3`) or `latest`.

    Raises:
        UsageError: no such experiment or run; lists what there is.
    """
    runs = list_runs(storage, experiment)
    if not runs:
        known = {folder.experiment for folder in list_runs(storage)}
        raise UsageError(f"no runs of {experiment!r} in {storage}.{near(experiment, known)}")
    if run == "latest":
        return runs[-1]
    wanted = f"run_{int(run):03d}" if run.isdecimal() else run
    for folder in runs:
        if folder.name == wanted:
            return folder
    raise UsageError(f"{experiment} has no run {run!r}.{near(wanted, (folder.name for folder in runs))}")


def write_atomic(path: Path, text: str) -> None:
    """Replace a file's content so that a reader sees the old or the new text, never a part.

    Raises:
        OSError: the folder cannot be written.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)  # mkstemp makes it private; colleagues share a storage
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _number(name: str) -> int:
    match = re.fullmatch(r"run_(\d{3,})", name)
    return int(match.group(1)) if match else 0


def _reserve(file: Path, size_bytes: int = 1 << 20) -> None:
    """Really write a megabyte: a full disk accepts empty files and folders."""
    with file.open("wb") as stream:
        stream.write(b"\0" * size_bytes)
        stream.flush()
        os.fsync(stream.fileno())
