"""What rank 0 tells the other processes of a run, and what they must have in common with it.

Everything is JSON, because the store of torchrun answers anybody: nothing that comes from it is unpickled.
"""

import contextlib
import dataclasses
import hashlib
import platform
from pathlib import Path
from typing import Any

import torch

from mlx_runtime import __version__, companions
from mlx_runtime.data.sampling import Subset
from mlx_runtime.distributed.messages import decode, encode
from mlx_runtime.errors import ConfigError, MlxError
from mlx_runtime.events import RunInfo
from mlx_runtime.loop.job import Cluster, Job
from mlx_runtime.runs.folder import attempt_name, run_folder
from mlx_runtime.runs.sources import file_digest, source_files
from mlx_runtime.storage.files import join_path, storage_root

PACKAGES = {
    "Python": ".".join(platform.python_version_tuple()[:2]),
    "torch": str(torch.__version__),
    "mlx-runtime": __version__,
}
"""Versions that all machines of a run must have in common."""

ELSEWHERE = ".elsewhere"
"""Folder of the logs of other machines' runs, in the storage of a machine that does not see that of the run."""


@dataclasses.dataclass(frozen=True)
class Offer:
    """A job, and the facts by which another process finds that it can take part."""

    job: Job
    backend: str
    timeout_s: float  # of collectives
    gpus: float  # that each worker needs
    needs: dict[str, str]  # versions of packages, and digests of files
    claim: str  # digest of the file by which the driver has claimed the run

    @classmethod
    def of(cls, job: Job, backend: str, timeout_s: float, gpus: float) -> "Offer":
        needs = PACKAGES | {name: file_digest(job.project / name) for name in source_files(job.project)}
        return cls(job, backend, timeout_s, gpus, needs, _claim_of(job))

    def encode(self) -> bytes:
        """Return the offer as a message; raise ConfigError if the job contains what cannot be sent."""
        job = vars(self.job) | {"project": "", "run": vars(self.job.run) | {"folder": str(self.job.run.folder)}}
        job["cluster"] = dataclasses.asdict(self.job.cluster)
        job["prepared"] = {name: dataclasses.asdict(item) for name, item in self.job.prepared.items()}
        job["subsets"] = {name: (item.rows, dict(item.attributes)) for name, item in self.job.subsets.items()}
        try:
            return encode(vars(self) | {"job": job})
        except TypeError as error:
            raise ConfigError(f"torchrun cannot train this: {error}") from error

    @classmethod
    def decode(cls, message: bytes) -> "Offer":
        """Return the offer in a message. Raises MlxError if it is none."""
        try:
            facts = decode(message)
            job = facts["job"]
            job |= {"project": Path.cwd(), "run": RunInfo(**job["run"] | {"folder": Path(job["run"]["folder"])})}
            job |= {"cluster": Cluster(**job["cluster"])}
            job["prepared"] = {name: _prepared(item) for name, item in job["prepared"].items()}
            job["subsets"] = {name: Subset(*item) for name, item in job["subsets"].items()}
            return cls(**facts | {"job": Job(**job), "needs": dict(facts["needs"])})
        except (ValueError, TypeError, KeyError) as error:
            raise MlxError(f"rank 0 sent an invalid job: {error}") from error

    def problem(self, local_world_size: int) -> str:
        """Return what keeps this machine from taking part, or nothing."""
        for name, version in self.needs.items():
            if (own := PACKAGES.get(name) or file_digest(Path.cwd() / name)) != version:
                versions = f"{own:.12} instead of {version:.12}"
                return f"has a different {name} than rank 0 ({versions}); use the same checkout and packages"
        if self.gpus and (count := torch.cuda.device_count()) < self.gpus * local_world_size:
            return f"has {count} GPUs, but its {local_world_size} workers need {self.gpus * local_world_size:g}"
        return ""

    def sees_storage(self) -> bool:
        """Return True if this machine reads the folder of the run."""
        return bool(self.claim) and _claim_of(self.job) == self.claim

    def job_here(self, *, sees: bool, shared: bool) -> Job:
        """Return the job of this process, given whether it, and whether all, see the storage of the run."""
        cluster = dataclasses.replace(self.job.cluster, captures_output=False, shares_storage=shared)
        elsewhere = join_path(storage_root(self.job.tree["cfg"]["storage_path"]), ELSEWHERE)
        return dataclasses.replace(self.job, cluster=cluster, root=self.job.root if sees else elsewhere)


def _claim_of(job: Job) -> str:
    with contextlib.suppress(OSError, MlxError):
        folder = run_folder(job.root, job.run.experiment, job.run.name)
        return hashlib.sha256(folder.document(attempt_name(job.run.attempt))).hexdigest()
    return ""


def _prepared(facts: dict[str, Any]) -> Any:
    store = companions.part("prepared.store")
    manifest = store.Manifest.parse(store.Manifest(**facts["manifest"]).text().encode())
    return store.PreparedSet(**facts | {"manifest": manifest})
