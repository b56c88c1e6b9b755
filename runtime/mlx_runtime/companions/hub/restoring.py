"""Restoring of a mirrored run on this machine, from the newer of the states in the storage and in the repository.

The newer attempt wins, or within one attempt the larger step. Files of an older state are moved aside, never removed.
"""

import contextlib
import datetime
import io
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlx_runtime.companions.hub.contents import latest_step
from mlx_runtime.companions.hub.downloads import (
    CHECKPOINTS,
    SWEEP_RECORD,
    MirroredRun,
    create_below,
    open_folder,
    size_below,
)
from mlx_runtime.companions.hub.repository import Address, Repository
from mlx_runtime.errors import StorageError, UsageError
from mlx_runtime.runs import records
from mlx_runtime.runs.checkpoints.index import ABOUT
from mlx_runtime.runs.folder import RUN, RunFolder, attempt_name, claim_run, list_runs, run_folder
from mlx_runtime.settings import Settings
from mlx_runtime.storage.files import is_uri, join_path, size_text, storage_at, to_json

DOWNLOADING = ".downloading"
"""Folder in a run folder for an incomplete download."""


def latest(uri: str, root: str, experiment: str) -> tuple[RunFolder | None, list[str]]:
    """Return the run of a mirror on this machine, in its latest state, and messages for the user.

    Returns no run if the repository is empty or does not exist.

    Raises:
        UsageError: the Hub refuses, the repository contains something else, or another machine trains the run.
    """
    repository = Repository(Address.parse(uri))
    repository.require_token()
    mirrored = MirroredRun.of(repository)
    if mirrored is None:
        return None, []
    claim = mirrored.claim
    if claim.experiment != experiment:
        raise UsageError(
            f"{uri} contains {claim.title}, but cfg.name is {experiment}; name another repository with cfg.hub.mirror"
        )
    if SWEEP_RECORD in mirrored.files:
        raise UsageError(
            f"{uri} holds the best run of a sweep, which is not resumed; start a new run from its config "
            f"(--from {uri}) or weights (cfg.restore_checkpoint_path={uri}), and another repository in cfg.hub.mirror"
        )
    claim.refuse_held(repository)
    local = _find_local(root, experiment, claim.id)
    if local is None:
        if not mirrored.begun:
            return None, []
        return _download(mirrored, _new_folder(mirrored, root, experiment), "")
    here, there = (local.attempts(), latest_step(local)), (claim.attempt, claim.step)
    if here == there:
        return local, []
    states = f"{uri} has attempt {there[0]}, step {there[1]}; {local.title} here has attempt {here[0]}, step {here[1]}"
    if here > there or not mirrored.begun:
        return local, [f"mirror    {states}: continuing from here"]
    return _download(mirrored, local, f"mirror    {states}: continuing from the mirror")


def _find_local(root: str, experiment: str, run_id: str) -> RunFolder | None:
    """Return the run with this id on this machine."""
    for run in reversed(list_runs(root, experiment)):
        with contextlib.suppress(StorageError):
            if (records.load_record(run).get("mirror") or {}).get("id") == run_id:
                return run
    return None


def _new_folder(mirrored: MirroredRun, root: str, experiment: str) -> RunFolder:
    """Create a folder with the name of the run in the mirror or, if that is taken, with the next number."""
    if is_uri(root):
        with contextlib.suppress(UsageError):  # the name is taken
            return claim_run(root, experiment, name=mirrored.claim.run.removeprefix(RUN))
        return claim_run(root, experiment)
    with mirrored.write_errors(root):
        Path(root).mkdir(parents=True, exist_ok=True)
        with open_folder(root, experiment, create=True) as folder:
            try:
                os.mkdir(mirrored.claim.run, dir_fd=folder)
            except FileExistsError:
                return claim_run(root, experiment, RUN)
    return run_folder(root, experiment, mirrored.claim.run)


def _download(mirrored: MirroredRun, run: RunFolder, announced: str) -> tuple[RunFolder, list[str]]:
    """Download a run into its folder. Return the run, and messages for the user."""
    sizes = list[int]()
    aside = (_download_to_folder if run.uri is None else _download_to_store)(mirrored, run, sizes.append)
    state = f"attempt {mirrored.claim.attempt}, step {mirrored.claim.step}, {size_text(sum(sizes))}"
    lines = [announced] if announced else []
    lines += [f"mirror    downloaded {run.title} from {mirrored.uri} ({state})"]
    if aside is not None:
        lines += [f"          the previous files are in {join_path(run.location, aside)}"]
    return run, lines


