"""The weights of a checkpoint in a single safetensors file, sharded or not."""

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mlx_runtime.companions.sharding import tensor_files
from mlx_runtime.companions.sharding.shards import StoredTensor, full
from mlx_runtime.errors import UsageError
from mlx_runtime.runs.checkpoints.groups import lacks_weights
from mlx_runtime.runs.checkpoints.store import CheckpointStore
from mlx_runtime.runs.folder import RunFolder
from mlx_runtime.runs.queries.lookup import find_checkpoint
from mlx_runtime.storage.files import size_text
from mlx_runtime.storage.publishing import HashingWriter

Weights = dict[str, torch.Tensor | StoredTensor]


def consolidate(folder: RunFolder, which: str = "latest", output: Path | None = None, *, force: bool = False) -> str:
    """Write the whole weights of all models to a file. Return a line that describes it.

    Tied weights are written under each of their names, so that a strict `load_state_dict` finds all of them.

    Args:
        folder: The run.
        which: `latest`, `best`, or the name of a checkpoint.
        output: Default: a file in the working directory, named after the checkpoint.
        force: Replace an existing file.

    Raises:
        UsageError: There is no such checkpoint, or the file exists or cannot be written.
        ConfigError: The checkpoint is damaged.
        StorageError: The checkpoint cannot be read.
    """
    saved, checkpoint = CheckpointStore(folder.checkpoints), find_checkpoint(folder, which)
    output = output or Path(f"{folder.experiment}_{folder.name}_{checkpoint.name}.safetensors")
    if output.exists() and not force:
        raise UsageError(f"{output} exists; replace it with --force, or name another file with --output")
    weights: Weights = {}
    left_out: list[str] = []
    models = saved.load(checkpoint, whole=False)["models"]
    if lacks_weights(models):
        raise UsageError(
            f"{folder.title} {checkpoint.name} has only trained weights (cfg.tuning.*.save=trained); mlx xp export "
            "--format safetensors builds the others"
        )
    for name, state in models.items():
        _flatten(state, name, weights, left_out)
    temporary = output.with_name(f".{output.name}.{uuid.uuid4().hex[:8]}")
    try:
        with HashingWriter(temporary.open("wb")) as file:
            tensor_files.write_header(file, {name: (item.shape, item.dtype) for name, item in weights.items()})
            tensor_files.write_content(file, map(full, weights.values()))  # one at a time
        temporary.replace(output)
    except OSError as error:
        raise UsageError(f"cannot write {output}: {error.strerror or error}; choose another file") from error
    finally:
        temporary.unlink(missing_ok=True)
    facts = f"{len(weights):,} tensors, {size_text(output.stat().st_size)}"
    rest = f"; left out, because they are not tensors: {', '.join(left_out)}" if left_out else ""
    return f"wrote {output}: {facts}, of {folder.title} {checkpoint.name}{rest}"


def _flatten(value: Any, name: str, weights: Weights, left_out: list[str]) -> None:
    if isinstance(value, torch.Tensor | StoredTensor):
        weights[name] = value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _flatten(item, f"{name}.{key}", weights, left_out)
    else:
        left_out.append(name)
