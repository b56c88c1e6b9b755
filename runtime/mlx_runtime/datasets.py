"""Types for annotations: the shards of datasets that `worker_loop` receives, and their loaders; and a dataset."""

from mlx_runtime.data.huggingface import Batched
from mlx_runtime.data.loaders import DatasetShard, DatasetShards, Loader

__all__ = ["Batched", "DatasetShard", "DatasetShards", "Loader"]
