"""The files of a run folder to mirror, its model card, and the resulting changes to a repository.

README.md             model card
mirror.json           claim of the driver that writes to the repository (see `claims`)
run.json, conf.yaml, metrics.jsonl, code.zip, …   the files of the run folder, without logs
evaluations/*.json    results of `mlx train eval`
model.safetensors     weights of the best checkpoint, or else the latest, once the run has ended
checkpoints/epoch_0004/…   the kept checkpoints, unchanged
"""

import contextlib
import hashlib
import json
import os
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_runtime.companions.hub.claims import FILE
from mlx_runtime.companions.hub.remote import CARD, CHECKPOINTS, WEIGHTS
from mlx_runtime.companions.hub.repository import File
from mlx_runtime.errors import MlxError, StorageError, printable, short_message
from mlx_runtime.loop.examples import EXAMPLES
from mlx_runtime.runs import records
from mlx_runtime.runs.checkpoints.index import ABOUT, list_checkpoints, position
from mlx_runtime.runs.folder import EVALUATIONS, RunFolder
from mlx_runtime.runs.tables import format_number
from mlx_runtime.storage.files import Storage, storage_at, to_json

STAGED = ".mirror"
"""Folder in a run folder from which files are uploaded. It links checkpoints, so that they may be removed meanwhile."""

NOT_MIRRORED = ("report.html", EXAMPLES, CARD, FILE, WEIGHTS)
"""Files of a run folder that are not mirrored, such as rows of the data, or rewritten for the mirror."""

NOT_REPEATED = ("cfg.hub.mirror=", "cfg.storage_path=", "--resume")
"""Beginnings of overrides that are left out of the command in the model card."""

TAGS = ("mlx-runtime", "pytorch")


@dataclass(frozen=True)
class StagedRun:
    """A state of a run that is ready to be uploaded, except for the states of its checkpoints."""

    storage: Storage  # of the run
    target: Path  # folder of the files, each at its path in the repository
    files: frozenset[str]  # paths in the repository
    step: int  # global step of the latest checkpoint
    latest: str  # its folder, or empty

    def changes(self, present: Mapping[str, File]) -> tuple[dict[str, Path], list[str]]:
        """Return the files to upload to a repository with these files, and those to remove from it.

        Checkpoints that are not in the repository are copied from an object store, unless they were removed meanwhile.

        Raises:
            StorageError: the latest checkpoint was removed, so this state is outdated.
        """
        complete = {path.rpartition("/")[0] for path in self.files if path.endswith(f"/{ABOUT}")}
        same = {folder for folder in complete if self._same(folder, present)}
        if self.latest in complete - same and not self._fetch(self.latest):  # first, as it may be removed soon
            raise _outdated(self.storage)
        gone = {folder for folder in complete - same if not self._fetch(folder)}
        files = {path for path in self.files if path.rpartition("/")[0] not in gone}
        added = {path: self.target / path for path in files if path.rpartition("/")[0] not in same}
        return added, [path for path in present if path.startswith(f"{CHECKPOINTS}/") and path not in files]

    def _same(self, folder: str, present: Mapping[str, File]) -> bool:
        """Return True if a checkpoint is in the repository. Its description has the checksums of its other files."""
        about = f"{folder}/{ABOUT}"
        complete = present.keys() >= {*self._files_in(folder)}
        return complete and present[about].hash in _hashes((self.target / about).read_bytes())

    def _fetch(self, folder: str) -> bool:
        """Copy the files of a checkpoint that are not linked. Return False if it was removed in the meantime."""
        for path in self._files_in(folder):
            try:
                if not (self.target / path).exists():
                    self.storage.download(self.target / path, path)
            except FileNotFoundError:
                (self.target / path).unlink(missing_ok=True)
                return False
        return True

    def _files_in(self, folder: str) -> list[str]:
        return [path for path in self.files if path.startswith(f"{folder}/")]


@contextlib.contextmanager
def stage_run(
    folder: RunFolder, *, weights: bool, report: Callable[[str], object] = lambda line: None
) -> Iterator[StagedRun]:
    """Provide a snapshot of a run within the block, which its driver does not change.

    `report` receives a line if there should be a file of its `weights`, and cannot be.
    """
    target, storage = folder.path / STAGED, storage_at(folder.location)
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    try:
        step, latest, files = -1, "", set[str]()
        for item in list_checkpoints(folder.checkpoints):
            latest = f"{CHECKPOINTS}/{item.name}"
            with contextlib.suppress(FileNotFoundError):  # it was removed in the meantime
                _copy(storage, f"{latest}/{ABOUT}", target)
                files |= _link(storage, latest, target)
                step = item.global_step
        if latest and f"{latest}/{ABOUT}" not in files:
            raise _outdated(storage)
        # After the checkpoints, so that metrics.jsonl has all metrics that precede them.
        names = [name for name in storage.names() if not name.startswith(".") and name not in NOT_MIRRORED]
        evaluations = [f"{EVALUATIONS}/{name}" for name in storage.names(EVALUATIONS) if name.endswith(".json")]
        for path in (*names, *evaluations):
            if storage.size_bytes(path) is not None:
                files.add(path)
                _copy(storage, path, target)
        record = {name: value for name, value in records.load_record(folder).items() if name != "mirror"}
        (target / folder.record.name).write_text(to_json(record))
        (target / CARD).write_text(card(record, target / folder.conf.name), encoding="utf-8")
        files |= {folder.record.name, CARD}
        if weights and step >= 0:
            from mlx_runtime.companions.sharding.consolidation import consolidate

            best = (record.get("best") or {}).get("value") is not None
            try:
                consolidate(folder, "best" if best else "latest", target / WEIGHTS)
                files.add(WEIGHTS)
            except MlxError as error:  # a checkpoint without models or frozen weights, or a damaged one
                report(f"without   {WEIGHTS}: {short_message(error)}")
        yield StagedRun(storage, target, frozenset(files), max(0, step), latest)
    finally:
        shutil.rmtree(target, ignore_errors=True)


