"""The tensors of a source of weights: listed, compared with another one, and rewritten by rules."""

import hashlib
import io
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mlx_runtime.companions.sharding import tensor_files
from mlx_runtime.companions.sharding.shards import full
from mlx_runtime.companions.surgery import rules
from mlx_runtime.companions.surgery.sources import TENSORS, Tensors, Weights, mean, read_alike
from mlx_runtime.errors import ConfigError, UsageError
from mlx_runtime.runs.tables import format_number
from mlx_runtime.storage.documents import from_plain_yaml
from mlx_runtime.storage.files import size_text
from mlx_runtime.storage.local import read_regular, write_atomic
from mlx_runtime.storage.redaction import redact


def tensor_rows(one: Weights, other: Weights | None = None) -> list[dict[str, Any]]:
    """Return facts about each tensor of a source and, with another one, what has changed from the first to it.

    If both have one model, with different names, its tensors are compared by their names in it.
    """
    models = [item.models for item in (one, other) if item is not None]
    alone = max(map(len, models)) == 1 and models[0].keys() != models[-1].keys()
    before, after = (_tensors(item.models if item is not None else {}, alone) for item in (one, other))
    found = []
    for name in {**before, **after}:
        item: Any = after.get(name, before.get(name))
        tensor = _wide(full(item))
        facts: dict[str, Any] = {
            "tensor": name,
            "shape": [*tensor.shape],
            "dtype": str(item.dtype).removeprefix("torch."),
            "norm": float(tensor.norm()),
            "zeros": int((tensor == 0).sum()) / max(1, tensor.numel()),
        }
        found.append(facts | ({"change": _change(before.get(name), after.get(name))} if other is not None else {}))
    return found


def _tensors(models: Mapping[str, Tensors], alone: bool) -> dict[str, Any]:
    """Return tensors by name, with the name of the model before theirs if it has one, unless it is alone."""
    named = ((model, name, item) for model, found in models.items() for name, item in found.items())
    return {name if alone else f"{model}.{name}".lstrip("."): item for model, name, item in named}


def _change(before: Any, after: Any) -> str | float:
    """Return the norm of a difference relative to the norm before, or a word."""
    if before is None or after is None:
        return "added" if before is None else "removed"
    if before.shape != after.shape:
        return f"reshaped from {' x '.join(map(str, before.shape))}"
    old, new = _wide(full(before)), _wide(full(after))
    difference, norm = float((new - old).norm()), float(old.norm())
    return difference / norm if norm else math.inf if difference else 0.0


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def cells(row: Mapping[str, Any]) -> dict[str, str]:
    """Return a row as text by column."""
    text = {
        **row,
        "shape": " x ".join(map(str, row["shape"])) or "scalar",
        "norm": format_number(row["norm"]),
        "zeros": f"{row['zeros']:.1%}",
    }
    if isinstance(change := row.get("change"), float):
        text["change"] = format_number(change)
    return text


def write(source: str, file: Path, output: Path) -> str:
    """Write the weights that the rules in a file make of a source to a new file. Return a line for the user.

    Args:
        source: from `sources.find`.
        file: YAML with `rules` of the kinds `map` and `drop`, and `model` if the source has several.
        output: new file in the format of safetensors, with its source and the rules in its metadata.

    Raises:
        UsageError: the new file exists or cannot be written.
        ConfigError: the source or a rule does not fit.
    """
    try:
        node = from_plain_yaml(read_regular(file, ConfigError))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from error
    if output.suffix != TENSORS:
        raise UsageError(f"{output} does not end with {TENSORS}, the format that is written; choose another name")
    if output.exists():
        raise UsageError(f"{output} exists; choose another name")
    given = rules.parse({"source": source, **node}, file)
    if given.source != source or rules.patterns(given, "fresh", "slice", "pad"):
        raise ConfigError(
            f"{file}: source, fresh, slice and pad are for cfg.transfer; leave them to runs that begin with {output}"
        )
    [weights], [tensors] = read_alike([source], "", given.model)
    named = rules.named(given, tensors, weights.title)
    made = {name: mean(old, [tensors]) for name, (old, _) in named.items()}
    stream, facts = io.BytesIO(), {"sources": [redact(weights.pinned)], "rules": node.get("rules")}
    tensor_files.write(stream, made, surgery=json.dumps(facts))
    try:
        write_atomic(output, stream.getvalue())
    except OSError as error:
        raise UsageError(f"cannot write {output}: {error.strerror or error}; choose another name") from error
    size, sha256 = size_text(output.stat().st_size), hashlib.sha256(stream.getvalue()).hexdigest()
    return f"wrote     {output}: {len(made):,} tensors, {size}, SHA-256 {sha256}"
