"""The tensors of a source of weights: listed, compared with another one, and rewritten by rules."""

import json
import math
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mlx_runtime.companions.sharding import tensor_files
from mlx_runtime.companions.sharding.shards import full
from mlx_runtime.companions.surgery.rules import Shape, Transfer
from mlx_runtime.companions.surgery.sources import TENSORS, Weights, read
from mlx_runtime.companions.surgery.transferring import Plan, merged
from mlx_runtime.errors import ConfigError, UsageError
from mlx_runtime.runs.tables import format_number
from mlx_runtime.storage.documents import from_plain_yaml
from mlx_runtime.storage.files import size_text
from mlx_runtime.storage.local import read_regular
from mlx_runtime.storage.publishing import HashingWriter


def rows(one: Weights, other: Weights | None = None) -> list[dict[str, Any]]:
    """Return facts about each tensor of a source and, with another one, what has changed from the first to it."""
    before, after = _tensors(one), _tensors(other) if other is not None else {}
    found = []
    for name in {**before, **after}:
        tensor = full(after.get(name, before.get(name)))
        kind, zeros = str(tensor.dtype).removeprefix("torch."), int((tensor == 0).sum()) / max(1, tensor.numel())
        facts: dict[str, Any] = {"tensor": name, "shape": [*tensor.shape], "dtype": kind}
        facts |= {"norm": _norm(tensor), "zeros": zeros}
        found.append(facts | ({"change": _change(before.get(name), after.get(name))} if other is not None else {}))
    return found


def _tensors(weights: Weights) -> dict[str, Any]:
    """Return all tensors of a source, with the name of the model before theirs if it has one."""
    models = weights.models.items()
    return {f"{model}.{name}".lstrip("."): item for model, found in models for name, item in found.items()}


def _change(before: Any, after: Any) -> str | float:
    """Return the norm of a difference relative to the norm before, or a word."""
    if before is None or after is None:
        return "added" if before is None else "removed"
    if before.shape != after.shape:
        return f"reshaped from {' x '.join(map(str, before.shape))}"
    difference, norm = _norm(full(after), full(before)), _norm(full(before))
    return difference / norm if norm else math.inf if difference else 0.0


def _norm(tensor: torch.Tensor, other: torch.Tensor | None = None) -> float:
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    return float((tensor.to(wide) if other is None else tensor.to(wide) - other.to(wide)).norm())


def cells(row: Mapping[str, Any]) -> dict[str, str]:
    """Return a row as text by column."""
    shape = " x ".join(map(str, row["shape"])) or "scalar"
    text = {**row, "shape": shape, "norm": format_number(row["norm"]), "zeros": f"{row['zeros']:.1%}"}
    if isinstance(change := row.get("change"), float):
        text["change"] = format_number(change)
    return text


def write(source: str, target: str | None, file: Path, output: Path) -> list[str]:
    """Write the weights that the rules in a file make of a source to a new file. Return lines for the user.

    Args:
        source: from `sources.find`.
        target: a source with the tensors that the result has, also from there; None for those that the rules leave.
        file: YAML with `rules`, and `model` if the sources have several.
        output: new file in the format of safetensors, with its sources and the rules in its metadata.

    Raises:
        UsageError: the new file exists or cannot be written, or rules need a target.
        ConfigError: a source or a rule does not fit.
    """
    try:
        node = from_plain_yaml(read_regular(file, ConfigError))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from error
    given = Transfer.parse({**node, "source": source}, str(file))
    if output.suffix != TENSORS or output.exists():
        raise UsageError(f"{output} exists, or does not end with {TENSORS}; choose another name")
    if target is None and (needing := given.of_kinds("fresh", "slice", "pad")):
        raise UsageError(f"{needing[0]} needs the tensors of a model; name one of its checkpoints as OTHER")
    base = read(target) if target is not None else None
    initial = base.of("", given.model) if base is not None else None
    shapes: dict[tuple[str, ...], Shape] = {(name,): tuple(item.shape) for name, item in (initial or {}).items()}
    plan = Plan(given, "", shapes or None)
    like = initial or {names[0]: plan.tensors[0][item.sources[0]] for names, item in plan.treatments.items()}
    facts = {
        "sources": [item.pinned for item in (*plan.sources, *([base] if base else []))],
        "rules": node.get("rules"),
    }
    temporary = output.with_name(f".{output.name}.{uuid.uuid4().hex[:8]}")
    try:
        with HashingWriter(temporary.open("xb")) as stream:
            entries = {name: (item.shape, item.dtype) for name, item in like.items()}
            tensor_files.write_header(stream, entries, surgery=json.dumps(facts))
            for name, item in like.items():
                part = plan.part((name,), item.dtype) or (full(item), tuple(item.shape))
                tensor_files.write_content(stream, [merged(part, full(item))])
        os.link(temporary, output)  # unlike a rename, this never replaces a file
    except OSError as error:
        raise UsageError(f"cannot write {output}: {error.strerror or error}; choose another name") from error
    finally:
        temporary.unlink(missing_ok=True)
    size = size_text(output.stat().st_size)
    return [*plan.lines()[1:], f"wrote     {output}: {len(like):,} tensors, {size}, SHA-256 {stream.sha256}"]
