"""Building blocks for custom strategies; see the guide "Extending mlx"."""

from mlx_runtime.distributed.collectives import data_parallel_group, gather
from mlx_runtime.distributed.topology import Topology
from mlx_runtime.errors import ConfigError
from mlx_runtime.loop.strategies import DDP

__all__ = ["DDP", "ConfigError", "Topology", "data_parallel_group", "gather"]
