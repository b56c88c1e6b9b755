"""Origins of the columns of an export: the function that makes them from samples, and tokenizers."""

import contextlib
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from mlx_runtime.companions.serving.loading import by_preference
from mlx_runtime.errors import USER_ERRORS
from mlx_runtime.loop.experiment import BaseModule
from mlx_runtime.runs.checkpoints.groups import members


def origin(experiment: BaseModule, nodes: Mapping[str, Any], project: Path) -> str | None:
    """Return the function that makes batches from samples, like `Digits.ray_map_batches of src/datasets.py, line 40`.

    None if the dataset cannot be constructed here.
    """
    if (dataset := _dataset(experiment, nodes)) is None:
        return None
    cls = type(dataset)
    method = next((name for name in ("ray_map_batches", "collate") if hasattr(dataset, name)), "__getitem__")
    function = getattr(dataset, method, None)
    if not inspect.isroutine(function):  # a callable object, like a data collator
        return f"`{cls.__name__}.{method}`, a {type(function).__name__}, of {_position(cls, project)}"
    return f"`{cls.__name__}.{method}` of {_position(function, project)}"


def tokenizers(experiment: BaseModule, nodes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tokenizers and processors among tools and the attributes of a dataset, by name."""
    held = members(experiment.tools) | getattr(_dataset(experiment, nodes), "__dict__", {})
    return {name.strip("_"): item for name, item in held.items() if _is_tokenizer(item)}


def _dataset(experiment: BaseModule, nodes: Mapping[str, Any]) -> Any:
    """Return the first dataset that can be constructed; the data of others may not be on this machine."""
    for name in by_preference(nodes.get("datasets", {})):
        if not name.startswith("_"):
            with contextlib.suppress(*USER_ERRORS):
                return getattr(experiment.datasets, name)
    return None


def _is_tokenizer(item: Any) -> bool:
    return callable(getattr(item, "save_pretrained", None)) and not isinstance(item, nn.Module | type)


def _position(item: Any, project: Path) -> str:
    try:
        file, line = Path(inspect.getsourcefile(item) or "").resolve(), inspect.getsourcelines(item)[1]
    except (OSError, TypeError):
        return f"module `{getattr(item, '__module__', None)}`"
    if file.is_relative_to(project.resolve()):
        return f"`{file.relative_to(project.resolve())}`, line {line}"
    return f"module `{item.__module__}`"
