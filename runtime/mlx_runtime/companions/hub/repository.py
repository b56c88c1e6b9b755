"""Repositories on the Hugging Face Hub, read and written with `huggingface_hub`.

`huggingface_hub` retries most failed requests, but neither commits nor queries nor the first request of a download, and
its client has no timeout. Here, every operation is retried, and then fails with an error of one line.
"""

import contextlib
import glob
import json
import os
import random
import re
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from mlx_runtime.errors import MlxError, StorageError, UsageError, short_message
from mlx_runtime.extras import require
from mlx_runtime.storage.documents import stays_below
from mlx_runtime.storage.files import storage_errors

PATIENCE_S = 60.0
"""Time for which an operation is retried before it fails."""

SILENCE_S = 60.0
"""Time without data after which a connection is closed."""

WAIT_S = (0.5, 30.0)
"""First and maximum pause before a retry; each pause is about twice as long as the previous one."""

TRANSIENT = {408, 429, 500, 502, 503, 504}
"""Statuses of responses after which a request is retried."""

MOVED = {409, 412}
"""Statuses of a commit whose parent is no longer the latest commit."""

Result = TypeVar("Result")


class UnreachableError(StorageError):
    """The Hub does not answer, or answers with errors that usually pass."""


class OutdatedError(StorageError):
    """The parent of a commit is not the latest commit of the repository any more."""


class Address(NamedTuple):
    """A repository, like `hf://user/name`, or a revision of it, like `hf://user/name@3f2a…`."""

    name: str
    revision: str | None = None

    @classmethod
    def parse(cls, uri: str) -> "Address":
        match = re.fullmatch(r"hf://([\w.-]+/[\w.-]+)(?:@([\w./-]+))?/?", uri)
        if match is None:
            raise UsageError(f"{uri!r} does not name a repository on the Hugging Face Hub; write hf://USER/NAME")
        return cls(match[1], match[2])

    def __str__(self) -> str:
        return f"hf://{self.name}" + (f"@{self.revision}" if self.revision else "")


@dataclass(frozen=True)
class File:
    """A file in a repository."""

    size_bytes: int
    hash: str  # SHA-256 of a file in LFS, otherwise git's hash


@dataclass(frozen=True)
class Head:
    """The latest commit of a repository."""

    commit: str
    private: bool


