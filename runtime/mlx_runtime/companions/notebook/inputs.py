"""Training functions on their way to workers, with datasets and start states: files in the storage.

<storage>/.inputs/<SHA-256 of its content>    a pickled function or dataset, or a checkpoint

conf.yaml of a run has only the SHA-256, so a file is checked before it is unpickled. Files stay until they are removed
with `mlx data rm`; a run that is resumed without them fails, and says how to store them again.
"""

import contextlib
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.utils.data import IterableDataset

from mlx_runtime.companions import part
from mlx_runtime.companions.notebook import pickles
from mlx_runtime.companions.notebook.arrays import checkpoint_values
from mlx_runtime.companions.notebook.pickles import Captured
from mlx_runtime.config.constructors.targets import object_at
from mlx_runtime.errors import ConfigError, StorageError, UsageError, short_message
from mlx_runtime.storage.files import join_path, storage_at, storage_errors
from mlx_runtime.storage.publishing import HashingWriter, sha256_of

INPUTS = ".inputs"
"""Folder in the storage."""

STREAM = "ray:"
"""Beginning of the names of files with a Ray Dataset."""

ROWS = "for others, pass a list of its rows: dataset.take_all()"

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
    cure = "call trainer.run with the same function, dataset= or checkpoint= again to store it"
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
        streams: whether workers can read Datasets of Ray Data: only those of Ray can, and no folds of them.

    Raises:
        UsageError: one of them is not a dataset that workers can read, or has no length or too few rows.
    """
    if isinstance(dataset, Mapping) and not dataset:
        raise UsageError(f"dataset is empty; {TAKES}")
    datasets = dict(dataset) if isinstance(dataset, Mapping) else {"train": dataset}
    for name, item in datasets.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise UsageError(f"dataset has the name {name!r}; names are words, like 'train' and 'val'")
        title = f"dataset[{name!r}]" if isinstance(dataset, Mapping) else "dataset"
        if not is_stream(item):
            _check_rows(title, item, workers)
        elif not streams:
            raise UsageError(f"{title} is a Dataset of Ray Data, which the engine ray reads, without folds; {ROWS}")
        elif not item.has_serializable_lineage():
            cure = "write them to files with write_parquet(path), and pass ray.data.read_parquet(path)"
            raise UsageError(f"{title} is a Dataset of Ray Data with its rows in memory; {cure}")
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


def store_function(root: str, captured: Captured) -> str:
    """Store a function with what it uses, and return the name of its file.

    Raises:
        UsageError: it cannot be sent to workers.
    """
    return store(root, captured.write)


def check_function(root: str, path: str, file: str) -> None:
    """Check that workers can read a function. One of a module is imported; others are not unpickled.

    Raises:
        ConfigError: it cannot be imported, or another version of Python has pickled it.
    """
    load(root, file, pickles.check_version)
    if not path.startswith(f"{pickles.MAIN}.") and "<" not in path:  # like `src.training.make.<locals>.f`
        with _import_errors(path):
            object_at(path)


def load_function(root: str, path: str, file: str) -> Callable[..., Any]:
    """Return a function from its file, in the process of a worker.

    Raises:
        ConfigError: a module that it needs cannot be imported, or another version of Python has pickled it.
    """
    with _import_errors(path):
        function: Callable[..., Any] = load(root, file, pickles.read_function)
        return function


@contextlib.contextmanager
def _import_errors(path: str) -> Iterator[None]:
    try:
        yield
    except (ImportError, AttributeError, NameError) as error:
        raise ConfigError(f"cfg.function is {path!r}, which cannot be imported: {short_message(error)}") from None


def is_stored(root: str, file: str) -> bool:
    """Return True if the storage has a file of this name."""
    place = join_path(root, INPUTS)
    with storage_errors(f"cannot read {place}"):
        return storage_at(place).size_bytes(file) is not None


def store_datasets(root: str, datasets: Mapping[str, Any], captured: Captured) -> dict[str, str]:
    """Store datasets, and return the names of their files. The definitions that they use are added to `captured`.

    Raises:
        UsageError: a dataset cannot be sent to workers.
    """
    files = {}
    for name, dataset in datasets.items():
        title = "dataset" if [*datasets] == ["train"] else f"dataset[{name!r}]"
        content = Lineage(dataset) if is_stream(dataset) else dataset

        def write(file: Any, title: str = title, content: Any = content) -> None:
            try:
                used = pickles.dump(content, file, pickles.ByName)
            except Exception as error:  # pickling can raise anything
                kind, why = type(content).__name__, short_message(error)
                cure = "open files and connections in __getitem__, and define functions at the top level of a module"
                raise UsageError(f"{title}, a {kind}, cannot be sent to workers: {why}; {cure}") from None
            captured.add_used(used)

        files[name] = STREAM * is_stream(dataset) + store(root, write)
    return files


def load_dataset(root: str, file: str) -> Any:
    """Return a dataset from its file, in the process of a worker that has loaded the function."""
    return load(root, file.removeprefix(STREAM), pickles.read)


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
