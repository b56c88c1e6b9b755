"""Types for annotations: the shards of datasets that `worker_loop` receives, and their loaders."""

from mlx_runtime.data.loaders import DatasetShard, DatasetShards, Loader

__all__ = ["DatasetShard", "DatasetShards", "Loader"]
