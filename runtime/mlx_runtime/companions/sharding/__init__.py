"""Models sharded by FSDP2, and their checkpoints, written and read in parts."""

from mlx_runtime.importing import door

__all__, __getattr__ = door(
    __name__,
    "commands tensor_files",
    consolidation="consolidate",
    layouts="Layouts",
    saving="save_checkpoint",
    shards="Parts ShardedTensors full",
)
