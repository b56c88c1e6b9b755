"""Types for annotations: the shards of datasets that `worker_loop` receives, and their loaders; and a dataset."""

from typing import TYPE_CHECKING, Any

from mlx_runtime.data.loaders import DatasetShard, DatasetShards, Loader

if TYPE_CHECKING:
    from mlx_runtime.data.huggingface import Batched

__all__ = ["Batched", "DatasetShard", "DatasetShards", "Loader"]


def __getattr__(name: str) -> Any:
    if name != "Batched":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from mlx_runtime.data.huggingface import Batched

    return Batched