class Repository:
    """A repository of models on the Hub of `HF_ENDPOINT`, with the token of `HF_TOKEN` or `hf auth login`.

    Methods raise a UsageError with a cure if the Hub refuses, and an UnreachableError if it does not answer.
    """

    def __init__(self, address: Address, patience_s: float = PATIENCE_S) -> None:
        self.address, self.patience_s = address, patience_s

    @cached_property
    def _api(self) -> Any:
        require("huggingface_hub", str(self.address))
        import huggingface_hub
        from huggingface_hub import utils

        if "HF_HUB_VERBOSITY" not in os.environ:
            utils.logging.set_verbosity_error()  # it warns before each retry
        if "HF_HUB_DISABLE_PROGRESS_BARS" not in os.environ:
            utils.disable_progress_bars()  # they would disturb the progress bar of the run
        return huggingface_hub.HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None)

    @property
    def settings_page(self) -> str:
        """Address of the page on which its owner can change the visibility."""
        return f"{self._api.endpoint}/{self.address.name}/settings"

    def require_token(self) -> None:
        """Check that a token is set, and that the Hub accepts it."""
        api = self._api
        from huggingface_hub import get_token

        if get_token() is None:
            raise UsageError(
                f"there is no token for {self.address}: set HF_TOKEN to one that may write, or run hf auth login"
            )
        self._call(api.whoami, cache=True)

    def require_write(self, head: Head | None) -> None:
        """Check that the token may write to the repository, or create it if it does not exist. Nothing is written."""
        from huggingface_hub import CommitOperationAdd

        if head is not None:  # the query for the upload mode of a small file needs the same rights as a commit
            probe = [CommitOperationAdd(".gitattributes", b"\n")]
            self._call(self._api.preupload_lfs_files, self.address.name, probe, revision="main")
            return
        who = self._call(self._api.whoami, cache=True)
        owners = {who.get("name"), *(item.get("name") for item in who.get("orgs") or ())}
        role = ((who.get("auth") or {}).get("accessToken") or {}).get("role")
        if self.address.name.partition("/")[0] not in owners or role == "read":
            raise self._forbidden_error()

    def head(self) -> Head | None:
        """Return the latest commit, or the commit of the address's revision; None if there is no such repository."""
        from_error: type[Exception] = self._errors.RepositoryNotFoundError
        try:
            info = self._call(self._api.repo_info, self.address.name, revision=self.address.revision)
        except UsageError as error:
            if isinstance(error.__cause__, from_error) and self.address.revision is None:
                return None
            raise
        if not re.fullmatch(r"[0-9a-f]{12,64}", str(info.sha)):
            raise StorageError(f"{self._api.endpoint} calls the commit of {self.address} {info.sha!r:.100}, not a hash")
        return Head(info.sha, bool(info.private))

    def require(self) -> Head:
        """Return the same as `head`; raise a UsageError if the repository is missing or this token cannot read it."""
        found = self.head()
        if found is None:
            raise self._unknown_error()
        return found

    def create(self) -> Head:
        """Create the repository as a private one."""
        self._call(self._api.create_repo, self.address.name, private=True, exist_ok=True)
        return self.require()

    def files(self, commit: str) -> dict[str, File]:
        """Return all files of a commit by path. Paths that would lead out of a folder are an error."""
        tree = self._call(lambda: list(self._api.list_repo_tree(self.address.name, recursive=True, revision=commit)))
        files = {
            item.path: File(item.size, item.lfs.sha256 if item.lfs else item.blob_id)
            for item in tree
            if hasattr(item, "blob_id")
        }
        if odd := [path for path in files if not stays_below(path)]:
            text = f"{self.address} lists a file {odd[0]!r:.100}, which mlx never uploads"
            raise StorageError(f"{text}; nothing was downloaded")
        return files

    def read(self, path: str, commit: str) -> bytes | None:
        """Return the content of a small file of a commit, or None if there is no such file."""
        from huggingface_hub import hf_hub_download

        options = {"revision": commit, "endpoint": self._api.endpoint}
        with tempfile.TemporaryDirectory(prefix="mlx-hub-") as temporary:
            try:
                file = self._call(hf_hub_download, self.address.name, path, local_dir=temporary, **options)
                return Path(file).read_bytes()
            except UsageError as error:
                if isinstance(error.__cause__, self._errors.RemoteEntryNotFoundError):
                    return None
                raise

    def download(self, files: Mapping[str, File], commit: str, folder: Path) -> None:
        """Copy files of a commit to their paths below a folder, and replace present ones. A retry resumes a download.

        Raises:
            StorageError: the folder cannot be written, or some files did not arrive.
        """
        from huggingface_hub import snapshot_download

        if not files:
            return
        with storage_errors(f"cannot write {folder}"):
            for path in files:  # snapshot_download keeps files that have not changed since an earlier download
                (folder / path).unlink(missing_ok=True)
        options = {"revision": commit, "local_dir": folder, "endpoint": self._api.endpoint}
        self._call(snapshot_download, self.address.name, allow_patterns=[*map(glob.escape, files)], **options)
        # If the Hub does not answer, snapshot_download may return a folder that it finds.
        if missing := missing_files(files, folder):
            raise UnreachableError(
                f"{next(iter(missing))} of {self.address} did not arrive in {folder}; repeat the command"
            )

    def download_to_cache(self, files: Collection[str], commit: str) -> list[Path]:
        """Download files of a commit, unless they are in the cache of `huggingface_hub`. Return their paths there."""
        from huggingface_hub import snapshot_download

        options = {"revision": commit, "endpoint": self._api.endpoint, "allow_patterns": [*map(glob.escape, files)]}
        folder = Path(self._call(snapshot_download, self.address.name, **options))
        return [folder / name for name in files]

    def upload(self, files: Mapping[str, Path]) -> dict[str, Any]:
        """Upload files ahead of a commit, and return handles for `commit`, by path.

        Content that is on the Hub already is not uploaded again. Small text files are uploaded with the commit.
        """
        from huggingface_hub import CommitOperationAdd

        additions = {path: CommitOperationAdd(path, str(file)) for path, file in files.items()}
        # One at a time: an upload of several files starts threads, and Python waits for them at exit.
        for addition in additions.values():
            self._call(self._api.preupload_lfs_files, self.address.name, [addition], free_memory=False, revision="main")
        return additions

    def commit(self, title: str, parent: str, added: Mapping[str, Any], removed: Collection[str] = ()) -> str:
        """Commit files, and return the hash of the commit.

        Args:
            added: by path, small content or handles that `upload` has returned.

        Raises:
            OutdatedError: `parent` is not the latest commit.
        """
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        additions = [
            CommitOperationAdd(path, item) if isinstance(item, bytes) else item for path, item in added.items()
        ]
        operations = [*additions, *(CommitOperationDelete(path, is_folder=False) for path in removed)]
        info = self._call(
            self._api.create_commit, self.address.name, operations, commit_message=title, parent_commit=parent
        )
        return str(info.oid)

    @property
    def _errors(self) -> Any:
        self._api  # noqa: B018 - reports a missing library
        import huggingface_hub.errors

        return huggingface_hub.errors

    def _call(self, function: Callable[..., Result], *arguments: Any, **options: Any) -> Result:
        """Call a function of `huggingface_hub`, and retry after temporary failures."""
        from huggingface_hub import get_session

        deadline, pause_s = time.monotonic() + self.patience_s, WAIT_S[0]
        while True:
            session = get_session()
            if session.timeout.read is None:
                session.timeout = SILENCE_S
            try:
                return function(*arguments, **options)
            except Exception as error:  # from this library, its HTTP client, and its threads
                if not self._may_pass(error):
                    raise self._translate(error) from _root(error)
                if time.monotonic() + pause_s > deadline:
                    why = short_message(_root(error))
                    where = f"{self._api.endpoint} for {self.address}"
                    text = f"cannot reach {where}: {why}; check HF_ENDPOINT and the network"
                    raise UnreachableError(text) from error
            time.sleep(pause_s * random.uniform(0.75, 1.25))
            pause_s = min(2 * pause_s, WAIT_S[1])

    def _may_pass(self, error: BaseException) -> bool:
        cause = _root(error)
        if isinstance(cause, self._errors.OfflineModeIsEnabled):
            return False
        if (status := _status(cause)) is not None:
            return status in TRANSIENT
        if isinstance(cause, json.JSONDecodeError):  # it parses the error page of a proxy before it checks the status
            return True
        # An upload or download whose connection was cut; `HTTPError` is the base of the errors of the HTTP client.
        if isinstance(cause, self._errors.HTTPError | ConnectionError | TimeoutError):
            return True
        # An interrupted download has an unexpected size, which raises an OSError without a number.
        return isinstance(cause, OSError) and cause.errno is None and type(cause) in (OSError, IOError)

    def _translate(self, error: BaseException) -> MlxError:
        """Return an error for the user, in one line, with the cure."""
        cause, errors = _root(error), self._errors
        match _status(cause):
            case status if status in MOVED:
                return OutdatedError(f"{self.address} rejected the commit: the repository has changed; try again later")
            case 401 if not isinstance(cause, errors.RepositoryNotFoundError):
                return UsageError(
                    f"the Hugging Face Hub does not accept the token for {self.address}; set HF_TOKEN to a valid one, "
                    "or run hf auth login"
                )
            case 403:
                return self._forbidden_error()
        if isinstance(cause, errors.OfflineModeIsEnabled):
            return UsageError(f"{self.address} needs the network, and HF_HUB_OFFLINE is set; unset it")
        if isinstance(cause, errors.RevisionNotFoundError):
            latest = self.address._replace(revision=None)
            return UsageError(f"there is no revision {self.address.revision} in {latest}; {latest} is its latest state")
        if isinstance(cause, errors.RepositoryNotFoundError):
            return self._unknown_error()
        if isinstance(cause, OSError) and cause.errno is not None:
            return StorageError(f"cannot copy files of {self.address}: {cause}")
        return UsageError(f"{self.address}: {short_message(cause)}")

    def _forbidden_error(self) -> UsageError:
        return UsageError(
            f"your token has no access to {self.address}, or may only read it; set HF_TOKEN to one with write access, "
            "or name a repository of your own"
        )

    def _unknown_error(self) -> UsageError:
        return UsageError(
            f"there is no repository {self.address}, or your token may not read it; check the name, and set HF_TOKEN "
            "or run hf auth login"
        )


def missing_files(files: Mapping[str, File], folder: Path) -> dict[str, File]:
    """Return the files that are missing below a folder, or have another size there."""
    sizes = {path: (folder / path).stat().st_size for path in files if (folder / path).is_file()}
    return {path: file for path, file in files.items() if sizes.get(path) != file.size_bytes}


def _root(error: BaseException) -> BaseException:
    """Return the cause of a failed upload or a missing local copy."""
    local = ("LocalEntryNotFoundError", "IncompleteSnapshotError")
    while type(error) is RuntimeError or type(error).__name__ in local:
        if error.__cause__ is None:
            break
        error = error.__cause__
    return error


def _status(error: BaseException) -> int | None:
    """Return the status of the HTTP response of an error, or None."""
    with contextlib.suppress(AttributeError):
        return int(error.response.status_code)  # type: ignore[attr-defined]
    return None
