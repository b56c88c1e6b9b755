# Written by runtime/stubs.py.
from mlx_runtime.companions.sharding.consolidation import consolidate as consolidate
from mlx_runtime.companions.sharding.layouts import Layouts as Layouts
from mlx_runtime.companions.sharding.saving import save_checkpoint as save_checkpoint
from mlx_runtime.companions.sharding.shards import Parts as Parts
from mlx_runtime.companions.sharding.shards import ShardedTensors as ShardedTensors
from mlx_runtime.companions.sharding.shards import full as full
