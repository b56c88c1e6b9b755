"""Datasets in conf.yaml: their nodes, and their construction in each process."""

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from mlx_runtime import companions
from mlx_runtime.config.constructors.declarations import is_hf_dataset, returns_hf_dataset
from mlx_runtime.config.constructors.targets import object_at
from mlx_runtime.distributed.randomness import temporary_seed


def dataset_nodes(tree: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the nodes of datasets in conf.yaml, by name."""
    nodes = tree.get("datasets", {}).items()
    return {name: node for name, node in nodes if isinstance(node, dict) and "_target_" in node}


def stream_names(tree: Mapping[str, Any]) -> list[str]:
    """Return the names of the datasets that are streams of Ray Data."""
    return [name for name, node in dataset_nodes(tree).items() if hasattr(object_at(node["_target_"]), "to_ray")]


@contextlib.contextmanager
def construction(node: Mapping[str, Any] | None, seed: int) -> Iterator[None]:
    """Seed the construction of a dataset within the block, so that random data is the same in all processes.

    Only one process on a machine at a time loads a Hugging Face dataset.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(temporary_seed(seed))
        if node is not None and loads_hf(object_at(node["_target_"])):
            stack.enter_context(companions.part("hub.datasets").loading_lock(node))
        yield


def loads_hf(target: Any) -> bool:
    """Return True if a class or function returns a Hugging Face dataset, or an object with `to_hf()`."""
    return hasattr(target, "to_hf") or is_hf_dataset(getattr(target, "__self__", None)) or returns_hf_dataset(target)


def adopt_dataset(dataset: Any, name: str, node: Mapping[str, Any] | None = None) -> Any:
    """Return the rows of a Hugging Face dataset, or of one with `to_hf()`, as loaders read them; others are unchanged.

    Args:
        dataset: the object in `Datasets`.
        name: its name there.
        node: its node in conf.yaml.

    Raises:
        DatasetError: it has several splits, or `to_hf()` returns something else.
    """
    if "datasets" not in sys.modules and not hasattr(type(dataset), "to_hf"):
        return dataset
    return companions.part("hub.datasets").adopt_dataset(dataset, name, node)
