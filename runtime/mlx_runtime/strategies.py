"""Building blocks for custom strategies; see the guide "Extending mlx"."""

from mlx_runtime.distributed import Topology, data_parallel_group, gather
from mlx_runtime.errors import ConfigError
from mlx_runtime.training.strategies import DDP, Strategy, StrategyClass

__all__ = ["DDP", "ConfigError", "Strategy", "StrategyClass", "Topology", "data_parallel_group", "gather"]
