"""Finished items of a data job, which the job does not repeat when it is resumed.

An item is kept if another call is known to have the same effect: a method of the job, called with an equal item, by
equal code and settings. Its result must be the same after a round trip through JSON, and all of its files must have
been written by methods of `Output`, which are atomic. Any other item is repeated.
"""

import hashlib
import json
import pickle
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mlx_runtime.companions.jobs.filling import JOBS, RECORD, Output
from mlx_runtime.config.composition import Config
from mlx_runtime.errors import UsageError
from mlx_runtime.runs import records
from mlx_runtime.runs.folder import RunFolder, list_runs
from mlx_runtime.runs.logs import LogFile
from mlx_runtime.runs.snapshots import Upload
from mlx_runtime.storage.documents import COUNT, TEXT, Kind, from_json, list_of, stays_below
from mlx_runtime.storage.files import join_path, storage_at, storage_root, to_json

ITEMS = "logs/items.jsonl"
"""File in the folder of a job, with a line per finished item."""

FREE_SETTINGS = (
    *("start_workers", "cpus_per_worker", "use_gpu", "runtime_env", "secrets"),
    *("overwrite", "resume", "storage_path"),
)
"""Settings of `cfg` that may differ when a job is resumed."""

PATHS = list_of(Kind("a path below the output", stays_below))
SHAPE: dict[str, Kind] = {"call": COUNT, "number": COUNT, "item": TEXT, "files": PATHS}


class Key(NamedTuple):
    """Identity of an item: the number of the call of `map`, its number there, and a digest of the call itself."""

    call: int
    number: int
    item: str  # empty if the item cannot be identified


class Finished(NamedTuple):
    result: Any
    files: frozenset[str]


class FinishedItems:
    """The finished items of earlier drivers of a job, to which those of this driver are added.

    Args:
        folder: folder of the job.
        output: folder that it fills.
        groups: names of the groups of its config.
        resumed: the output has the files of an earlier driver. Those of items that are not kept are removed.
    """

    def __init__(self, folder: RunFolder, output: Output, groups: Iterable[str], *, resumed: bool) -> None:
        self._output, self._calls = output, 0
        self._given = {"output", "_display", "_finished", *groups}  # attributes of a job that `run` has not set
        self._kept: dict[Key, Finished] = {}
        if resumed:
            present = {file.path for file in output.below() if file.path != RECORD}
            self._kept = {key: item for key, item in _read(folder).items() if item.files <= present}
            self._remove(present - self._files())
        else:
            (folder.path / ITEMS).unlink(missing_ok=True)
            storage_at(folder.location).remove_file(*ITEMS.split("/"))
        self.count = len(self._kept)
        self._log = LogFile(folder, ITEMS)

    def begin_call(
        self, job: Any, function: Callable[[Any], Any], items: Sequence[Any]
    ) -> tuple[list[Key], dict[int, Finished]]:
        """Return the keys of the items of the next call of `map`, and the finished ones by number.

        Finished items of that call with other keys are removed.
        """
        identity = self._identity(job, function)
        keys = [Key(self._calls, number, _digest(identity, item)) for number, item in enumerate(items)]
        self._forget({key for key in self._kept if key.call == self._calls} - {*keys})
        self._calls += 1
        return keys, {key.number: self._kept[key] for key in keys if key in self._kept}

    def _identity(self, job: Any, function: Callable[[Any], Any]) -> bytes | None:
        """Return the identity of a method of a job with the attributes that its `run` has set, or None."""
        if getattr(function, "__self__", None) is not job:
            return None
        state = {name: value for name, value in vars(job).items() if name not in self._given}
        try:
            return pickle.dumps((function.__module__, function.__qualname__, state))
        except Exception:  # pickling raises many types
            return None

    def add(self, key: Key, result: Any, files: Iterable[str] | None) -> None:
        """Add an item, if it may be kept; `files` is None if they are not known."""
        self._output.written += files or ()  # a task has written them through its own copy
        if files is None or not key.item:
            return
        try:
            if repr(json.loads(json.dumps(result))) != repr(result):
                return
        except (TypeError, ValueError, RecursionError):
            return
        self._log.write(json.dumps({**key._asdict(), "result": result, "files": sorted(files)}) + "\n")
        self.count += 1

    def complete(self) -> None:
        """Remove the files of items of calls that were not repeated, before the output is published."""
        self._forget({key for key in self._kept if key.call >= self._calls})

    def close(self) -> None:
        self._log.close()

    def _forget(self, keys: set[Key]) -> None:
        files = frozenset[str]().union(*(self._kept.pop(key).files for key in keys))
        self._remove(files - self._files() - {*self._output.written})

    def _files(self) -> frozenset[str]:
        return frozenset[str]().union(*(item.files for item in self._kept.values()))

    def _remove(self, files: Iterable[str]) -> None:
        for file in files:
            self._output.remove_file(*file.split("/"))


def interrupted(config: Config, output: str) -> RunFolder | None:
    """Return the latest job of this name and output if it was interrupted and has finished items, or else None.

    Raises:
        UsageError: the code or the config has changed since.
    """
    for folder in reversed(list_runs(join_path(storage_root(config.cfg.storage_path), JOBS), config.cfg.name)):
        record = records.load_record(folder)
        if record.get("output") == output:
            break
    else:
        return None
    if record["status"] == "SUCCEEDED" or not record.get("filling"):
        return None
    now = fingerprints(config)
    changed = [f"the {name} changed" for name in now if record.get(name) != now[name]]
    if changed:
        raise UsageError(
            f"{folder.title} cannot be resumed: {' and '.join(changed)} since it was interrupted. Undo that, or start "
            "over without --resume"
        )
    return folder


def fingerprints(config: Config) -> dict[str, str]:
    """Return the digests of the code in `src`, and of the settings that determine the effect of an item."""
    code = hashlib.sha256()
    for path, _ in sorted(Upload.of(Path.cwd()).files):  # without ignored files, which a cluster does not get
        if path.parts[0] == "src" and path.suffix == ".py":
            content = path.read_bytes()
            code.update(f"{path} {len(content)} ".encode() + content)
    cfg = {name: value for name, value in config.shown["cfg"].items() if name not in FREE_SETTINGS}
    settings = hashlib.sha256(to_json({**config.shown, "cfg": cfg}).encode())
    return {"code": code.hexdigest(), "settings": settings.hexdigest()}


def _read(folder: RunFolder) -> dict[Key, Finished]:
    """Return the stored items. The last line may be incomplete."""
    items = {}
    try:
        lines = folder.read(ITEMS).splitlines()
    except FileNotFoundError:
        return {}
    for line in lines:
        try:
            found = from_json(line, SHAPE, needs=(*SHAPE, "result"))
        except ValueError:
            continue
        items[Key(found["call"], found["number"], found["item"])] = Finished(found["result"], frozenset(found["files"]))
    return items


def _digest(identity: bytes | None, item: Any) -> str:
    if identity is None:
        return ""
    try:
        return hashlib.sha256(identity + pickle.dumps(item)).hexdigest()
    except Exception:  # pickling raises many types
        return ""
