"""Finished items of a data job, which the job does not repeat when it is resumed.

An item is kept if `DataJob.map` was given its key, its result is the same after a round trip through JSON, and all of
its files were written by methods of `Output`, which are atomic. Any other item is repeated.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mlx_runtime.companions.jobs.filling import JOBS, RECORD, Output
from mlx_runtime.config.composition import Config
from mlx_runtime.errors import DataJobError, UsageError
from mlx_runtime.runs import records
from mlx_runtime.runs.folder import RunFolder, list_runs, read_rows
from mlx_runtime.runs.logs import LogFile
from mlx_runtime.runs.sources import code_digest
from mlx_runtime.storage.documents import TEXT, Kind, list_of, stays_below
from mlx_runtime.storage.files import join_path, storage_at, storage_root, to_json

ITEMS = "logs/items.jsonl"
"""File in the folder of a job, with a line per finished item."""

FREE_SETTINGS = (
    *("start_workers", "cpus_per_worker", "use_gpu", "runtime_env", "secrets"),
    *("overwrite", "resume", "storage_path"),
)
"""Settings of `cfg` that may differ when a job is resumed."""

PATHS = list_of(Kind("a path below the output", stays_below))
SHAPE = {"key": TEXT, "files": PATHS, "result": Kind("a value", lambda value: True)}


class Finished(NamedTuple):
    result: Any
    files: frozenset[str]


class FinishedItems:
    """The finished items of earlier drivers of a job, to which those of this driver are added.

    Args:
        folder: folder of the job.
        output: folder that it fills.
        resumed: the output has the files of an earlier driver. Those of items that are not kept are removed.
    """

    def __init__(self, folder: RunFolder, output: Output, *, resumed: bool) -> None:
        self._output = output
        self._kept: dict[str, Finished] = {}  # by key
        self._asked: set[str] = set()
        if resumed:
            present = {file.path for file in output.below() if file.path != RECORD}
            self._kept = {key: item for key, item in _read(folder).items() if item.files <= present}
            self._remove(present - self._files())
        else:
            (folder.path / ITEMS).unlink(missing_ok=True)
            storage_at(folder.location).remove_file(*ITEMS.split("/"))
        self.count = len(self._kept)
        self._log = LogFile(folder, ITEMS)

    def results(self, keys: Sequence[str]) -> dict[int, Any]:
        """Return the results of finished items by their number in `keys`, those of one call of `DataJob.map`.

        Raises:
            DataJobError: two items of the job have the same key.
        """
        for key in keys:
            if key in self._asked:
                raise DataJobError(f"two items have the key {key!r:.80}; make the keys of all calls of self.map unique")
            self._asked.add(key)
        return {number: self._kept[key].result for number, key in enumerate(keys) if key in self._kept}

    def add(self, key: str | None, result: Any, files: Iterable[str] | None) -> None:
        """Add an item, if it may be kept; `files` is None if they are not known."""
        self._output.written += files or ()  # a task has written them through its own copy
        if files is None or key is None:
            return
        try:
            if repr(json.loads(json.dumps(result))) != repr(result):
                return
        except (TypeError, ValueError, RecursionError):
            return
        self._log.write(json.dumps({"key": key, "result": result, "files": sorted(files)}) + "\n")
        self.count += 1

    def complete(self) -> None:
        """Remove the files of items that the job did not ask for again, before the output is published."""
        files = frozenset[str]().union(*(self._kept.pop(key).files for key in self._kept.keys() - self._asked))
        self._remove(files - self._files() - {*self._output.written})

    def close(self) -> None:
        self._log.close()

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
    cfg = {name: value for name, value in config.shown["cfg"].items() if name not in FREE_SETTINGS}
    settings = hashlib.sha256(to_json({**config.shown, "cfg": cfg}).encode())
    return {"code": code_digest(Path.cwd()), "settings": settings.hexdigest()}


def _read(folder: RunFolder) -> dict[str, Finished]:
    """Return the stored items."""
    with contextlib.suppress(FileNotFoundError):
        found = [item for _, item in read_rows(folder.read(ITEMS), SHAPE) if item is not None]
        return {item["key"]: Finished(item["result"], frozenset(item["files"])) for item in found}
    return {}
