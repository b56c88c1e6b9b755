"""Runs and checkpoints in remote repositories, read by companions: `hf://user/name` is the mirror of a run."""

from typing import Any, Protocol

from mlx_runtime.runs.folder import RunFolder


class RemoteRun(Protocol):
    """A run in a repository, in the state in which it was found."""

    @property
    def listing_folder(self) -> RunFolder:
        """A folder for listings that represents the run; it does not exist on this machine."""

    @property
    def held(self) -> bool:
        """True if a driver may still write to the repository."""

    def record(self) -> dict[str, Any]:
        """Return the fields of its record; raise StorageError if it is damaged."""

    def fetch(self) -> RunFolder:
        """Return a copy of the run on this machine, with the descriptions of its checkpoints, but not their states."""

    def fetch_checkpoint(self, name: str) -> None:
        """Download all files of a checkpoint to the copy on this machine."""


class RemoteReader(Protocol):
    """The functions of a companion's module `remote`. They raise a UsageError if there is no such run or checkpoint."""

    def find(self, uri: str) -> RemoteRun:
        """Return the run in a repository."""

    def fetch_checkpoint(self, uri: str) -> tuple[RunFolder, str]:
        """Return a copy of a run on this machine, and the name of a checkpoint that is complete in the copy.

        The URI names the run, for its latest checkpoint, or ends in `/checkpoints/NAME`.
        """

    def pin_checkpoint(self, uri: str) -> str:
        """Download a checkpoint. Return a URI of its current state, so that all workers read the same."""
