"""Sources of weights: checkpoints of runs, files, and repositories of the Hugging Face Hub.

A pinned source, like `/runs/digits/run_003/checkpoints/epoch_0004@sha256:3f2a…`, is found from any folder, and is
refused if its content has changed.
"""

import hashlib
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mlx_runtime import companions
from mlx_runtime.companions import is_remote, reader_of
from mlx_runtime.companions.sharding import tensor_files
from mlx_runtime.companions.sharding.shards import full
from mlx_runtime.errors import ConfigError, UsageError, short_message
from mlx_runtime.runs.checkpoints import store
from mlx_runtime.runs.checkpoints.groups import UnreadTensor, io_errors, lacks_weights
from mlx_runtime.runs.checkpoints.index import CheckpointInfo, read_description
from mlx_runtime.runs.folder import RunFolder
from mlx_runtime.runs.queries.lookup import find_checkpoint
from mlx_runtime.sections import Transfer
from mlx_runtime.storage.documents import TEXT, from_json, mapping_of
from mlx_runtime.storage.files import is_uri, join_path, parent_of, storage_errors
from mlx_runtime.storage.local import open_regular
from mlx_runtime.storage.redaction import redact

MARK = "@sha256:"
"""Between a pinned source and the SHA-256 of its content."""

TENSORS = ".safetensors"
FILES = (TENSORS, ".pth", ".pt", ".bin")
"""Suffixes of files; torch reads the pickled ones without running code."""

INDEX = "model.safetensors.index.json"
"""File of a repository that lists those with its weights."""

Tensors = Mapping[str, Any]
"""Tensors by name: on the CPU, or not read yet; see `shards.full`."""


@dataclass(frozen=True)
class Weights:
    """The tensors of a source.

    Attributes:
        title: the source, without its hash.
        sha256: hash of its content.
        models: its tensors by model; the model of a file has no name.
    """

    title: str
    sha256: str
    models: Mapping[str, Tensors]

    @property
    def pinned(self) -> str:
        return f"{self.title}{MARK}{self.sha256}"

    def of(self, model: str, chosen: str | None = None) -> Tensors:
        """Return the tensors of the chosen model, or else of the one with this name, or else of the only one."""
        name = chosen or (next(iter(self.models)) if len(self.models) == 1 else model)
        if name not in self.models:
            raise ConfigError(f"{self.title} has the models {', '.join(self.models)}; choose one of them with model")
        return self.models[name]


def sources_of(given: Transfer) -> dict[str, str]:
    """Return the sources of a transfer, pinned if they were, by the text without secrets that a user has typed."""
    return {
        redact(item): given.pinned.get(redact(item), item)
        for item in ([given.source] if isinstance(given.source, str) else given.source)
    }


def find(text: str, run_of: Callable[[str], RunFolder]) -> str:
    """Return a source, found from any folder, for the text that a user has typed.

    Args:
        text: a run like `run_003@best`, a checkpoint, a file or a repository; or a pinned source.
        run_of: returns the run for a name like `run_003`.

    Raises:
        MlxError: there is no such run, checkpoint or repository.
    """
    name, mark, digest = text.partition(MARK)
    if is_remote(name):
        return text if mark else _current(name)
    if is_uri(name) and name.endswith(FILES):
        raise UsageError(f"cannot read {name}: files are read from this machine only; copy it here")
    if not mark and not name.endswith(FILES) and _description(name) is None:
        run, at, which = name.rpartition("@")
        folder = run_of(run if at else name)
        name = join_path(folder.checkpoints, find_checkpoint(folder, which if at else "latest").name)
    return (name if is_uri(name) else str(Path(name).resolve())) + mark + digest


def read(source: str) -> Weights:
    """Return the weights of a source that `find` has returned.

    Raises:
        ConfigError: it is gone or damaged, or is not the one that was pinned.
    """
    name, _, digest = source.partition(MARK)
    if is_remote(name) and "/checkpoints/" not in name:
        hashes, models = _read_files(_download(name))
    else:
        hashes, models = _read_files([Path(name)]) if name.endswith(FILES) else _read_checkpoint(name)
    sha256 = hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()
    if digest not in ("", sha256):
        raise ConfigError(
            f"{name} has changed: its SHA-256 is {sha256:.12}…, not {digest:.12}…; to take it as it is now, remove the "
            "node pinned of the transfer"
        )
    if not any(models.values()):
        raise ConfigError(f"{name} contains no tensors; name a checkpoint, or a file with a state_dict")
    items = [(f"{model}.{key}".lstrip("."), item) for model, found in models.items() for key, item in found.items()]
    if odd := [key for key, item in items if not (key.isprintable() and _is_plain(item))]:
        raise ConfigError(f"{name} contains {odd[0]!a:.100}, which is no plain tensor, or a name that does not print")
    return Weights(name, sha256, models)


