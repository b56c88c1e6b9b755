"""The files of a run folder to mirror, and the resulting changes to a repository.

README.md             model card
mirror.json           claim of the driver that writes to the repository (see `claims`)
run.json, conf.yaml, metrics.jsonl, code.zip, …   the files of the run folder, without logs
evaluations/*.json    results of `mlx train eval`
model.safetensors     weights of the best checkpoint, or else the latest, once the run has ended
checkpoints/epoch_0004/…   the kept checkpoints, unchanged
sweep.json, sweep.html     record and page of a sweep, if the other files belong to its best run
"""

import contextlib
import functools
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_runtime.companions.hub import card
from mlx_runtime.companions.hub.claims import FILE, IGNORED
from mlx_runtime.companions.hub.downloads import CARD, CHECKPOINTS, SWEEP_PAGE, SWEEP_RECORD, WEIGHTS
from mlx_runtime.companions.hub.repository import File
from mlx_runtime.companions.hub.screening import screen
from mlx_runtime.errors import MlxError
from mlx_runtime.loop.examples import EXAMPLES
from mlx_runtime.runs import records
from mlx_runtime.runs.checkpoints.index import ABOUT, list_checkpoints
from mlx_runtime.runs.folder import EVALUATIONS, RunFolder
from mlx_runtime.runs.snapshots import CODE
from mlx_runtime.storage.files import Storage, join_path, storage_at, to_json

STAGED = ".mirror"
"""Folder in a run folder from which files are uploaded. It links checkpoints, so that they may be removed meanwhile."""

NOT_MIRRORED = ("report.html", EXAMPLES, CARD, FILE, WEIGHTS)
"""Files of a run folder that are not mirrored, such as rows of the data, or rewritten for the mirror."""


@dataclass(frozen=True)
class SweepSummary:
    """The files that the mirror of a sweep has in addition to those of its best run."""

    folder: RunFolder  # of the sweep
    comparison: str  # sentence about the best trial, in Markdown
    trials: Sequence[Mapping[str, str]]  # the table of trials, best first
    page: str  # in HTML


@dataclass(frozen=True)
class StagedRun:
    """A state of a run that is ready to be uploaded."""

    files: Mapping[str, Path]  # by their path in the repository
    step: int  # global step of the latest checkpoint
    hidden: tuple[str, ...] = ()  # positions of secrets that were removed from the files
    fetch: Callable[[str], bool] | None = None  # copies a checkpoint from an object store; see `_fetch_checkpoint`

    def changes(self, present: Mapping[str, File], *, replace: bool = False) -> tuple[dict[str, Path], list[str]]:
        """Return the files to upload to a repository with these files, and those to remove from it.

        With `replace`, the repository contains another run of the same sweep.
        """
        complete = {path.rpartition("/")[0] for path in self.files if path.endswith(f"/{ABOUT}")}
        same = {folder for folder in complete if self._same(folder, present)}
        gone = {folder for folder in complete - same if self.fetch is not None and not self.fetch(folder)}
        files = {path: file for path, file in self.files.items() if path.rpartition("/")[0] not in gone}
        added = {path: file for path, file in files.items() if path.rpartition("/")[0] not in same}
        old = [path for path in present if path not in files and path not in (*IGNORED, FILE)]
        removed = [path for path in old if replace or path.startswith(f"{CHECKPOINTS}/")]
        return added, removed

    def _same(self, folder: str, present: Mapping[str, File]) -> bool:
        """Return True if a checkpoint is in the repository. Its description has the checksums of its other files."""
        files = {path: file for path, file in self.files.items() if path.startswith(f"{folder}/")}
        about = f"{folder}/{ABOUT}"
        return present.keys() >= files.keys() and present[about].hash in _hashes(files[about].read_bytes())


