"""Storing of checkpoints with shards: each worker writes its parts to a file, and rank 0 everything else.

The parts are in files in the format of safetensors, in pieces that `index.json` describes:

    {"tensors": {"models/net/head.weight": {"dtype": "F32", "shape": [10, 64], "pieces": [
         {"offsets": [0, 0], "sizes": [5, 64], "file": "shard_00000.safetensors", "start": 4096, "sha256": ...},
         ...]}, ...}}
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed
from torch.distributed.tensor import DTensor, Replicate
from torch.multiprocessing.reductions import StorageWeakRef

from mlx_runtime.companions.sharding import tensor_files
from mlx_runtime.companions.sharding.shards import PLACEHOLDER
from mlx_runtime.distributed.collectives import broadcast, gather
from mlx_runtime.distributed.wrapping import is_sharded
from mlx_runtime.errors import MlxError, StorageError, short_message
from mlx_runtime.runs.checkpoints.groups import State
from mlx_runtime.runs.checkpoints.index import ABOUT, INDEX, CheckpointInfo
from mlx_runtime.runs.checkpoints.store import CheckpointStore, Staging
from mlx_runtime.storage.files import Storage
from mlx_runtime.storage.publishing import HashingWriter, Publication

PIECE_BYTES = 8 << 20
"""Maximum size of a piece with more than one row. A worker reads and verifies only the pieces that it needs."""


class Parts:
    """The sharded tensors in plain values, replaced by placeholders. Every worker must make the same calls.

    Attributes:
        tensors: The sharded tensors by name.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, DTensor] = {}
        self._names: dict[tuple[Any, ...], str] = {}

    def without(self, value: Any, path: str) -> Any:
        """Return plain values with placeholders instead of sharded tensors. Their names start with the path."""
        if is_sharded(value):
            return self._placeholder(value, path)
        if isinstance(value, dict):
            return type(value)({key: self.without(item, f"{path}/{key}") for key, item in value.items()})
        if type(value) in (list, tuple):
            return type(value)(self.without(item, f"{path}/{number}") for number, item in enumerate(value))
        return value

    def _placeholder(self, tensor: DTensor, path: str) -> dict[str, Any]:
        if any(item.is_partial() for item in tensor.placements):
            placements = [Replicate() if item.is_partial() else item for item in tensor.placements]
            tensor = tensor.redistribute(placements=placements)
        tensor_files.dtype_name(tensor.dtype)
        local = tensor.to_local()
        storage = StorageWeakRef(local.untyped_storage())  # type: ignore[no-untyped-call]
        memory = storage, local.storage_offset(), tensor.shape, tensor.stride()
        if memory not in self._names:  # otherwise, it is tied to another one
            while path in self.tensors:
                path += "'"
            self._names[memory], self.tensors[path] = path, tensor
        dims = sorted({item.dim for item in tensor.placements if item.is_shard()})  # type: ignore[attr-defined]
        return {PLACEHOLDER: [self._names[memory], dims]}

    def stage(self, staging: Staging) -> dict[str, torch.Tensor]:
        """Return copies of this worker's parts on the CPU, which training does not change."""
        return {name: staging.copy(tensor.to_local()) for name, tensor in self.tensors.items()}


def save_checkpoint(
    store: CheckpointStore,
    state: State | None,
    checkpoint: CheckpointInfo,
    parts: Parts,
    staged: Mapping[str, torch.Tensor],
    group: Any,
    allowed: Callable[[], None] = lambda: None,
) -> CheckpointInfo:
    """Store a checkpoint with shards atomically. Every worker must call this, in the order of their collectives.

    Args:
        store: The checkpoints of the run.
        state: On rank 0, the part that is not sharded.
        checkpoint: Description of the checkpoint.
        parts: The sharded tensors.
        staged: Copies of this worker's parts of them.
        group: Process group, not used by anything else meanwhile.
        allowed: On rank 0, the same as for `CheckpointStore.save`.

    Raises:
        StorageError: It could not be stored. All workers raise it.
    """
    storage, about = store.storage, checkpoint
    publication = Publication(storage, checkpoint.name, ABOUT)
    names = [f"shard_{rank:05d}.safetensors" for rank in range(group.size())]
    folder, files = broadcast((publication.folder, [*map(publication.unique, names)]), group)
    with contextlib.ExitStack() as stack:
        with _all_or_none(group, store.problem):
            if state is not None:
                publication.expect(files)
                stack.enter_context(publication)
        with _all_or_none(group, store.problem):
            own = _write(storage, folder, files[group.rank()], parts, staged)
            if state is not None:
                about = store.write_state(publication, state, checkpoint)
        written = gather(own, group)
        with _all_or_none(group, store.problem):
            if written is not None:
                about = _with_index(about, publication, storage, dict(zip(files, written, strict=True)))
                store.publish(publication, about, allowed)
    return about


