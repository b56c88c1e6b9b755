"""How the models of a run are spread over its workers: replicated, sharded, or as others program it."""

STRATEGIES = {
    "ddp": "mlx_runtime.training.strategies.ddp.DDP",
    "fsdp": "mlx_runtime.companions.sharding.strategy.FSDP",
    "hsdp": "mlx_runtime.companions.sharding.strategy.HSDP",
}
"""The classes of strategies by name. `cfg.strategy` names others by their import paths."""
