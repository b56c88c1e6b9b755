"""`ShardedTensorWriter`: storage for torch's distributed checkpointing (DCP). Imported only by runs with shards."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn, cast

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from mlx_runtime.companions.sharding import tensor_files
from mlx_runtime.companions.sharding.segments import SegmentWriter
from mlx_runtime.errors import MlxError, StorageError, short_message
from mlx_runtime.storage.files import Storage
from mlx_runtime.storage.publishing import Publication


class StagedPlanner(DefaultSavePlanner):
    """Plans the writing of sharded tensors, and provides copies of this worker's parts.

    Args:
        staged: The copies by name.
    """

    def __init__(self, staged: Mapping[str, torch.Tensor]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._staged = staged

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """On rank 0, check that all workers hold the same tensors, and plan who writes which part."""
        held: list[set[str]] = [{item.index.fqn for item in plan.items} for plan in all_plans]
        if odd := sorted(held[0].union(*held) - held[0].intersection(*held)):
            raise MlxError(
                f"{odd[0].replace('/', '.')} is sharded, but not all workers hold a part of it. Keep weights on all "
                "workers, or none: a tool that does so on rank 0 only needs `full_tensor()` on all of them first"
            )
        return super().create_global_plan(all_plans)

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return self._staged[index.fqn]


@dataclass(frozen=True)
class _Destination:
    """The file of one worker, named by rank 0."""

    folder: str
    file: str


@dataclass(frozen=True)
class _WrittenFile:
    """The shards that a worker has written."""

    file: str
    size_bytes: int
    digests: list[str]
    starts: dict[MetadataIndex, int]  # position of each chunk in the file


class ShardedTensorWriter(StorageWriter):
    """Writes one file per worker to a folder that rank 0 publishes.

    Args:
        storage: Storage of the checkpoints.
        publication: On rank 0, the attempt to publish this one.
        begin: On rank 0, begins the publication.
        write_state: On rank 0, writes the part of the state that is not sharded.
        publish: On rank 0, publishes the checkpoint, given its index and the size of all shards in bytes.
    """

    def __init__(
        self,
        storage: Storage,
        publication: Publication | None = None,
        begin: Callable[[], object] = lambda: None,
        write_state: Callable[[], None] = lambda: None,
        publish: Callable[[bytes, int], None] = lambda index, size_bytes: None,
    ) -> None:
        self._storage, self._publication = storage, publication
        self._begin, self._write_state, self._publish = begin, write_state, publish

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._begin()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On rank 0, name the file of each worker."""
        assert self._publication is not None
        files = [self._publication.unique(f"shard_{rank:05d}.safetensors") for rank in range(len(plans))]
        self._publication.expect(files)
        folder = self._publication.folder
        return [replace(plan, storage_data=_Destination(folder, file)) for plan, file in zip(plans, files, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the file of this worker, unless it would be empty."""
        to: _Destination = plan.storage_data
        tensors = {item.index: cast("torch.Tensor", planner.resolve_data(item)) for item in plan.items}
        written: Future[list[WriteResult]] = Future()
        results = []
        if tensors:
            try:
                file = SegmentWriter(self._storage.create(to.folder, to.file))
                with file:
                    starts = tensor_files.write(file, {_title(index): part for index, part in tensors.items()})
            except FileNotFoundError as error:
                raise StorageError(f"{error.filename or to.folder} is missing on this machine: {_SHARED}") from error
            facts = _WrittenFile(to.file, file.size_bytes, file.digests, dict(zip(tensors, starts, strict=True)))
            results.append(WriteResult(MetadataIndex(to.file), file.size_bytes, facts))
        self._write_state()
        written.set_result(results)
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0, publish the checkpoint after all workers have written their files."""
        assert self._publication is not None
        written: list[_WrittenFile] = [item.storage_data for worker in results for item in worker]
        for item in written:
            if self._storage.size_bytes(self._publication.folder, item.file) != item.size_bytes:
                raise StorageError(f"{item.file}, which another worker has written, is not in the storage: {_SHARED}")
        self._publish(_index(metadata, written), sum(item.size_bytes for item in written))


_SHARED = "all machines must share cfg.storage_path; name a shared folder or an object store"


def failure(error: CheckpointException, problem: str) -> NoReturn:
    """Raise the failure of the worker with the lowest rank as an error for users that begins with the problem."""
    cause = error.failures[min(error.failures)][0]
    if isinstance(cause, MlxError):
        raise cause
    if isinstance(cause, OSError | RuntimeError):
        raise StorageError(f"{problem}: {short_message(cause)}") from error
    raise cause


def _title(index: MetadataIndex) -> str:
    """Return a unique name for a chunk in its file: a worker may hold several chunks of one tensor."""
    return f"{index.fqn}@{','.join(map(str, index.offset or ()))}"


def _index(metadata: Metadata, written: list[_WrittenFile]) -> bytes:
    """Return the index of a checkpoint; the module `shards` describes its format."""
    places = {index: (item.file, start) for item in written for index, start in item.starts.items()}
    tensors = {}
    for name, about in metadata.state_dict_metadata.items():
        assert isinstance(about, TensorStorageMetadata)
        chunks = []
        for chunk in about.chunks:
            file, start = places[MetadataIndex(name, chunk.offsets)]
            facts = {"offsets": list(chunk.offsets), "sizes": list(chunk.sizes), "file": file, "start": start}
            chunks.append(facts)
        dtype = tensor_files.dtype_name(about.properties.dtype)
        tensors[name] = {"dtype": dtype, "shape": list(about.size), "chunks": chunks}
    files = {item.file: {"size_bytes": item.size_bytes, "sha256": item.digests} for item in written}
    return json.dumps({"tensors": tensors, "files": files}, separators=(",", ":")).encode()