def latest_step(folder: RunFolder) -> int:
    """Return the global step of the latest checkpoint of a run, or 0."""
    return max((item.global_step for item in list_checkpoints(folder.checkpoints)), default=0)


def _outdated(storage: Storage) -> StorageError:
    return StorageError(f"a checkpoint in {storage.root} was removed before it was uploaded; repeat the upload")


def _link(storage: Storage, checkpoint: str, target: Path) -> set[str]:
    """Return the files of a checkpoint. On this machine, link them in a folder that has its description.

    Raises FileNotFoundError if the checkpoint was removed in the meantime.
    """
    files = {item.path for item in storage.below(checkpoint)}
    for path in files - {f"{checkpoint}/{ABOUT}"} if storage.local else ():
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(storage.of(path), target / path)
        except FileNotFoundError:
            raise
        except OSError:  # without links, files are copied when they are needed
            break
    if storage.size_bytes(checkpoint, ABOUT) is None:
        raise FileNotFoundError(checkpoint)
    return files


def _copy(storage: Storage, path: str, folder: Path) -> None:
    """Copy a file that may be growing to a folder, without an incomplete last line."""
    target = folder / path
    storage.download(target, path)
    if target.suffix == ".jsonl":
        with target.open("rb+") as lines:
            content = lines.read()
            lines.truncate(content.rfind(b"\n") + 1)


def _hashes(content: bytes) -> tuple[str, str]:
    """Return the hashes that a file with this content has in a repository: in LFS, and in git."""
    git = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False)
    return hashlib.sha256(content).hexdigest(), git.hexdigest()


def card(record: Mapping[str, Any], conf: Path) -> str:
    """Return the card of a run, in Markdown, with metadata for the Hub."""
    lines = ["---", f"tags: {json.dumps(list(TAGS))}", "---", ""]
    lines += [f"# {_plain(record.get('experiment'))} {_plain(record.get('run'))}", ""]
    epochs = f" after epoch {record['epoch'] + 1} of {record.get('epochs')}" if record.get("epoch") is not None else ""
    parameters = f" {record['parameters']:,} parameters." if record.get("parameters") else ""
    lines += [f"Status: {_plain(record.get('status'))}{epochs}.{parameters}", ""]
    best = record.get("best") or {}
    if best.get("value") is not None:
        name, value = _plain(record.get("monitor")), format_number(best["value"])
        lines += [f"Best `{name}`: {value}, in {position(best)}.", ""]
    if metrics := record.get("metrics"):
        lines += ["| metric | last value |", "|---|---|"]
        lines += [f"| `{_plain(name)}` | {format_number(value)} |" for name, value in sorted(metrics.items())] + [""]
    lines += ["## Reproduce", "", *_commands(record), ""]
    versions = {"python": record.get("python"), **(record.get("packages") or {})}
    known = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    machine = f"{record.get('workers')} workers, {_plain(record.get('device'))}"
    lines += [f"Seed {record.get('seed')}, {machine}; {_plain(known)}.", ""]
    lines += ["`code.zip` contains the code, and `conf.yaml` the whole config:", ""]
    with contextlib.suppress(OSError, ValueError):
        lines += _block("yaml", *conf.read_text(encoding="utf-8").splitlines())
    return "\n".join(lines) + "\n"


def _commands(record: Mapping[str, Any]) -> list[str]:
    """Return commands that repeat the run, or Python code if its class is not the experiment of the project."""
    commit = (record.get("git") or {}).get("commit")
    checkout = [f"git checkout {_plain(commit)}"] if commit else []
    chosen = [item for item in record.get("overrides") or [] if not item.lstrip("+").startswith(NOT_REPEATED)]
    if path := record.get("experiment_class"):
        module, _, name = _plain(path).rpartition(".")
        call = f"run({name}, {_plain(json.dumps(chosen))}).result()"
        lines = ["from mlx_runtime import run", f"from {module} import {name}", "", call]
        return [*(_block("sh", *checkout) if checkout else []), *_block("python", *lines)]
    return _block("sh", *checkout, _plain(shlex.join(["mlx", "train", "run", *chosen])))


def _block(language: str, *lines: str) -> list[str]:
    fence = "```"
    while any(fence in line for line in lines):
        fence += "`"
    return [f"{fence}{language}", *lines, fence]


def _plain(value: Any) -> str:
    """Return a text from a record, escaped for one line of Markdown."""
    return printable(str(value), one_line=True).replace("`", "'").replace("|", "/")
