"""Datasets and start states of training functions on their way to workers: files in the storage.

<storage>/.inputs/<SHA-256 of its content>    a pickled dataset, or a checkpoint

conf.yaml of a run has only the SHA-256, so a file is checked before it is unpickled. Files stay until they are removed
with `mlx data rm`; a run that is resumed without them fails, and says how to store them again.
"""

import re
import sys
import tempfile
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.utils.data import IterableDataset

from mlx_runtime.companions import part
from mlx_runtime.companions.notebook import scripts, sources
from mlx_runtime.companions.notebook.arrays import checkpoint_values
from mlx_runtime.companions.notebook.ray_rows import read_rows
from mlx_runtime.errors import MlxError, StorageError, UsageError, short_message
from mlx_runtime.storage.files import join_path, storage_at, storage_errors
from mlx_runtime.storage.publishing import HashingWriter, sha256_of

INPUTS = ".inputs"
"""Folder in the storage."""

STREAM = "ray:"
"""Beginning of the names of files with a Ray Dataset."""

TAKES = "it takes a torch Dataset with __getitem__ and __len__, a Dataset of Ray Data, or a dict of these by name"


def store(root: str, write: Callable[[Any], object]) -> str:
    """Store what `write(file)` writes in the storage at `root`, unless it is there. Return its SHA-256.

    Raises:
        StorageError: the storage cannot be written.
    """
    place = join_path(root, INPUTS)
    storage = storage_at(place)
    with storage_errors(f"cannot write {place}"):
        if storage.local:
            Path(storage.path).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".part-", dir=storage.path if storage.local else None) as folder:
            file = Path(folder, "content")
            with HashingWriter(file.open("wb")) as written:
                write(written)
            if storage.size_bytes(written.sha256) == written.size_bytes:
                return written.sha256
            if storage.local:
                file.replace(storage.of(written.sha256))
            else:
                storage.upload(file, written.sha256)
    return written.sha256


def load(root: str, sha256: str, read: Callable[[BinaryIO], Any]) -> Any:
    """Return what `read(file)` returns for a file in the storage at `root`, after a check of its content.

    Raises:
        StorageError: the file is missing, cannot be read, or has changed.
    """
    if not re.fullmatch("[0-9a-f]{64}", sha256):
        raise StorageError(f"{sha256!r:.80} is not the SHA-256 of a file of a run")
    place = join_path(root, INPUTS)
    cure = "call trainer.run with the same dataset= or checkpoint= again to store it"
    with storage_errors(f"cannot read {join_path(place, sha256)}; {cure}"):
        stream = storage_at(place).open(sha256)
    with stream:
        with storage_errors(f"cannot read {join_path(place, sha256)}"):
            found, _ = sha256_of(stream)
        if found != sha256:
            raise StorageError(f"{join_path(place, sha256)} is damaged: remove it, then {cure}")
        return read(stream)


def named(dataset: Any, workers: int, *, streams: bool = True) -> dict[str, Any]:
    """Return the datasets of a call `trainer.run(dataset=...)` by name; a single one is named `train`.

    Args:
        dataset: the argument.
        workers: number of workers.
        streams: whether workers may read Datasets of Ray Data themselves. Otherwise, and if other clusters cannot make
            them again, their rows are read here.

    Raises:
        UsageError: one of them is not a dataset, has no length or too few rows, or cannot be read.
    """
    if isinstance(dataset, Mapping) and not dataset:
        raise UsageError(f"dataset is empty; {TAKES}")
    datasets = dict(dataset) if isinstance(dataset, Mapping) else {"train": dataset}
    for name, item in datasets.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise UsageError(f"dataset has the name {name!r}; names are words, like 'train' and 'val'")
        title = f"dataset[{name!r}]" if isinstance(dataset, Mapping) else "dataset"
        if is_stream(item) and not (streams and item.has_serializable_lineage()):
            datasets[name] = item = read_rows(item, title)
        if not is_stream(item):
            _check_rows(title, item, workers)
    return datasets


