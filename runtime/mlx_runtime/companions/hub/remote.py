"""Mirrored runs, downloaded to a cache on this machine: small files at once, checkpoints when they are needed.

The rest of the package reads runs and checkpoints by `find`, `fetch_checkpoint` and `pin_checkpoint`; see
`companions.reader_of`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mlx_runtime.companions.hub.claims import FILE, Claim, claim_of
from mlx_runtime.companions.hub.repository import Address, File, Head, Repository
from mlx_runtime.errors import StorageError, UsageError, suggest
from mlx_runtime.runs import records
from mlx_runtime.runs.checkpoints.index import ABOUT, INDEX, list_checkpoints
from mlx_runtime.runs.folder import RunFolder
from mlx_runtime.settings import Settings

RECORD, CONF, CHECKPOINTS = "run.json", "conf.yaml", "checkpoints"
CARD, WEIGHTS = "README.md", "model.safetensors"

MAX_FILES = 2000
"""Files of a mirror. Most have less than 50; those of shards have some per worker."""

NOT_OF_RUN = (".gitattributes", CARD, FILE, WEIGHTS)
"""Files of a repository that are not part of the run."""


@dataclass(frozen=True)
class MirroredRun:
    """A run in a repository, as of one commit."""

    repository: Repository
    head: Head
    claim: Claim

    @classmethod
    def find(cls, uri: str) -> "MirroredRun":
        """Return the run in a repository.

        Raises:
            UsageError: there is no such repository or revision, or it contains no run.
        """
        repository = Repository(Address.parse(uri))
        repository.require()
        found = cls.of(repository)
        if found is None or not found.begun:
            raise UsageError(f"{repository.address} is empty; cfg.hub.mirror or mlx xp push uploads a run to it")
        return found

    @classmethod
    def of(cls, repository: Repository) -> "MirroredRun | None":
        """Return the run in a repository, or None if the repository is empty or does not exist."""
        head = repository.head()
        claim = claim_of(repository, head) if head is not None else None
        return cls(repository, head, claim) if head is not None and claim is not None else None

    @property
    def begun(self) -> bool:
        """True if the repository contains more than the claim of a driver."""
        return RECORD in self.files

    @property
    def held(self) -> bool:
        """True if a driver may still write to the repository."""
        return self.claim.held

    @property
    def uri(self) -> str:
        return str(self.repository.address)

    @property
    def listing_folder(self) -> RunFolder:
        """Return a folder for listings that represents the run; it does not exist on this machine."""
        return RunFolder(self._cache, self.uri)

    def record(self) -> dict[str, Any]:
        """Return the fields of its run.json; raise StorageError if it is not a record."""
        try:
            return records.parse_record(self.repository.read(RECORD, self.head.commit) or b"{}")
        except ValueError as error:
            raise StorageError(f"cannot read {RECORD} of {self.uri}: {error}") from error

    def fetch(self) -> RunFolder:
        """Return a copy of the run on this machine, with the descriptions of its checkpoints, but not their states."""
        return self._fetch(
            path for path in self.of_run() if not path.startswith(f"{CHECKPOINTS}/") or path.endswith((ABOUT, INDEX))
        )

    def fetch_checkpoint(self, name: str) -> None:
        """Download all files of a checkpoint to the copy on this machine."""
        self._fetch(path for path in self.of_run() if path.startswith(f"{CHECKPOINTS}/{name}/"))

    def of_run(self) -> list[str]:
        """Return the paths of all files that belong to the run folder. Raises StorageError if there are too many."""
        found = [path for path in self.files if path not in NOT_OF_RUN and not f"/{path}".count("/.")]
        if len(found) > MAX_FILES:
            raise StorageError(f"{self.uri} has {len(found):,} files, of at most {MAX_FILES:,}; nothing was downloaded")
        return found

    @cached_property
    def files(self) -> dict[str, File]:
        """All files of the repository, by path."""
        return self.repository.files(self.head.commit)

    @property
    def _cache(self) -> Path:
        """Folder of the copy on this machine."""
        name = self.repository.address.name.replace("/", "--")
        root = Settings.read().cache / "hub"
        return root / name / self.head.commit[:12] / self.claim.experiment / self.claim.run

    def _fetch(self, paths: Iterable[str]) -> RunFolder:
        """Download files to the copy on this machine, except those that it has."""
        sizes = {path: self.files[path].size_bytes for path in paths}
        files = {path: self._cache / path for path in sizes}
        refuse_links(Settings.read().cache, *files.values())
        missing = [path for path, file in files.items() if not file.is_file() or file.stat().st_size != sizes[path]]
        self.repository.download(missing, self.head.commit, self._cache)
        return RunFolder(self._cache)


def refuse_links(root: Path, *paths: Path) -> None:
    """Raise a StorageError if a link below a root leads out of it or to another place in it; the root may be one."""
    real = root.resolve()
    for path in paths:
        if path.resolve() != real / path.relative_to(root):
            raise StorageError(f"cannot write {path}: links below {root} are not followed")


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