def _download_to_store(mirrored: MirroredRun, run: RunFolder, notify: Callable[[int], object]) -> str | None:
    """Download a run to its folder on an object store. Return the name of a folder with the previous files, or None.

    The record and the attempt come last, so that an interrupted download is repeated.
    """
    storage, aside, cache = storage_at(run.location), _name_aside(), Settings.read().cache
    with mirrored.write_errors(run.location):
        before = [item.path for item in storage.below() if _is_replaceable(item.path)]
        try:
            for path in before:
                storage.copy(path, f"{aside}/{path}")
                if path != run.record.name:
                    storage.remove_file(path)
            paths = [path for path in mirrored.of_run() if _is_replaceable(path) and path != run.record.name]
            cache.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix="download-", dir=cache) as fresh:
                for path in sorted(paths, key=lambda path: path.endswith(ABOUT)):
                    file = mirrored.repository.download(path, mirrored.head.commit, Path(fresh))
                    storage.upload(file, path)
                    notify(file.stat().st_size)
                    file.unlink()
            storage.write(to_json(_record_of_copy(mirrored.record(), run, mirrored)).encode(), run.record.name)
            storage.write(b"", attempt_name(mirrored.claim.attempt))
        except BaseException:
            if run.record.name not in before:  # it is a new folder
                storage.remove_folder()
            raise
    return aside if before else None


def _download_to_folder(mirrored: MirroredRun, run: RunFolder, notify: Callable[[int], object]) -> str | None:
    """Download a run to a local folder, completely or not at all. Links in the storage are not followed."""
    claim, parts = mirrored.claim, (run.experiment, run.name)
    unfinished = run.path / DOWNLOADING
    with mirrored.write_errors(run.root), open_folder(run.root, *parts) as folder:
        is_new = size_below(folder, run.record.name) is None
        shutil.rmtree(unfinished, ignore_errors=True)
        try:
            mirrored.download(mirrored.of_run(), (run.root, *parts, DOWNLOADING), notify)
            with open_folder(folder, DOWNLOADING) as half:
                record = _record_of_copy(mirrored.record(), run, mirrored)
                create_below(half, run.record.name, io.BytesIO(to_json(record).encode()))
                aside = _replace(half, folder, run)
            create_below(folder, attempt_name(claim.attempt), io.BytesIO())
        except BaseException:
            if is_new:
                shutil.rmtree(run.path, ignore_errors=True)
            raise
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return aside


def _replace(half: int, folder: int, run: RunFolder) -> str | None:
    """Move all downloaded files into a run folder, or none, and older ones aside. Return the folder of the latter."""
    with open_folder(half, CHECKPOINTS, create=True):
        pass
    name = _name_aside()
    os.mkdir(name, dir_fd=folder)
    with open_folder(folder, name) as aside:
        new = sorted(_replaceable(half), key=lambda file: file == run.record.name)  # the record comes last
        moves = [(file, folder, aside) for file in _replaceable(folder)] + [(file, half, folder) for file in new]
        begun: list[tuple[str, int, int]] = []
        try:
            for file, before, after in moves:
                begun.append((file, before, after))
                os.rename(file, file, src_dir_fd=before, dst_dir_fd=after)
        except BaseException:
            for file, before, after in reversed(begun):
                with contextlib.suppress(FileNotFoundError):  # the last one may not have been moved
                    os.rename(file, file, src_dir_fd=after, dst_dir_fd=before)
            raise
        finally:
            with contextlib.suppress(OSError):  # it contains the previous files
                os.rmdir(name, dir_fd=folder)
        return name if os.listdir(aside) else None


def _replaceable(folder: int) -> list[str]:
    return [name for name in os.listdir(folder) if _is_replaceable(name)]


def _is_replaceable(path: str) -> bool:
    return not path.startswith((".", "replaced_", "logs"))


def _name_aside() -> str:
    """Return the name of a new folder for the files that a download replaces."""
    return f"replaced_{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%dT%H%M%S}"


def _record_of_copy(record: dict[str, Any], run: RunFolder, mirrored: MirroredRun) -> dict[str, Any]:
    """Return the record of a run that was copied to another folder, and is not training."""
    moved = record | {"run": run.name, "mirror": {"uri": mirrored.uri, "id": mirrored.claim.id, "unfinished": False}}
    if record["status"] in records.LIVING:
        moved["status"] = "STALE"
    return records.relocate(moved, run)
