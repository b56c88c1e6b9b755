"""A worker on Ray: an actor, whose class is imported before its libraries."""

import os
import pickle
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import ray
import ray.exceptions
import ray.util

import mlx_runtime.companions.ray.preload  # noqa: F401 - on clusters, too
from mlx_runtime.errors import StorageError
from mlx_runtime.importing import many_imports

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

    from mlx_runtime.loop.job import Job
    from mlx_runtime.runs.folder import RunFolder


class Seat(NamedTuple):
    """The address of a worker's machine, its GPUs, and the port of its store, or 0 if it has none."""

    host: str
    gpus: list[str]
    port: int


class RayWorker:
    """The actor. All workers of a group `prepare` at the same time, then `train`."""

    def prepare(self, job: bytes, serves: bool) -> Seat:
        """Import what training needs. The first worker also serves the store for the rendezvous of the group."""
        with many_imports():
            from torch.distributed import TCPStore  # type: ignore[attr-defined]

            from mlx_runtime.workers.process import train_in_group  # noqa: F401 - and all that it needs

            self._job: Job = pickle.loads(job)
        host = ray.util.get_node_ip_address()
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False) if serves else None
        return Seat(host, [*map(str, ray.get_gpu_ids())], self._store.port if self._store is not None else 0)

    def train(self, rank: int, variables: Mapping[str, str], **options: Any) -> bytes:
        """Train as one of the workers; see `WorkerJob` for options. Return the pickled error of its loop, or None."""
        from mlx_runtime.workers.process import WorkerJob, train_in_group

        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Ray raises SystemExit, as if user code had done so
        os.environ.update(variables)
        shared = WorkerJob(self._job, results=Path(), store=self._meet, **options)
        error = train_in_group(shared, rank)
        if isinstance(error, ray.exceptions.RayTaskError):  # of a stream; its class cannot be pickled
            error = error.cause
        return pickle.dumps(error)

    def _meet(self) -> "Store":
        """Return the store of the group."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        check_storage(self._job.folder)
        return self._store or TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))


def check_storage(folder: "RunFolder") -> None:
    """Raise a StorageError if this node, which may have joined after the preflight check, lacks the run's storage."""
    if folder.uri is None and not folder.record.is_file():
        node = ray.util.get_node_ip_address()
        line = f"the node {node} does not see {folder.path}, which the driver has created"
        raise StorageError(f"{line}: mount the storage on every node, also on those that the autoscaler starts")
