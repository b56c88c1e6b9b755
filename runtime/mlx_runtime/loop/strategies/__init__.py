"""Strategies, which distribute the models of a run across its workers: replicated or sharded."""

STRATEGIES = {
    "ddp": "mlx_runtime.loop.strategies.ddp.DDP",
    "fsdp": "mlx_runtime.companions.sharding.strategy.FSDP",
    "hsdp": "mlx_runtime.companions.sharding.strategy.HSDP",
    "pipeline": "mlx_runtime.companions.fragments.strategy.Pipeline",
}
"""Import paths of strategy classes by name. Other classes are named by their import path in `cfg.strategy`."""
