# Written by runtime/stubs.py.
from mlx_runtime.companions.sharding.consolidation import consolidate as consolidate
from mlx_runtime.companions.sharding.layouts import Layouts as Layouts
from mlx_runtime.companions.sharding.shards import Parts as Parts
from mlx_runtime.companions.sharding.shards import ShardedTensors as ShardedTensors
from mlx_runtime.companions.sharding.shards import full as full
from mlx_runtime.companions.sharding.writer import ShardedTensorWriter as ShardedTensorWriter
from mlx_runtime.companions.sharding.writer import StagedPlanner as StagedPlanner
from mlx_runtime.companions.sharding.writer import failure as failure
