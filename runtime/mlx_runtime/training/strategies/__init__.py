"""Strategies, which distribute the models of a run across its workers: replicated or sharded."""

from mlx_runtime.importing import door

STRATEGIES = {
    "ddp": "mlx_runtime.training.strategies.ddp.DDP",
    "fsdp": "mlx_runtime.companions.sharding.strategy.FSDP",
    "hsdp": "mlx_runtime.companions.sharding.strategy.HSDP",
    "pipeline": "mlx_runtime.companions.fragments.strategy.Pipeline",
}
"""Import paths of strategy classes by name. Other classes are named by their import path in `cfg.strategy`."""

__all__, __getattr__ = door(
    __name__,
    aliasing="alias raw",
    base="Strategy StrategyClass",
    blocks="blocks_of repeated_blocks select_modules without_shared",
    building="allocate build_models check_values deferred_models initialize place",
    ddp="DDP",
    recomputation="recompute_blocks",
    selection="own_strategies problems strategy_class strategy_of",
)
