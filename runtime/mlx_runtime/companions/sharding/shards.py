"""Sharded tensors of a loaded state: each worker reads the part that it needs, or the whole tensor.

The module `saving` describes the files.
"""

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mlx_runtime.companions.sharding import tensor_files
from mlx_runtime.distributed.wrapping import is_sharded
from mlx_runtime.errors import short_message
from mlx_runtime.runs.checkpoints.groups import UnreadTensor, io_errors, map_tensors
from mlx_runtime.runs.checkpoints.index import CheckpointInfo
from mlx_runtime.storage.documents import COUNT, NAME, TEXT, from_json, list_of, mapping_of, mapping_with, one_of
from mlx_runtime.storage.files import Storage, join_path

PLACEHOLDER = "mlx_runtime.sharded"
"""Key of the dict `{key: [name of the tensor in the index, [dimensions that were sharded]]}` instead of a tensor."""

_NUMBERS = list_of(COUNT)

_PIECE = mapping_with(
    {"offsets": _NUMBERS, "sizes": _NUMBERS, "file": NAME, "start": COUNT, "sha256": TEXT},
    needs=("offsets", "sizes", "file", "start", "sha256"),
)
_TENSOR = mapping_with(
    {"dtype": one_of(*tensor_files.DTYPES), "shape": _NUMBERS, "pieces": list_of(_PIECE)},
    needs=("dtype", "shape", "pieces"),
)


@dataclass(frozen=True)
class StoredTensor(UnreadTensor):
    """A tensor of a loaded state whose content has not been read yet."""

    source: "ShardedTensors"
    name: str  # in the index
    dims: tuple[int, ...]  # dimensions that were sharded when it was saved

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.source.tensors[self.name]["shape"])

    @property
    def dtype(self) -> torch.dtype:
        return tensor_files.DTYPES[self.source.tensors[self.name]["dtype"]]

    def __deepcopy__(self, memo: Any) -> "StoredTensor":
        return self


