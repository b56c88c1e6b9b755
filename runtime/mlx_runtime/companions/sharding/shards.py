"""Sharded tensors of a state: each worker writes its part, and reads the part that it needs, or the whole tensor.

Torch's distributed checkpointing (DCP) plans who writes and reads which part. Its metadata, a pickle, is replaced by an
index in JSON, and the parts are in safetensors files:

    {"tensors": {"models/net/head.weight": {"dtype": "F32", "shape": [10, 64], "chunks": [
         {"offsets": [0, 0], "sizes": [5, 64], "file": "shard_00000.safetensors", "start": 4096}, ...]}, ...},
     "files": {"shard_00000.safetensors": {"size_bytes": 8192, "sha256": [SHA-256 of each segment, ...]}, ...}}
"""

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from mlx_runtime.companions.sharding import tensor_files
from mlx_runtime.companions.sharding.segments import SegmentReader
from mlx_runtime.distributed.wrapping import is_sharded
from mlx_runtime.errors import short_message
from mlx_runtime.runs.checkpoints.groups import UnreadTensor, io_errors
from mlx_runtime.runs.checkpoints.index import CheckpointInfo
from mlx_runtime.runs.checkpoints.store import Staging
from mlx_runtime.storage.documents import COUNT, NAME, TEXT, from_json, list_of, mapping_of, mapping_with
from mlx_runtime.storage.files import Storage, join_path

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import ReadItem
    from torch.distributed.tensor import DTensor

PLACEHOLDER = "mlx_runtime.sharded"
"""Key of the dict `{key: [name of the tensor in the index, [dimensions that were sharded]]}` instead of a tensor."""

_CHUNK = mapping_with(
    {"offsets": list_of(COUNT), "sizes": list_of(COUNT), "file": NAME, "start": COUNT},
    needs=("offsets", "sizes", "file", "start"),
)
_TENSOR = mapping_with(
    {"dtype": TEXT, "shape": list_of(COUNT), "chunks": list_of(_CHUNK)}, needs=("dtype", "shape", "chunks")
)
_FILE = mapping_with({"size_bytes": COUNT, "sha256": list_of(TEXT)}, needs=("size_bytes", "sha256"))
_SHAPE = {"tensors": mapping_of(_TENSOR), "files": mapping_of(_FILE, NAME)}


# -- sharded tensors of a state


@dataclass(frozen=True)
class StoredTensor(UnreadTensor):
    """A tensor of a loaded state whose content has not been read yet."""

    source: "ShardedTensors"
    name: str  # in the index
    dims: tuple[int, ...]  # dimensions that were sharded when it was saved

    @property
    def shape(self) -> torch.Size:
        return self.source.metadata.state_dict_metadata[self.name].size  # type: ignore[union-attr]

    @property
    def dtype(self) -> torch.dtype:
        return self.source.metadata.state_dict_metadata[self.name].properties.dtype  # type: ignore[union-attr]

    def __deepcopy__(self, memo: Any) -> "StoredTensor":
        return self


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

    def _placeholder(self, tensor: "DTensor", path: str) -> dict[str, Any]:
        from torch.distributed.tensor import Replicate

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

    def stage(self, before: Mapping[str, torch.Tensor], staging: Staging) -> dict[str, torch.Tensor]:
        """Return copies of this worker's parts on the CPU, which training does not change.

        The copies of the previous checkpoint are overwritten, because allocating memory takes longer than copying.
        """
        own = {name: tensor.to_local().detach() for name, tensor in self.tensors.items()}
        return {name: _copy(part, before.get(name), staging) for name, part in own.items()}


def _copy(part: torch.Tensor, before: torch.Tensor | None, staging: Staging) -> torch.Tensor:
    if part.device.type != "cpu" or before is None or before.shape != part.shape or before.dtype != part.dtype:
        return staging.copy(part)
    return before.copy_(part)


# -- reading


