"""Mirrored runs, downloaded to a cache on this machine: small files at once, checkpoints when they are needed."""

import contextlib
import errno
import os
import shutil
import stat
import tempfile
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any

from mlx_runtime.companions.hub.claims import FILE, Claim, claim_of
from mlx_runtime.companions.hub.repository import Address, File, Head, Repository
from mlx_runtime.errors import StorageError, UsageError
from mlx_runtime.runs import records
from mlx_runtime.runs.checkpoints.index import ABOUT, INDEX
from mlx_runtime.runs.folder import RunFolder
from mlx_runtime.settings import Settings
from mlx_runtime.storage.files import storage_errors

RECORD, CHECKPOINTS = "run.json", "checkpoints"
CARD, WEIGHTS = "README.md", "model.safetensors"
SWEEP_RECORD, SWEEP_PAGE = "sweep.json", "sweep.html"

MAX_FILES = 2000
"""Files of a mirror, which are copied one by one. Most have less than 50; those of shards have some per worker."""

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
        return RunFolder(Path(*self._cache), self.uri)

    def record(self) -> dict[str, Any]:
        """Return the fields of its run.json; raise StorageError if it is not a record."""
        try:
            return records.parse_record(self.repository.read(RECORD, self.head.commit) or b"{}")
        except ValueError as error:
            raise StorageError(f"cannot read {RECORD} of {self.uri}: {error}") from error

    def fetch(self) -> RunFolder:
        """Return a copy of the run on this machine, with the descriptions of its checkpoints, but not their states."""
        self.download([path for path in self.of_run() if not path.startswith(f"{CHECKPOINTS}/") or _describes(path)])
        return RunFolder(Path(*self._cache))

    def fetch_checkpoint(self, name: str) -> None:
        """Download all files of a checkpoint to the copy on this machine."""
        self.download([path for path in self.of_run() if path.startswith(f"{CHECKPOINTS}/{name}/")])

    def download(
        self,
        paths: Collection[str],
        folder: Sequence[str] | None = None,
        notify: Callable[[int], object] = lambda count: None,
    ) -> None:
        """Copy files to a folder, except existing ones. `notify` receives the size of each file in bytes.

        Args:
            folder: A root, and the names of folders to create below it; by default, in the cache.

        Raises:
            StorageError: the folder cannot be written, or a link leads out of it.
        """
        root, *parts = folder or self._cache
        cache = Settings.read().cache
        with self.write_errors(root), contextlib.ExitStack() as stack:
            for needed in (cache, Path(root)):
                needed.mkdir(parents=True, exist_ok=True)
            target = stack.enter_context(open_folder(root, *parts, create=True))
            fresh = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="download-", dir=cache)))
            # Descriptions come last, because a checkpoint with a description counts as complete.
            for path in sorted(paths, key=lambda path: (path.endswith(ABOUT), path)):
                if size_below(target, path) != self.files[path].size_bytes:
                    _replace_file(self.repository.download(path, self.head.commit, fresh), target, path)
                notify(self.files[path].size_bytes)

    def write_errors(self, root: str) -> contextlib.AbstractContextManager[None]:
        """Convert each OSError of the block, which writes to a folder below a root, to a StorageError."""
        return storage_errors(f"cannot write {self.uri} to {root}, below which links are not followed")

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
    def _cache(self) -> tuple[str, ...]:
        """Return the folder of the copy on this machine, for `download`."""
        name = self.repository.address.name.replace("/", "--")
        root = str(Settings.read().cache / "hub")
        return root, name, self.head.commit[:12], self.claim.experiment, self.claim.run


def _describes(path: str) -> bool:
    """Return True if a file describes a checkpoint, and is not part of its state."""
    name = path.rpartition("/")[2]
    return name in (ABOUT, INDEX)


def _replace_file(file: Path, folder: int, path: str) -> None:
    """Move a file to a path below an open folder, replacing a file or a link there.

    Each step goes through the descriptor of a folder, so that no link redirects it; OSError is raised instead.
    """
    *above, name = path.split("/")
    with open_folder(folder, *above, create=True) as parent:
        try:
            os.rename(file, name, dst_dir_fd=parent)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            with file.open("rb") as content:
                create_below(parent, name, content)
            file.unlink()


def size_below(folder: int, path: str) -> int | None:
    """Return the size of a file below an open folder; None if it is missing, irregular, or reached through a link."""
    *above, name = path.split("/")
    try:
        with open_folder(folder, *above) as parent:
            facts = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except OSError:
        return None
    return facts.st_size if stat.S_ISREG(facts.st_mode) else None


@contextlib.contextmanager
def open_folder(root: str | int, *parts: str, create: bool = False) -> Iterator[int]:
    """Open a folder below a root, or below an open folder, while the block runs. Yield its descriptor.

    The root may be a link. A link below it raises OSError, even if it was created during this call. With `create`,
    missing folders below the root are created.
    """
    folder = os.dup(root) if isinstance(root, int) else os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for part in parts:
            if create:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, dir_fd=folder)
            above, folder = folder, os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            os.close(above)
        yield folder
    finally:
        os.close(folder)


def create_below(folder: int, name: str, content: IO[bytes]) -> None:
    """Replace a file or a link in an open folder by new content, atomically."""
    temporary = f".{uuid.uuid4().hex}"
    try:
        with open(temporary, "xb", opener=lambda path, flags: os.open(path, flags, 0o666, dir_fd=folder)) as copy:
            shutil.copyfileobj(content, copy, 1 << 20)
            copy.flush()
            os.fsync(copy.fileno())
        os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=folder)
        raise