class ShardedTensors:
    """The sharded tensors of one stored checkpoint.

    Args:
        storage: Storage of the checkpoint.
        name: Name of its folder.
        index: Content of its index.

    Attributes:
        tensors: Dtype, shape and pieces of each tensor by name.

    Raises:
        ValueError: The index does not describe whole tensors.
    """

    def __init__(self, storage: Storage, name: str, index: bytes) -> None:
        self._storage, self._name = storage, name
        self.tensors: dict[str, Any] = from_json(index, {"tensors": mapping_of(_TENSOR)}, needs=("tensors",))["tensors"]
        self._ends: dict[str, int] = {}  # of the last piece in each file
        for title, item in self.tensors.items():
            for piece in item["pieces"]:
                if min(*piece["sizes"], *piece["offsets"], piece["start"], 0) < 0:
                    raise ValueError(f"a part of {title} has a negative position or size")
                size_bytes = tensor_files.size_bytes(piece["sizes"], tensor_files.DTYPES[item["dtype"]])
                self._ends[piece["file"]] = max(self._ends.get(piece["file"], 0), piece["start"] + size_bytes)
            dims = {len(item["shape"]), *(len(piece[key]) for piece in item["pieces"] for key in ("offsets", "sizes"))}
            volume = sum(math.prod(piece["sizes"]) for piece in item["pieces"])
            if len(dims) > 1 or volume != math.prod(item["shape"]):
                raise ValueError(f"its parts of {title} do not make up the whole tensor")

    def check_files(self) -> None:
        """Check the existence and size of every file, without reading it. Raise DamagedError."""
        for file, end in self._ends.items():
            with io_errors(self._path(file)):
                size = self._storage.size_bytes(self._name, file)
                if size is None:
                    raise FileNotFoundError
                if size < end:
                    raise ValueError(f"it has {size:,} of {end:,} bytes")

    def fill_placeholders(self, value: Any) -> Any:
        """Return plain values with a `StoredTensor` instead of each placeholder."""
        if isinstance(value, dict):
            if value.keys() == {PLACEHOLDER}:
                name, dims = value[PLACEHOLDER]
                if name not in self.tensors:
                    raise ValueError(f"it does not describe {name}")
                return StoredTensor(self, name, tuple(dims))
            return type(value)({key: self.fill_placeholders(item) for key, item in value.items()})
        if type(value) in (list, tuple):
            return type(value)(map(self.fill_placeholders, value))
        return value

    def read(self, wanted: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Fill tensors, given with their names in the index; in sharded ones, the part of this worker.

        Raises:
            DamagedError: A file is missing or damaged.
            StorageError: The storage does not answer.
        """
        reads: dict[str, list[tuple[Any, torch.Tensor, list[int]]]] = {}
        for name, tensor in wanted:
            target, corner = tensor, [0] * tensor.ndim
            if is_sharded(tensor):
                [chunk] = tensor.__create_chunk_list__()  # type: ignore[attr-defined]
                target, corner = tensor.to_local(), [*chunk.offsets]  # type: ignore[attr-defined]
            for piece in self.tensors[name]["pieces"]:
                reads.setdefault(piece["file"], []).append((piece, target, corner))
        for file, items in sorted(reads.items()):
            with io_errors(self._path(file)), self._storage.open(self._name, file) as stream:
                for piece, target, corner in sorted(items, key=lambda item: item[0]["start"]):
                    _read(stream, piece, target, corner)

    def _path(self, file: str) -> str:
        return join_path(self._storage.root, self._name, file)


def _read(stream: Any, piece: Any, target: torch.Tensor, corner: Sequence[int]) -> None:
    """Fill the box that a piece shares with a target, which lies at this corner of the whole tensor."""
    boxes = []
    for first, size, offset, length in zip(corner, target.shape, piece["offsets"], piece["sizes"], strict=True):
        begin, end = max(first, offset), min(first + size, offset + length)
        if begin >= end:
            return
        boxes.append((begin - first, begin - offset, end - begin))
    stream.seek(piece["start"])
    content = bytearray(stream.read(tensor_files.size_bytes(piece["sizes"], target.dtype)))
    if hashlib.sha256(content).hexdigest() != piece["sha256"]:
        raise ValueError("its SHA-256 is not the one it was saved with")
    source = torch.frombuffer(content, dtype=target.dtype).view(piece["sizes"])
    for dim, (to, of, length) in enumerate(boxes):
        target, source = target.narrow(dim, to, length), source.narrow(dim, of, length)
    target.copy_(source)


class Reads:
    """Tensors to be filled from a checkpoint, all at once."""

    def __init__(self) -> None:
        self._wanted: list[tuple[StoredTensor, torch.Tensor]] = []
        self._whole: dict[str, torch.Tensor] = {}  # tied tensors remain one

    def into(self, stored: StoredTensor, target: torch.Tensor) -> torch.Tensor:
        """Return a tensor that will be filled with the content of a stored one, or this worker's part of it."""
        self._wanted.append((stored, target))
        return target

    def whole(self, tensor: Any) -> Any:
        """Return the whole of a stored tensor on the CPU, or any other tensor unchanged."""
        if not isinstance(tensor, StoredTensor):
            return tensor
        if tensor.name not in self._whole:
            self._whole[tensor.name] = self.into(tensor, torch.empty(tensor.shape, dtype=tensor.dtype))
        return self._whole[tensor.name]

    def run(self) -> None:
        """Fill all tensors that have not been filled yet; see `ShardedTensors.read`."""
        wanted, self._wanted = self._wanted, []
        if wanted:
            wanted[0][0].source.read([(stored.name, target) for stored, target in wanted])


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
    """Return plain values with whole tensors on the CPU instead of stored ones."""
    reads = Reads()
    state = map_tensors(state, reads.whole)
    reads.run()
    return state
