"""The claim of the driver that mirrors a run to a repository: the file `mirror.json`, replaced by every commit.

The Hub accepts a commit only if its parent is still the latest commit, so of several drivers exactly one can replace
the claim of another. A claim expires if its driver has not committed for `LEASE_S`.
"""

import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from mlx_runtime.companions.hub.repository import Head, Repository
from mlx_runtime.errors import StorageError, UsageError
from mlx_runtime.runs.folder import RUN_NAME
from mlx_runtime.runs.records import LIVING
from mlx_runtime.storage import documents
from mlx_runtime.storage.documents import COUNT, NAME, TEXT, TIME, from_json, mapping_with
from mlx_runtime.storage.files import to_json
from mlx_runtime.storage.leases import age_s, is_alive, this_process

FILE = "mirror.json"

LEASE_S = 600
"""Age at which the claim of a driver on another machine expires."""

REFRESH_S = LEASE_S / 2
"""Time without a commit after which a driver refreshes its claim."""

IGNORED = (".gitattributes", "README.md")
"""Files of a new repository that was created on the web."""

_SHAPE = {
    **dict.fromkeys(("id", "status", "driver"), TEXT),
    "experiment": NAME,
    "run": RUN_NAME,
    "attempt": documents.Kind("the number of an attempt", lambda value: COUNT.fits(value) and 0 < value < 10**9),
    **dict.fromkeys(("step", "commits"), COUNT),
    "time": TIME,
    "process": mapping_with(
        {"pid": COUNT, **dict.fromkeys(("host", "boot", "pid_started"), TEXT.or_null())}, needs=("pid",)
    ),
}


@dataclass(frozen=True)
class Claim:
    """The run in a repository, and the driver that committed it.

    Attributes:
        id: identifies the run on every machine, independently of its number there.
        attempt: number of times that a driver has started the run, on all machines.
        step: global step of the latest checkpoint in the repository.
        status: status of the run.
        driver: identifies the process that committed; different for each attempt.
        commits: commits of that driver so far.
        process: host and id of the process.
    """

    id: str
    experiment: str
    run: str
    attempt: int
    step: int
    status: str
    driver: str
    commits: int
    time: str
    process: Mapping[str, Any]

    @classmethod
    def of(cls, run_id: str, experiment: str, run: str, attempt: int, step: int = 0) -> "Claim":
        """Return the first claim of this process."""
        driver, process = uuid.uuid4().hex, this_process()
        return cls(run_id, experiment, run, attempt, step, "RUNNING", driver, 0, documents.now(), process)

    def next(self, **fields: Any) -> "Claim":
        """Return the claim for the next commit."""
        return replace(self, **fields, commits=self.commits + 1)

    def content(self) -> bytes:
        """Return the file, for a commit at this moment."""
        return to_json(asdict(replace(self, time=documents.now()))).encode()

    @property
    def title(self) -> str:
        return f"{self.experiment}/{self.run}"

    @property
    def host(self) -> str:
        return str(self.process.get("host"))

    @property
    def held(self) -> bool:
        """True while its driver may be alive: here by its process, elsewhere for `LEASE_S` after its last commit."""
        return self.status in LIVING and is_alive(self._lease, LEASE_S)

    @property
    def _lease(self) -> dict[str, Any]:
        return {**self.process, "heartbeat": self.time}

    def refuse_held(self, repository: Repository) -> None:
        """Raise a UsageError if another driver mirrors the run."""
        if self.held:
            left_s = max(0, LEASE_S - age_s(self._lease))
            raise UsageError(
                f"{repository.address} belongs to process {self.process.get('pid')} on {self.host}, which trains "
                f"{self.title} (attempt {self.attempt}). Stop it; if it is gone, its claim expires in {left_s:.0f} s"
            )


def claim_of(repository: Repository, head: Head) -> Claim | None:
    """Return the claim in a repository, or None if the repository is empty.

    Raises:
        UsageError: the repository contains something else.
    """
    content = repository.read(FILE, head.commit)
    if content is None:
        others = sorted(set(repository.files(head.commit)) - set(IGNORED))
        if others:
            raise UsageError(
                f"{repository.address} holds something other than a run: {', '.join(others[:3])}"
                f"{', …' if len(others) > 3 else ''}. Name another repository, which may be empty or not exist yet"
            )
        return None
    try:
        return Claim(**{name: from_json(content, _SHAPE, needs=tuple(_SHAPE))[name] for name in _SHAPE})
    except ValueError as error:
        raise StorageError(f"cannot read {FILE} of {repository.address}: {error}") from error
