"""How the models of a run are spread over its workers: replicated by `ddp`, sharded by `fsdp` and `hsdp`."""

from mlx_runtime.training.strategies.base import Strategy
from mlx_runtime.training.strategies.ddp import DDP
from mlx_runtime.training.strategies.selection import strategy_of

__all__ = ["DDP", "Strategy", "strategy_of"]