@contextlib.contextmanager
def _all_or_none(group: Any, problem: str) -> Iterator[None]:
    """Raise the first error of a block on all workers as a StorageError, which begins with the problem."""
    own, text = None, None
    try:
        yield
    except Exception as error:  # whatever it is, the others wait for this worker
        own, text = error, str(error) if isinstance(error, MlxError) else f"{problem}: {short_message(error)}"
    texts = [item for item in gather(text, group) or () if item is not None]
    if (first := broadcast(texts[0] if texts else None, group)) is not None:
        raise StorageError(first) from own


def _write(
    storage: Storage, folder: str, file: str, parts: Parts, staged: Mapping[str, torch.Tensor]
) -> tuple[dict[str, Any], int]:
    """Write this worker's pieces, if it has any. Return its part of the index, and the size of its file."""
    tensors: dict[str, Any] = {
        name: {"dtype": tensor_files.dtype_name(tensor.dtype), "shape": [*tensor.shape], "pieces": []}
        for name, tensor in parts.tensors.items()
    }
    pieces = [
        (name, offsets, piece)
        for number, (name, tensor) in enumerate(parts.tensors.items())
        for offsets, piece in _pieces(tensor, staged[name], number)
    ]
    if not pieces:
        return tensors, 0
    with HashingWriter(storage.create(folder, file)) as stream:
        titles = [f"{name}@{','.join(map(str, offsets))}" for name, offsets, _ in pieces]
        entries = {title: (piece.shape, piece.dtype) for title, (_, _, piece) in zip(titles, pieces, strict=True)}
        starts = tensor_files.write_header(stream, entries)
        stream.take_sha256()
        for start, (name, offsets, piece) in zip(starts, pieces, strict=True):
            tensor_files.write_content(stream, [piece])
            facts = {"offsets": offsets, "sizes": [*piece.shape], "file": file, "start": start}
            tensors[name]["pieces"].append({**facts, "sha256": stream.take_sha256()})
    return tensors, stream.size_bytes


def _pieces(tensor: DTensor, part: torch.Tensor, number: int) -> Iterator[tuple[list[int], torch.Tensor]]:
    """Yield the pieces that this worker writes, with their offsets. Replicas take turns by the number of the tensor."""
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate() or ()
    replicated = [dim for dim, item in enumerate(tensor.placements) if item.is_replicate()]
    if any(coordinate[dim] != number % mesh.size(dim) for dim in replicated) or not part.numel():
        return
    [chunk] = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    if not part.ndim:
        yield [], part
        return
    row, *rest = chunk.offsets
    for piece in torch.split(part, max(1, PIECE_BYTES // part[0].nbytes)):
        yield [row, *rest], piece
        row += len(piece)


def _with_index(
    about: CheckpointInfo, publication: Publication, storage: Storage, written: Mapping[str, tuple[dict[str, Any], int]]
) -> CheckpointInfo:
    """Write the index, given its parts and the sizes of all files. Return the description with its checksum."""
    parts = [tensors for tensors, _ in written.values()]
    for name in sorted(set().union(*parts)):
        if not all(name in tensors for tensors in parts):
            raise MlxError(
                f"{name.replace('/', '.')} is sharded, but not all workers hold a part of it. Keep weights on all "
                "workers, or none: a tool that does so on rank 0 only needs `full_tensor()` on all of them first"
            )
    for file, (_, size) in written.items():
        if size and storage.size_bytes(publication.folder, file) != size:
            raise StorageError(
                f"{file}, which another worker has written, is not in the storage: all machines must share "
                "cfg.storage_path; name a shared folder or an object store"
            )
    tensors = {
        name: {**item, "pieces": [piece for part in parts for piece in part[name]["pieces"]]}
        for name, item in parts[0].items()
    }
    index = publication.unique(INDEX)
    with HashingWriter(publication.create(index)) as stream:
        stream.write(json.dumps({"tensors": tensors}, separators=(",", ":")).encode())
    sizes = sum(size for _, size in written.values())
    return replace(about, index=index, index_sha256=stream.sha256, shards_bytes=sizes)
