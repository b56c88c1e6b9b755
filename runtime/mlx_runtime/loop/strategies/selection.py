"""The choice of a strategy: `cfg.strategy` for all models, `Models.strategies = {"net": "ddp"}` for some of them."""

from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch.distributed

from mlx_runtime import companions
from mlx_runtime.config.constructors.targets import named_class, object_at
from mlx_runtime.distributed.topology import Topology
from mlx_runtime.errors import ConfigError, suggest
from mlx_runtime.loop.strategies import STRATEGIES
from mlx_runtime.loop.strategies.ddp import DDP
from mlx_runtime.sections import Replicas

if TYPE_CHECKING:
    from mlx_runtime.loop.strategies.base import Strategy, StrategyClass


def strategy_class(name: str) -> "StrategyClass":
    """Return the class of a strategy, given its name or import path; raise ConfigError if there is none."""
    needs = ("refusal", "multiple_of", "model_parallel_size", "build", "consolidate")
    found: StrategyClass = named_class("strategy", name, STRATEGIES, needs)
    return found


def problems(cfg: Any) -> list[str]:
    """Return one line per setting that `cfg.strategy` cannot train with."""
    kind = strategy_class(cfg.strategy)
    if reason := kind.refusal(cfg):
        return [f"cfg.strategy={cfg.strategy} cannot train this: {reason}"]
    found = companions.part("fragments.replicas").problems(cfg) if cfg.replicas != Replicas() else []
    size = kind.multiple_of(cfg)
    for name in ("start_workers", "elastic.min_workers", "elastic.max_workers"):
        workers = attrgetter(name)(cfg)
        if size > 1 and workers is not None and workers % size:
            below = workers - workers % size
            fitting = f"{below} or {below + size}" if below else str(size)
            found.append(
                f"cfg.{name}={workers} is not a multiple of {size}, as cfg.strategy={cfg.strategy} needs; use {fitting}"
            )
    return found


def strategy_of(cfg: Any, topology: Topology, node: Mapping[str, Any] | None) -> "Strategy":
    """Return the strategy of a run. `node` is the group `models` in conf.yaml, or None without such a group."""
    names = sorted({cfg.strategy, *own_strategies(node, cfg).values()})
    kinds = {name: strategy_class(name) for name in names}
    others = " and ".join(name for name in names if kinds[name] is not DDP)
    if not torch.distributed.is_initialized():
        return DDP(cfg, topology, f"without workers, models are whole: {others} has no effect" if others else None)
    kind = next((item for item in kinds.values() if item.shards), kinds[cfg.strategy])
    topology = replace(topology, model_parallel_size=kind.model_parallel_size(cfg, topology.world_size))
    if cfg.replicas.every or cfg.replicas.traffic:
        topology = companions.part("fragments.replicas").topology_of(cfg, topology)
    return kind(cfg, topology)


def own_strategies(node: Mapping[str, Any] | None, cfg: Any) -> dict[str, str]:
    """Return the strategies of models in `Models.strategies`; raise ConfigError if there is no such strategy."""
    own = dict(getattr(object_at(node["_target_"]), "strategies", {})) if node is not None else {}
    if own and cfg.strategy not in STRATEGIES:
        raise ConfigError(f"Models.strategies is for {', '.join(STRATEGIES)}, and cfg.strategy is {cfg.strategy}")
    for name, strategy in own.items():
        title = f"Models.strategies[{name!r}] is {strategy!r}"
        if strategy not in STRATEGIES:
            raise ConfigError(f"{title}.{suggest(str(strategy), STRATEGIES)}")
        for setting in strategy_class(strategy).needs:  # type: ignore[attr-defined]  # ours have it
            if attrgetter(setting)(cfg) is None:
                with_it = f"cfg.strategy={strategy} and cfg.{setting}"
                raise ConfigError(f"{title}, which needs {with_it}; name the others instead")
    return own
