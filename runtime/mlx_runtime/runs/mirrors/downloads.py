"""Read a mirrored run back: its small files in a cache on this machine, and checkpoints when they are needed."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from mlx_runtime.errors import UsageError
from mlx_runtime.runs.checkpoint_index import ABOUT, INDEX
from mlx_runtime.runs.folder import RunFolder
from mlx_runtime.runs.mirrors.claims import FILE, Claim, claim_of
from mlx_runtime.runs.mirrors.hub import Address, File, Head, Repository
from mlx_runtime.settings import Settings

RECORD, CHECKPOINTS = "run.json", "checkpoints"
CARD, WEIGHTS = "README.md", "model.safetensors"

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
            UsageError: there is no such repository or revision, or it holds no run.
        """
        repository = Repository(Address.parse(uri))
        repository.require()
        found = cls.of(repository)
        if found is None or not found.begun:
            raise UsageError(f"{repository.address} is empty; cfg.mirror or mlx xp push uploads a run to it")
        return found

    @classmethod
    def of(cls, repository: Repository) -> "MirroredRun | None":
        """Return the run in a repository, or None if the repository is empty or does not exist."""
        head = repository.head()
        claim = claim_of(repository, head) if head is not None else None
        return cls(repository, head, claim) if head is not None and claim is not None else None

    @property
    def begun(self) -> bool:
        """True if there is more than the claim of a driver."""
        return RECORD in self.files

    @property
    def uri(self) -> str:
        return str(self.repository.address)

    @property
    def listed(self) -> RunFolder:
        """Return the folder of the run for listings, which is not on this machine."""
        return RunFolder(self._cache, self.uri)

    def record(self) -> bytes:
        """Return the content of its run.json."""
        return self.repository.read(RECORD, self.head.commit) or b"{}"

    def cached(self) -> RunFolder:
        """Return a copy of the run on this machine, with the descriptions of its checkpoints, but not their states."""
        small = [path for path in self.files if not path.startswith(f"{CHECKPOINTS}/") or _describes(path)]
        self.download(small, self._cache)
        return RunFolder(self._cache)

    def fetch_checkpoint(self, name: str) -> None:
        """Add everything of a checkpoint to the copy on this machine."""
        self.download([path for path in self.files if path.startswith(f"{CHECKPOINTS}/{name}/")], self._cache)

    def download(
        self, paths: Collection[str], folder: Path, notify: Callable[[int], object] = lambda count: None
    ) -> None:
        """Copy files to a folder unless they are there. `notify` receives the number of bytes of each."""
        for path in sorted(paths, key=lambda path: (path.endswith(ABOUT), path)):  # which makes a checkpoint complete
            target = folder / path
            if not target.exists() or target.stat().st_size != self.files[path].size_bytes:
                self.repository.download(path, self.head.commit, folder)
            notify(self.files[path].size_bytes)

    def of_run(self) -> list[str]:
        """Return the paths of all files that belong to the run folder."""
        return [path for path in self.files if path not in NOT_OF_RUN]

    @cached_property
    def files(self) -> dict[str, File]:
        """All files of the repository, by path."""
        return self.repository.files(self.head.commit)

    @property
    def _cache(self) -> Path:
        name = self.repository.address.name.replace("/", "--")
        return Settings.read().cache / "hub" / name / self.head.commit[:12] / self.claim.experiment / self.claim.run


def _describes(path: str) -> bool:
    """Return True if a file describes a checkpoint, and holds nothing of its state."""
    name = path.rpartition("/")[2]
    return name in (ABOUT, INDEX)