@contextlib.contextmanager
def stage_run(folder: RunFolder, *, weights: bool, sweep: SweepSummary | None = None) -> Iterator[StagedRun]:
    """Provide a snapshot of a run within the block, which its driver does not change."""
    target, storage = folder.path / STAGED, storage_at(folder.location)
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    try:
        step, hidden = -1, tuple[str, ...]()
        files = _link_checkpoints(folder, target) if storage.local else _copy_descriptions(storage, target)
        for about in [file for name, file in files.items() if name.endswith(f"/{ABOUT}")]:
            step = max(step, json.loads(about.read_bytes()).get("global_step", 0))
        # After the checkpoints, so that metrics.jsonl has all metrics that precede them.
        for name in storage.names():
            if not name.startswith(".") and name not in NOT_MIRRORED and storage.size_bytes(name) is not None:
                files[name] = _copy(storage, name, target)
                if name in (folder.conf.name, CODE):
                    hidden += screen(target / name)
        for name in storage.names(EVALUATIONS):
            if name.endswith(".json"):
                path = f"{EVALUATIONS}/{name}"
                files[path] = _copy(storage, path, target)
        record = _record(folder)
        (target / folder.record.name).write_text(to_json(record))
        trials = "" if sweep is None else card.trials(sweep.comparison, sweep.trials, SWEEP_PAGE)
        (target / CARD).write_text(card.text(record, target / folder.conf.name, trials), encoding="utf-8")
        files |= {name: target / name for name in (folder.record.name, CARD)}
        if sweep is not None:
            (target / SWEEP_RECORD).write_text(to_json(_record(sweep.folder)))
            (target / SWEEP_PAGE).write_text(sweep.page, encoding="utf-8", errors="backslashreplace")
            files |= {name: target / name for name in (SWEEP_RECORD, SWEEP_PAGE)}
        if weights and step >= 0:
            with contextlib.suppress(MlxError):  # a checkpoint without models, or a damaged one
                files[WEIGHTS] = _weights(folder, record, target / WEIGHTS)
        fetch = None if storage.local else functools.partial(_fetch_checkpoint, storage, target)
        yield StagedRun(files, max(0, step), hidden, fetch)
    finally:
        shutil.rmtree(target, ignore_errors=True)


def latest_step(folder: RunFolder) -> int:
    """Return the global step of the latest checkpoint of a run, or 0."""
    return max((item.global_step for item in list_checkpoints(folder.checkpoints)), default=0)


def _link_checkpoints(folder: RunFolder, target: Path) -> dict[str, Path]:
    """Link the files of all complete checkpoints, except those that are removed in the meantime."""
    files: dict[str, Path] = {}
    for item in list_checkpoints(folder.checkpoints):
        source, copy = Path(folder.checkpoints, item.name), target / item.name
        try:
            shutil.copytree(source, copy, copy_function=_link)
        except (OSError, shutil.Error):
            if (source / ABOUT).exists():
                raise
            continue
        if (copy / ABOUT).exists():
            inside = (file for file in copy.rglob("*") if file.is_file())
            files |= {f"{CHECKPOINTS}/{file.relative_to(target)}": file for file in inside}
    return files


def _copy_descriptions(storage: Storage, target: Path) -> dict[str, Path]:
    """Return the future paths of the files of all complete checkpoints on an object store; copy only descriptions."""
    files: dict[str, Path] = {}
    for item in list_checkpoints(join_path(storage.root, CHECKPOINTS)):
        folder = f"{CHECKPOINTS}/{item.name}"
        with contextlib.suppress(FileNotFoundError):  # it was removed in the meantime
            storage.download(target / folder / ABOUT, folder, ABOUT)
            files |= {item.path: target / item.path for item in storage.below(folder)}
    return files


def _fetch_checkpoint(storage: Storage, target: Path, folder: str) -> bool:
    """Copy a checkpoint from an object store. Return False if it was removed in the meantime."""
    try:
        for item in storage.below(folder):
            if not (target / item.path).exists():
                storage.download(target / item.path, item.path)
    except FileNotFoundError:
        return False
    return storage.size_bytes(folder, ABOUT) is not None


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # the file system does not support links
        shutil.copy2(source, target)


def _copy(storage: Storage, path: str, folder: Path) -> Path:
    """Copy a file that may be growing to a folder, without an incomplete last line."""
    target = folder / path
    storage.download(target, path)
    if target.suffix == ".jsonl":
        with target.open("rb+") as lines:
            content = lines.read()
            lines.truncate(content.rfind(b"\n") + 1)
    return target


def _record(folder: RunFolder) -> dict[str, Any]:
    """Return the record without fields that concern only this machine."""
    return {name: value for name, value in records.load_record(folder).items() if name != "mirror"}


def _weights(folder: RunFolder, record: Mapping[str, Any], target: Path) -> Path:
    from mlx_runtime.companions.sharding.consolidation import consolidate

    which = "best" if (record.get("best") or {}).get("value") is not None else "latest"
    consolidate(folder, which, target)
    return target


def _hashes(content: bytes) -> tuple[str, str]:
    """Return the hashes that a file with this content has in a repository: in LFS, and in git."""
    git = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False)
    return hashlib.sha256(content).hexdigest(), git.hexdigest()
