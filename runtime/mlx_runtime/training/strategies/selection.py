"""The choice of a strategy: `cfg.strategy` for all models, `Models.strategies = {"net": "ddp"}` for some of them."""

from collections.abc import Mapping
from typing import Any

import torch.distributed

from mlx_runtime.config.targets import object_at
from mlx_runtime.distributed.topology import Topology
from mlx_runtime.errors import ConfigError, suggest
from mlx_runtime.training.strategies.base import Strategy
from mlx_runtime.training.strategies.ddp import DDP

NAMES = ("ddp", "fsdp", "hsdp")
"""Values of `cfg.strategy` and of `Models.strategies`."""


def strategy_of(cfg: Any, topology: Topology, node: Mapping[str, Any] | None) -> Strategy:
    """Return the strategy of a run. `node` is the group `models` in conf.yaml; None if there is none.

    Raises:
        ConfigError: `Models.strategies` names a model or a strategy that does not exist.
    """
    chosen = strategies(cfg, node)
    names = sorted({name for name in chosen.values() if name != "ddp"})
    if not names:
        return DDP(cfg, topology)
    if not torch.distributed.is_initialized():
        return DDP(cfg, topology, f"without workers, models are not sharded: {' and '.join(names)} has no effect")
    from mlx_runtime.training.strategies.sharded import Sharded  # imports torch's FSDP, which takes seconds

    return Sharded(cfg, topology, chosen)


def strategies(cfg: Any, node: Mapping[str, Any] | None) -> dict[str, str]:
    """Return the name of each model's strategy; ConfigError if `Models.strategies` does not fit."""
    models = object_at(node["_target_"]) if node is not None else None
    names = [name for name in node or {} if not name.startswith("_")]
    own = getattr(models, "strategies", {})
    for name, strategy in own.items():
        if name not in names:
            raise ConfigError(f"Models.strategies names {name!r}, which is not a model.{suggest(name, names)}")
        if strategy not in NAMES:
            raise ConfigError(f"Models.strategies[{name!r}] is {strategy!r}.{suggest(str(strategy), NAMES)}")
    return {name: own.get(name, cfg.strategy) for name in names}
