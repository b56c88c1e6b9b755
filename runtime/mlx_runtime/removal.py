"""Take a run away, from its storage and from this machine."""

import shutil
from dataclasses import dataclass

from mlx_runtime import contents, registry, xp
from mlx_runtime.errors import UsageError
from mlx_runtime.layout import RunFolder
from mlx_runtime.listing import of
from mlx_runtime.storage import size_text


@dataclass(frozen=True)
class Doomed:
    """A run that may be removed.

    Attributes:
        folder: of the run.
        files: how many there are.
        size_bytes: of all of them.
        warning: what a person should know before, or nothing.
    """

    folder: RunFolder
    files: int
    size_bytes: int
    warning: str = ""

    @property
    def title(self) -> str:
        """What it is and what goes with it."""
        return f"{self.folder.title}, {self.files:,} files, {size_text(self.size_bytes)}, in {self.folder.place}"


def doomed(name: str, run: str) -> Doomed:
    """Look at a run that shall go.

    Args:
        name: of an experiment in the storage, or a run's `name/run_003`, path or URI.
        run: `run_003`, `3` or `latest`.

    Raises:
        UsageError: there is no such run, it lives, or it is not in the storage.
        StorageError: the storage does not answer.
    """
    return _looked_at(xp.chosen(name, run))


def _looked_at(folder: RunFolder) -> Doomed:
    place = _place(folder)
    [row] = of([folder])
    title = f"{folder.experiment} {folder.name}"
    if row.status in registry.LIVING:
        raise UsageError(f"{title} is {row.status}; end it first: mlx xp stop {title}")
    if driver := registry.resuming(folder, row.record):
        raise UsageError(f"{title} is being resumed by process {driver.get('pid')} on {driver.get('host')}")
    found = contents.survey(place, 0, 0).top
    warning = f"{row.problem}; nobody can say whether it still runs" if row.problem else ""
    return Doomed(folder, found.files, found.size_bytes, warning)


def remove(found: Doomed) -> None:
    """Remove what `doomed` found if it is still the same: its folder, and its working copy on this machine.

    Raises:
        UsageError: the run has changed, or lives by now; nothing was removed.
        StorageError: something is left; says what and where.
    """
    folder = found.folder
    if _looked_at(folder) != found:
        raise UsageError(f"{folder.title} has changed since it was measured; nothing was removed. See: mlx xp ls")
    contents.remove(_place(folder))
    if folder.uri is not None:
        shutil.rmtree(folder.path, ignore_errors=True)


def _place(folder: RunFolder) -> contents.Place:
    return contents.place_in(xp.storage(), folder.place)