class ShardedTensors:
    """The sharded tensors of one stored checkpoint.

    Args:
        storage: Storage of the checkpoint.
        name: Name of its folder.
        index: Content of its index.

    Raises:
        ValueError: The index does not describe whole tensors.
    """

    def __init__(self, storage: Storage, name: str, index: bytes) -> None:
        self._storage, self._name = storage, name
        document = from_json(index, _SHAPE, needs=("tensors", "files"))
        self.files: dict[str, Any] = document["files"]
        self.metadata = _metadata(document["tensors"])
        self._chunks = {
            (tensor, tuple(chunk["offsets"])): chunk
            for tensor, item in document["tensors"].items()
            for chunk in item["chunks"]
        }
        for (tensor, _), chunk in self._chunks.items():
            dtype = self.metadata.state_dict_metadata[tensor].properties.dtype  # type: ignore[union-attr]
            end = chunk["start"] + tensor_files.size_bytes(chunk["sizes"], dtype)
            if chunk["start"] < 0 or end > self.files.get(chunk["file"], {"size_bytes": 0})["size_bytes"]:
                raise ValueError(f"a part of {tensor} is outside of its file")

    def check_files(self) -> None:
        """Check the existence and size of every file, without reading it. Raise DamagedError."""
        for file, about in self.files.items():
            size = self._storage.size_bytes(self._name, file)
            with io_errors(self._path(file)):
                if size is None:
                    raise FileNotFoundError
                if size != about["size_bytes"]:
                    raise ValueError(f"it has {size:,} bytes of {about['size_bytes']:,}")

    def fill_placeholders(self, value: Any) -> Any:
        """Return plain values with a `StoredTensor` instead of each placeholder."""
        if isinstance(value, dict):
            if value.keys() == {PLACEHOLDER}:
                name, dims = value[PLACEHOLDER]
                if name not in self.metadata.state_dict_metadata:
                    raise ValueError(f"it does not describe {name}")
                return StoredTensor(self, name, tuple(dims))
            return type(value)({key: self.fill_placeholders(item) for key, item in value.items()})
        if type(value) in (list, tuple):
            return type(value)(map(self.fill_placeholders, value))
        return value

    def read(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Fill tensors, given by their names in the index; in sharded ones, the part of this worker.

        Raises:
            DamagedError: A file is missing or damaged.
            StorageError: The storage does not answer.
        """
        from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(dict(targets), self.metadata)
        reads: dict[str, list[tuple[int, ReadItem]]] = {}
        for item in planner.create_local_plan().items:
            chunk = self._chunk(item)
            reads.setdefault(chunk["file"], []).append((chunk["start"], item))
        for file, items in sorted(reads.items()):
            with io_errors(self._path(file)), self._storage.open(self._name, file) as stream:
                reader = SegmentReader(stream, self.files[file]["sha256"])
                for _, item in sorted(items, key=lambda pair: pair[0]):
                    self._read(reader, item, planner.resolve_tensor(item).detach())

    def _read(self, reader: SegmentReader, item: "ReadItem", target: torch.Tensor) -> None:
        """Fill a tensor with a box of a chunk, by reading all rows of the chunk that the box touches."""
        chunk = self._chunk(item)
        sizes, offsets, lengths = chunk["sizes"] or [1], [*item.storage_offsets] or [0], [*item.lengths] or [1]
        row = tensor_files.size_bytes(sizes[1:], target.dtype)
        start = chunk["start"] + offsets[0] * row
        if target.device.type == "cpu" and target.is_contiguous() and lengths[1:] == sizes[1:]:
            reader.read_into(tensor_files.content(target), start)
            return
        rows = torch.empty([lengths[0], *sizes[1:]], dtype=target.dtype)
        reader.read_into(tensor_files.content(rows), start)
        for dim in range(1, len(sizes)):
            rows = rows.narrow(dim, offsets[dim], lengths[dim])
        target.copy_(rows.reshape(target.shape))

    def _chunk(self, item: "ReadItem") -> Any:
        return self._chunks[item.storage_index.fqn, tuple(item.storage_index.offset or ())]

    def _path(self, file: str) -> str:
        return join_path(self._storage.root, self._name, file)


class Reads:
    """Tensors to be filled from a checkpoint, all at once."""

    def __init__(self) -> None:
        self._targets: dict[tuple[ShardedTensors, Any], dict[str, torch.Tensor]] = {}

    def target(self, stored: StoredTensor, layout: Any, empty: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the tensor to fill: the same one for tied tensors with the same layout."""
        targets = self._targets.setdefault((stored.source, layout), {})
        if stored.name not in targets:
            targets[stored.name] = empty()
        return targets[stored.name]

    def full(self, value: Any) -> Any:
        """Return plain values with whole tensors on the CPU instead of stored ones."""
        if isinstance(value, StoredTensor):
            return self.target(value, None, lambda: torch.empty(value.shape, dtype=value.dtype))
        if isinstance(value, dict):
            return type(value)({key: self.full(item) for key, item in value.items()})
        if type(value) in (list, tuple):
            return type(value)(map(self.full, value))
        return value

    def run(self) -> None:
        """Fill all tensors that have not been filled yet; see `ShardedTensors.read`."""
        rest, self._targets = self._targets, {}
        for (shards, _), targets in rest.items():
            shards.read(targets)


def fill(state: Any, storage: Storage, name: str, index: str, about: CheckpointInfo | None) -> Any:
    """Return the loaded state of a checkpoint with a `StoredTensor` instead of each placeholder.

    Raises:
        DamagedError: the index, a file that it names, or the state is damaged.
    """
    with io_errors(join_path(storage.root, name, index)):
        content = storage.read(name, index)
        if about is not None and hashlib.sha256(content).hexdigest() != about.index_sha256:
            raise ValueError("its SHA-256 is not the one it was saved with")
        shards = ShardedTensors(storage, name, content)
    shards.check_files()
    with io_errors(join_path(storage.root, name)):
        try:
            return shards.fill_placeholders(state)
        except TypeError as error:
            raise ValueError(short_message(error)) from error


def full(state: Any) -> Any:
    """Return a state with whole tensors on the CPU instead of stored ones."""
    reads = Reads()
    state = reads.full(state)
    reads.run()
    return state


def _metadata(tensors: Mapping[str, Any]) -> "Metadata":
    """Return DCP's metadata of stored tensors."""
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        TensorProperties,
        TensorStorageMetadata,
    )

    found = {}
    for name, item in tensors.items():
        if item["dtype"] not in tensor_files.DTYPES:
            raise ValueError(f"{name} is of the unknown type {item['dtype']!r:.100}")
        numbers = [number for chunk in item["chunks"] for number in (*chunk["sizes"], *chunk["offsets"])]
        volumes = sum(math.prod(chunk["sizes"]) for chunk in item["chunks"])
        if min(numbers, default=0) < 0 or volumes != math.prod(item["shape"]):
            raise ValueError(f"it does not describe the whole of {name}")
        chunks = [
            ChunkStorageMetadata(torch.Size(chunk["offsets"]), torch.Size(chunk["sizes"])) for chunk in item["chunks"]
        ]
        properties = TensorProperties(dtype=tensor_files.DTYPES[item["dtype"]])
        found[name] = TensorStorageMetadata(properties, torch.Size(item["shape"]), chunks)
    return Metadata(dict(found))
