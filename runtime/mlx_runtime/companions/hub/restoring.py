"""Restoring of a mirrored run on this machine, from the newer of the states in the storage and in the repository.

The newer attempt wins, or within one attempt the larger step. Files of an older state are moved aside, never removed.
"""

import contextlib
import datetime
import shutil
import tempfile
from pathlib import Path
from typing import Any

from mlx_runtime.companions.hub.contents import latest_step
from mlx_runtime.companions.hub.remote import CHECKPOINTS, RECORD, MirroredRun, refuse_links
from mlx_runtime.companions.hub.repository import Address, Repository
from mlx_runtime.errors import StorageError, UsageError
from mlx_runtime.runs import records
from mlx_runtime.runs.folder import RunFolder, attempt_name, list_runs, next_name, run_folder
from mlx_runtime.storage.files import is_uri, size_text, storage_at, storage_errors, to_json

LOGS = "logs"
"""Folder of a run that belongs to this machine: it is not downloaded, and stays."""


def latest(uri: str, root: str, experiment: str) -> tuple[RunFolder | None, list[str]]:
    """Return the run of a mirror on this machine, in its latest state, and messages for the user.

    Returns no run if the repository is empty or does not exist.

    Raises:
        UsageError: the Hub refuses, the repository contains something else, another machine trains the run, or the
            storage is an object store without its latest state.
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
    claim.refuse_held(repository)
    local, lines = _find_local(root, experiment, claim.id), list[str]()
    if local is not None:
        here, there = (local.attempts(), latest_step(local)), (claim.attempt, claim.step)
        if here == there:
            return local, []
        lines = [
            f"mirror    {uri} has attempt {there[0]}, step {there[1]}; {local.title} here has attempt {here[0]}, step "
            f"{here[1]}: continuing from {'here' if here > there else 'the mirror'}"
        ]
        if here > there or not mirrored.begun:
            return local, lines
    if not mirrored.begun:
        return None, []
    if is_uri(root):
        raise UsageError(
            f"{uri} has a newer state of {claim.title} than {root}, and can only be downloaded to a folder: set "
            "cfg.storage_path to one, or start a new run with --from"
        )
    run, downloaded = _download(mirrored, root, local)
    return run, [*lines, *downloaded]


def _find_local(root: str, experiment: str, run_id: str) -> RunFolder | None:
    """Return the run with this id on this machine."""
    for run in reversed(list_runs(root, experiment)):
        with contextlib.suppress(StorageError):
            if (records.load_record(run).get("mirror") or {}).get("id") == run_id:
                return run
    return None


def _download(mirrored: MirroredRun, root: str, local: RunFolder | None) -> tuple[RunFolder, list[str]]:
    """Download a run to a storage, completely or not at all. Return its folder, and messages for the user.

    A new folder is filled and then moved into the place of the present one, which it contains from then on.
    """
    claim, storage = mirrored.claim, storage_at(root)
    files = {path: mirrored.files[path] for path in mirrored.of_run() if not path.startswith(f"{LOGS}/")}
    above = Path(root, claim.experiment)
    with storage_errors(f"cannot write {mirrored.uri} to {root}"):
        refuse_links(Path(root), above, *([local.path] if local is not None else []))
        above.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=".download-", dir=above))
        new, aside = temporary / claim.run, f"replaced_{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%dT%H%M%S}"
        try:
            mirrored.repository.download(files, mirrored.head.commit, new)
            shutil.rmtree(new / ".cache", ignore_errors=True)  # of huggingface_hub
            (new / CHECKPOINTS).mkdir(exist_ok=True)
            (new / attempt_name(claim.attempt)).touch()
            name = claim.run
            while local is None and not storage.claim_folder(claim.experiment, name):
                name = next_name(storage, claim.experiment)
            run = local or run_folder(root, claim.experiment, name)
            try:
                (new / RECORD).write_text(to_json(_record_of_copy(mirrored, run)))
                if local is not None:
                    run.path.rename(new / aside)
                new.rename(run.path)
            except BaseException:
                if (new / aside).exists():
                    (new / aside).rename(run.path)
                elif local is None:
                    run.path.rmdir()
                raise
        finally:
            if not (new / aside).exists():  # else the older files could not be moved back
                shutil.rmtree(temporary, ignore_errors=True)
        if (run.path / aside / LOGS).is_dir():
            (run.path / aside / LOGS).rename(run.path / LOGS)
    size = size_text(sum(file.size_bytes for file in files.values()))
    state = f"attempt {claim.attempt}, step {claim.step}, {size}"
    lines = [f"mirror    downloaded {run.title} from {mirrored.uri} ({state})"]
    if local is not None:
        lines += [f"          the previous files are in {run.path / aside}"]
    return run, lines


def _record_of_copy(mirrored: MirroredRun, run: RunFolder) -> dict[str, Any]:
    """Return the record of a run that was copied to another folder, and is not training."""
    record = mirrored.record()
    status = "STALE" if record["status"] in records.LIVING else record["status"]
    mirror = {"uri": mirrored.uri, "id": mirrored.claim.id, "unfinished": False}
    return records.relocate(record | {"run": run.name, "mirror": mirror, "status": status}, run)