def _check_rows(title: str, dataset: Any, workers: int) -> None:
    kind = type(dataset).__name__
    if isinstance(dataset, IterableDataset | str | bytes) or not hasattr(dataset, "__getitem__"):
        raise UsageError(f"{title} is of type {kind}; {TAKES}")
    try:
        rows = len(dataset)
    except (TypeError, NotImplementedError):
        raise UsageError(f"{title}: {kind} has no length; give it __len__, the number of its rows") from None
    if rows < workers:
        raise UsageError(f"{title} has {rows} rows, fewer than the {workers} workers of Trainer(num_workers={workers})")


def is_stream(dataset: Any) -> bool:
    """Return True for a Dataset of Ray Data, which nobody has without importing it."""
    ray_data = sys.modules.get("ray.data")
    return ray_data is not None and isinstance(dataset, ray_data.Dataset)


def store_datasets(root: str, datasets: Mapping[str, Any], module: sources.FunctionModule | None) -> dict[str, str]:
    """Store datasets, and return the names of their files.

    Args:
        root: the storage.
        datasets: datasets by name.
        module: module of a function of a session, to which the classes of the datasets are added.

    Raises:
        UsageError: a dataset cannot be sent to workers.
    """
    files = {}
    for name, dataset in datasets.items():
        title = "dataset" if [*datasets] == ["train"] else f"dataset[{name!r}]"
        content = Lineage(dataset) if is_stream(dataset) else dataset

        def write(file: Any, title: str = title, content: Any = content) -> None:
            try:
                _Pickler(file, module).dump(content)
            except MlxError:
                raise
            except Exception as error:  # pickling can raise anything
                kind, why = type(content).__name__, short_message(error)
                cure = "open files and connections in __getitem__, and define functions at the top level of a module"
                raise UsageError(f"{title}, a {kind}, cannot be sent to workers: {why}; {cure}") from None

        files[name] = STREAM * is_stream(dataset) + store(root, write)
    return files


def load_dataset(root: str, file: str) -> Any:
    """Return a dataset from its file, in the process of a worker."""
    return load(root, file.removeprefix(STREAM), lambda stream: _Unpickler(stream, {}).load())


def store_state(root: str, state: Mapping[str, Any]) -> str:
    """Store a checkpoint: what `save_checkpoint` takes.

    Raises:
        UsageError: it has a value of another type.
    """
    values = checkpoint_values(state, "checkpoint[{!r}]", UsageError)
    return store(root, lambda file: torch.save(values, file))


def load_state(root: str, sha256: str) -> dict[str, Any]:
    """Return a stored checkpoint, with its tensors on the CPU."""
    state: dict[str, Any] = load(root, sha256, lambda stream: torch.load(stream, map_location="cpu", weights_only=True))
    return state


class _Pickler(sources.Pickler):
    """A pickler that refers to classes and functions of a script or session by the names that workers import."""

    def persistent_id(self, obj: Any) -> str | None:
        if not isinstance(obj, type | types.FunctionType) or obj.__module__ not in ("__main__", sources.MODULE):
            return None
        if self.module is not None:
            return f"{sources.MODULE}.{super().persistent_id(obj)}"
        script = scripts.name_script(obj.__qualname__)
        if script is None or not obj.__qualname__.isidentifier():
            raise ValueError(f"{obj.__qualname__} is not at the top level of a file that workers import")
        return f"{script}.{obj.__qualname__}"


class _Unpickler(sources.Unpickler):
    def persistent_load(self, pid: str) -> Any:
        return scripts.load(pid)


class Lineage:
    """A Dataset of Ray Data as the steps that make it, without its rows."""

    def __init__(self, dataset: Any) -> None:
        self._steps: bytes = part("ray.private").serialize_lineage(dataset)

    def to_ray(self) -> Any:
        import ray.data

        return ray.data.Dataset.deserialize_lineage(self._steps)


class StoredStream:
    """A Dataset of Ray Data in a file of the storage, as the node of a dataset in conf.yaml."""

    def __init__(self, root: str, file: str) -> None:
        self._lineage: Lineage = load_dataset(root, file)

    def to_ray(self) -> Any:
        return self._lineage.to_ray()
