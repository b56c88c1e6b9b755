"""Public types of datasets: `Batched`, and for annotations, the shards passed to `worker_loop` and their loaders."""

from typing import TYPE_CHECKING

from mlx_runtime.data.loaders import DatasetShard, DatasetShards, Loader
from mlx_runtime.importing import imports_on_use

if TYPE_CHECKING:
    from mlx_runtime.companions.hub.datasets import Batched

__all__ = ["Batched", "DatasetShard", "DatasetShards", "Loader"]

__getattr__ = imports_on_use(__name__, {"Batched": "mlx_runtime.companions.hub.datasets"})
