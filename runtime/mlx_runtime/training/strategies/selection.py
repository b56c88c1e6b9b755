"""The choice of a strategy: `cfg.strategy` for all models, `Models.strategies = {"net": "ddp"}` for some of them."""

from collections.abc import Mapping
from typing import Any

import torch.distributed

from mlx_runtime import companions
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
    chosen = strategies(node, cfg.sharding.shard_size)
    names = sorted({cfg.strategy, *chosen.values()} - {"ddp"})
    if not names:
        return DDP(cfg, topology)
    if not torch.distributed.is_initialized():
        return DDP(cfg, topology, f"without workers, models are not sharded: {' and '.join(names)} has no effect")
    strategy: Strategy = companions.part("sharding.strategy").Sharded(cfg, topology, chosen)
    return strategy


def strategies(node: Mapping[str, Any] | None, shard_size: int | None) -> dict[str, str]:
    """Return the strategies of the models that have their own; ConfigError if there is no such strategy."""
    own = dict(getattr(object_at(node["_target_"]), "strategies", {})) if node is not None else {}
    for name, strategy in own.items():
        title = f"Models.strategies[{name!r}] is {strategy!r}"
        if strategy not in NAMES:
            raise ConfigError(f"{title}.{suggest(str(strategy), NAMES)}")
        if strategy == "hsdp" and shard_size is None:
            raise ConfigError(
                f"{title}, which needs cfg.strategy=hsdp and cfg.sharding.shard_size; name the others instead"
            )
    return own