def read_alike(sources: Sequence[str], model: str, chosen: str | None) -> tuple[list[Weights], list[Tensors]]:
    """Return sources, and the tensors of the model in each of them, which are alike."""
    found = [read(source) for source in sources]
    tensors = [item.of(model, chosen) for item in found]
    facts = [{name: (tuple(item.shape), item.dtype) for name, item in each.items()} for each in tensors]
    for weights, other in zip(found, facts, strict=True):
        if different := other.items() ^ facts[0].items():
            raise ConfigError(
                f"{found[0].title} and {weights.title} have no mean, because they differ in "
                f"{min(name for name, _ in different)}"
            )
    return found, tensors


def mean(name: str, sources: Sequence[Tensors]) -> torch.Tensor:
    """Return the mean of a tensor of several sources, at least in float32; the first one if it is not of floats."""
    read: list[torch.Tensor] = [full(tensors[name]) for tensors in sources]
    first, *rest = read
    if not rest or not first.is_floating_point():
        return first
    total = sum((item.double() for item in rest), first.double())
    return (total / len(sources)).to(torch.float64 if first.dtype == torch.float64 else torch.float32)


def _is_plain(item: Any) -> bool:
    """Return True for a tensor whose memory has a value for each of its elements, or that has not been read."""
    return isinstance(item, UnreadTensor) or (
        isinstance(item, torch.Tensor)
        and (item.layout, item.device.type, item.is_quantized) == (torch.strided, "cpu", False)
        and item.untyped_storage().nbytes() >= tensor_files.size_bytes(item.shape, item.dtype)
    )


def _description(path: str) -> CheckpointInfo | None:
    """Return the description of the checkpoint at a path, or None if there is none."""
    storage, name = parent_of(path)
    with storage_errors(f"cannot read {path}"):
        return read_description(storage, name)


def _read_checkpoint(path: str) -> tuple[list[str], Any]:
    """Return the hashes of a checkpoint's state and of the index of its shards, and its models."""
    if is_remote(path):
        folder, name = reader_of(path).fetch_checkpoint(path)
        path = join_path(folder.checkpoints, name)
    if (about := _description(path)) is None:
        raise ConfigError(f"there is no checkpoint at {path}; name another source")
    if lacks_weights(models := store.read(path, whole=False)["models"]):
        raise ConfigError(
            f"{path} lacks the frozen weights of its models (cfg.tuning: save=trained), which their constructors load; "
            "name a checkpoint of a run with save=all"
        )
    return [item for item in (about.sha256, about.index_sha256) if item], {
        str(model): {key: item for key, item in state.items() if isinstance(item, torch.Tensor | UnreadTensor)}
        for model, state in models.items()
    }


def _read_files(files: Sequence[Path]) -> tuple[list[str], Any]:
    """Return the hashes of files, and the tensors in what was hashed, as those of one model without a name."""
    hashes, tensors = list[str](), dict[str, Any]()
    for path in files:
        try:
            with open_regular(str(path)) as file:
                content = file.read()
            hashes.append(hashlib.sha256(content).hexdigest())
            if path.suffix == TENSORS:
                found: Any = tensor_files.read(content)
            else:
                found = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
                found = found.get("state_dict", found)
            tensors |= {str(name): item for name, item in found.items()}
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
        except Exception as error:  # torch raises all kinds of errors, and the content may be anything
            raise ConfigError(f"{path} has no weights that can be loaded: {short_message(error):.200}") from error
    return hashes, {"": tensors}


def _current(uri: str) -> str:
    """Return the URI of the current state of a checkpoint in a mirror, or of another repository."""
    if "/checkpoints/" not in uri:
        hub = companions.part("hub.repository")
        repository = hub.Repository(hub.Address.parse(uri))
        commit = repository.require().commit
        if "run.json" not in repository.files(commit):
            return f"hf://{repository.address.name}@{commit}"
    return str(reader_of(uri).pin_checkpoint(uri))


def _download(uri: str) -> list[Path]:
    """Download the weights in a repository to the cache of `huggingface_hub`."""
    hub = companions.part("hub.repository")
    repository = hub.Repository(hub.Address.parse(uri))
    commit = repository.require().commit
    names = [name for name in repository.files(commit) if "/" not in name and name.endswith(TENSORS)]
    with io_errors(f"{uri}/{INDEX}"):
        index = from_json(repository.read(INDEX, commit) or b"{}", {"weight_map": mapping_of(TEXT)})
    listed = [name for name in names if name in index.get("weight_map", {}).values()]
    files = listed or [name for name in names if name == "model.safetensors"] or names
    if not files or (len(files) > 1 and not listed):
        raise ConfigError(
            f"{uri} has no weights in the format of safetensors, or several; name a file, once it is here"
        )
    return repository.download_to_cache(sorted(files), commit)  # type: ignore[no-any-return]
