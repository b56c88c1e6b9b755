"""Mirrored runs and checkpoints, read by the rest of the package; see `companions.reader_of`."""

from mlx_runtime.companions.hub.downloads import CHECKPOINTS, MirroredRun
from mlx_runtime.errors import UsageError, suggest
from mlx_runtime.runs.checkpoints.index import list_checkpoints
from mlx_runtime.runs.folder import RunFolder

find = MirroredRun.find


def fetch_checkpoint(uri: str) -> tuple[RunFolder, str]:
    """Return a copy of a run on this machine, and the name of a checkpoint that is complete in the copy.

    Args:
        uri: like `hf://user/name`, for the latest checkpoint, or `hf://user/name/checkpoints/epoch_0004`.

    Raises:
        UsageError: there is no such repository or checkpoint.
    """
    _, folder, name = _fetch(uri)
    return folder, name


def pin_checkpoint(uri: str) -> str:
    """Download a checkpoint of a mirrored run. Return its URI at the current commit, the same for all workers."""
    mirrored, _, name = _fetch(uri)
    pinned = mirrored.repository.address._replace(revision=mirrored.head.commit)
    return f"{pinned}/{CHECKPOINTS}/{name}"


def _fetch(uri: str) -> tuple[MirroredRun, RunFolder, str]:
    """Download a checkpoint. Return the mirrored run, its copy on this machine, and the name of the checkpoint."""
    address, _, name = uri.rstrip("/").partition(f"/{CHECKPOINTS}/")
    mirrored = MirroredRun.find(address)
    folder = mirrored.fetch()
    known = [item.name for item in list_checkpoints(folder.checkpoints)]
    if not known:
        raise UsageError(f"{mirrored.uri} has no checkpoint yet")
    if name and name not in known:
        raise UsageError(f"{mirrored.uri} has no checkpoint {name}.{suggest(name, known)}")
    mirrored.fetch_checkpoint(name or known[-1])
    return mirrored, folder, name or known[-1]
