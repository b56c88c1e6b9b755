"""Continue a mirrored run on this machine: find its latest state, here or in the repository, and download it if needed.

The newest attempt wins, then the step. What this machine had of an older state is moved aside, never removed.
"""

import contextlib
import datetime
import shutil
from pathlib import Path
from typing import Any

from mlx_runtime.errors import StorageError, UsageError
from mlx_runtime.runs import records
from mlx_runtime.runs.folder import RUN, RunFolder, attempt_name, claim_run, list_runs, run_folder
from mlx_runtime.runs.mirrors.contents import latest_step
from mlx_runtime.runs.mirrors.downloads import CHECKPOINTS, MirroredRun
from mlx_runtime.runs.mirrors.hub import Address, Repository
from mlx_runtime.storage.files import is_uri, joined, size_text, to_json

DOWNLOADING = ".downloading"
"""Folder in a run folder for files of which not all have arrived."""


def latest(uri: str, root: str, experiment: str) -> tuple[RunFolder | None, list[str]]:
    """Return the run of a mirror on this machine, in its latest state, and lines about it for the user.

    Returns no run if the repository is empty or does not exist.

    Raises:
        UsageError: the Hub refuses, the repository holds something else, or another machine trains the run.
    """
    if is_uri(root):
        raise UsageError(
            f"cfg.mirror continues runs on a local disk, and cfg.storage_path is {root}; leave one of them out"
        )
    repository = Repository(Address.parse(uri))
    repository.require_token()
    mirrored = MirroredRun.of(repository)
    if mirrored is None:
        return None, []
    claim = mirrored.claim
    if claim.experiment != experiment:
        raise UsageError(
            f"{uri} holds {claim.title}, which is not of cfg.name={experiment}; name another repository with cfg.mirror"
        )
    claim.refuse_held(repository)
    local = _known(root, experiment, claim.id)
    if local is None:
        if not mirrored.begun:
            return None, []
        return _downloaded(mirrored, _new_folder(root, experiment, claim.run), "")
    here, there = (local.attempts(), latest_step(local)), (claim.attempt, claim.step)
    if here == there:
        return local, []
    states = f"{uri} has attempt {there[0]}, step {there[1]}; {local.title} here has attempt {here[0]}, step {here[1]}"
    if here > there or not mirrored.begun:
        return local, [f"mirror    {states}: continuing from here"]
    return _downloaded(mirrored, local, f"mirror    {states}: continuing from the mirror")


def _known(root: str, experiment: str, run_id: str) -> RunFolder | None:
    """Return the run with this id on this machine."""
    for run in reversed(list_runs(root, experiment)):
        with contextlib.suppress(StorageError):
            if (records.recorded(run).get("mirror") or {}).get("id") == run_id:
                return run
    return None


def _new_folder(root: str, experiment: str, name: str) -> RunFolder:
    """Create a folder with the name that the run has in the mirror, or else with the next number."""
    folder = run_folder(root, experiment, name)
    folder.path.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.path.mkdir()
    except FileExistsError:
        return claim_run(root, experiment, RUN)
    return folder


def _downloaded(mirrored: MirroredRun, run: RunFolder, announced: str) -> tuple[RunFolder, list[str]]:
    """Download a run into its folder, whole or not at all."""
    half, claim = run.path / DOWNLOADING, mirrored.claim
    is_new = not run.record.exists()
    shutil.rmtree(half, ignore_errors=True)
    sizes: list[int] = []
    paths = mirrored.of_run()
    try:
        mirrored.download(paths, half, sizes.append)
        record = records.parsed((half / run.record.name).read_bytes())
        (half / run.record.name).write_text(to_json(_moved(record, run, mirrored)), encoding="utf-8")
        aside = _replace(half, run)
        (run.path / attempt_name(claim.attempt)).write_bytes(b"")
    except BaseException:
        if is_new:
            shutil.rmtree(run.path, ignore_errors=True)
        raise
    finally:
        shutil.rmtree(half, ignore_errors=True)
    state = f"attempt {claim.attempt}, step {claim.step}, {size_text(sum(sizes))}"
    lines = [announced] if announced else []
    lines += [f"mirror    downloaded {run.title} from {mirrored.uri} ({state})"]
    if aside is not None:
        lines += [f"          what was here before is in {aside}"]
    return run, lines


def _replace(half: Path, run: RunFolder) -> Path | None:
    """Move downloaded files into a run folder, and older ones aside, all or none. Return where those are now."""
    shutil.rmtree(half / ".cache", ignore_errors=True)  # of huggingface_hub
    (half / CHECKPOINTS).mkdir(exist_ok=True)
    when = datetime.datetime.now(datetime.timezone.utc)
    aside = run.path / f"replaced_{when:%Y-%m-%dT%H%M%S}"
    aside.mkdir()
    new = sorted(_replaceable(half), key=lambda file: file.name == run.record.name)  # the record comes last
    moves = [(file, aside) for file in _replaceable(run.path)] + [(file, run.path) for file in new]
    begun: list[tuple[Path, Path]] = []
    try:
        for before, folder in moves:
            begun.append((before, folder / before.name))
            before.rename(folder / before.name)
    except BaseException:
        for before, after in reversed(begun):
            with contextlib.suppress(FileNotFoundError):  # the last one may not have been moved
                after.rename(before)
        raise
    finally:
        with contextlib.suppress(OSError):  # it holds what was here before
            aside.rmdir()
    return aside if aside.exists() else None


def _replaceable(folder: Path) -> list[Path]:
    return [file for file in folder.iterdir() if not file.name.startswith((".", "replaced_", "logs"))]


def _moved(record: dict[str, Any], run: RunFolder, mirrored: MirroredRun) -> dict[str, Any]:
    """Return a record as that of a run in another folder, which no driver trains."""
    moved = record | {"run": run.name, "mirror": {"uri": mirrored.uri, "id": mirrored.claim.id, "unfinished": False}}
    for name in ("best", "latest"):
        if found := record.get(name):
            checkpoint = str(found.get("path")).rpartition("/")[2]
            moved[name] = {**found, "path": joined(run.checkpoints, checkpoint)}
    if record["status"] in records.LIVING:
        moved["status"] = "STALE"
    return moved
