"""The strategy of a run, which distributes its models across the workers; here `DDP`, which replicates them.

The guide "Extending mlx" explains the protocol, and has an example of another strategy.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from mlx_runtime import companions
from mlx_runtime.config.building import build
from mlx_runtime.config.constructors.targets import object_at
from mlx_runtime.distributed.topology import Topology
from mlx_runtime.errors import ConfigError
from mlx_runtime.events import WorkersStarted
from mlx_runtime.loop.options import strategy_class
from mlx_runtime.runs.checkpoints.groups import members
from mlx_runtime.sections import Fragments, Sharding


class DDP:
    """Averages the gradients of replicas, to which user code applies the wrapper, with `prepare_model`.

    It is the base class of strategies, whose methods all workers call. Those before the constructor are static.

    Attributes:
        shards: True if workers hold different parts of models, so that norms and states need collectives.
        alone: True if it also applies to a process without workers.
        library: library of the models, which must equal `library` of the experiment.
        preloads: modules that are slow to import, to be imported before workers are forked.
        notice: a line for the user, or None.
        topology: the position of this worker.
        described: a line about each sharded model, with its layout and the bytes per worker.
        tuning: what trains, a `surgery.tuning.Tuner`; None without `cfg.tuning`.
    """

    shards = False
    alone = False
    library = "torch"
    preloads: tuple[str, ...] = ()
    notice: str | None = None
    tuning: Any = None

    @staticmethod
    def refusal(cfg: Any) -> str | None:
        """Return the reason why the strategy cannot train with these settings, or None."""
        text = "cfg.sharding.shard_size and cfg.sharding.offload are for cfg.strategy=fsdp; remove them"
        return None if cfg.sharding == Sharding() else text

    @staticmethod
    def multiple_of(cfg: Any) -> int:
        """Return a number that must divide the number of workers."""
        return 1

    @staticmethod
    def model_parallel_size(cfg: Any, workers: int) -> int:
        """Return the number of workers with consecutive ranks that share one replica of the models."""
        return 1

    def __init__(self, cfg: Any, topology: Topology) -> None:
        self.cfg, self.topology = cfg, topology
        self.described: list[str] = []

    @contextlib.contextmanager
    def connected(self) -> Iterator[None]:
        """Connect the workers within the block, if that takes more than torch's process group.

        Raises:
            ConfigError: there is no GPU for `cfg.use_gpu=true`.
        """
        if self.cfg.use_gpu and self.topology.device.type == "cpu":
            hint = "mlx doctor lists the devices that torch finds; cfg.use_gpu=null uses GPUs only if there are any"
            raise ConfigError(f"cfg.use_gpu=true, but rank {self.topology.rank} has no GPU that torch can use; {hint}")
        yield

    def build(self, node: Mapping[str, Any]) -> Any:
        """Build the group `models` from its node in conf.yaml, with models distributed across the workers."""
        kind, recomputed = object_at(node["_target_"]), self.cfg.activation_checkpointing
        if recomputed or hasattr(kind, "deferred_init") or hasattr(kind, "strategies"):
            group = companions.part("sharding.building").build_replicated(node, recomputed)
        else:
            group = build(node, "models")
        self.place(members(group, nn.Module))
        return group

    def started(self, models: Any) -> WorkersStarted:
        """Return the event about the start of the workers, with the parameters of the group `models`."""
        topology = self.topology
        parameters = [item for model in members(models, nn.Module).values() for item in model.parameters()]
        total = sum(item.numel() for item in parameters)
        trained = sum(item.numel() for item in parameters if item.requires_grad)
        device = str(topology.device) if topology.device.type == "cpu" else torch.cuda.get_device_name(topology.device)
        return WorkersStarted(device, total, topology.world_size, tuple(self.described), trained)

    def place(self, models: Mapping[str, nn.Module]) -> None:
        """Move models that were built whole to the device."""
        for model in models.values():
            model.to(self.topology.device)

    def sync_gradients(self, models: Iterable[object], enabled: bool) -> None:
        """Enable or disable the synchronization of gradients in the following backward passes."""
        for model in models:
            if isinstance(model, DistributedDataParallel):
                model.require_backward_grad_sync = enabled  # like `no_sync`, which is a context manager

    def drop_gradients(self, models: Iterable[object]) -> None:
        """Drop the unsynchronized gradients of an abandoned update. DDP has none besides those of the parameters."""

    def clip_grad_norm_(self, parameters: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
        """Clip the norm of gradients over all parts of a model, and return the norm before clipping."""
        return nn.utils.clip_grad_norm_(parameters, max_norm)

    def scaler(self, *, enabled: bool) -> torch.amp.GradScaler:
        """Return the scaler of losses and gradients for `cfg.precision=fp16`."""
        return torch.amp.GradScaler(self.topology.device.type, enabled=enabled)

    def prepare_optimizers(self, optimizers: Mapping[str, Optimizer]) -> None:
        """Prepare optimizers for the parameters of these models."""

    def state_dict(self, models: dict[str, Any]) -> dict[str, Any]:
        """Return entries for a checkpoint: the states of models, given by name, and those of the strategy itself.

        Rank 0 calls this; with `shards` or sharded models, all workers do.
        """
        if self.tuning is None:
            return {"models": models}
        return {"models": self.tuning.without_frozen(models), "tuning": self.tuning.passes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the entries of the strategy itself from the state of a checkpoint, which may lack them."""
        if self.tuning is not None:
            self.tuning.passes = state.get("tuning", 0)

    def consolidate(self, states: dict[str, Any]) -> dict[str, Any]:
        """Return the states of whole models on rank 0, given this worker's states by group and name."""
        return states


def strategy_names(cfg: Any, node: Mapping[str, Any] | None) -> set[str]:
    """Return the strategies of a run: `cfg.strategy`, and those of single models in `Models.strategies`."""
    if node is None or not getattr(object_at(node["_target_"]), "strategies", None):
        return {cfg.strategy}
    return {cfg.strategy, *companions.part("sharding.building").own_strategies(node, cfg).values()}


def strategy_of(cfg: Any, topology: Topology, node: Mapping[str, Any] | None) -> DDP:
    """Return the strategy of a run. `node` is the group `models` in conf.yaml, or None without such a group."""
    kinds = {name: strategy_class(name) for name in sorted(strategy_names(cfg, node))}
    others = " and ".join(name for name, kind in kinds.items() if kind is not DDP)
    if torch.distributed.is_initialized() or kinds[cfg.strategy].alone:
        kind = next((item for item in kinds.values() if item.shards), kinds[cfg.strategy])
        topology = replace(topology, model_parallel_size=kind.model_parallel_size(cfg, topology.world_size))
        if cfg.replicas.every or cfg.replicas.traffic:
            topology = companions.part("fragments.replicas").topology_of(cfg, topology)
        made = kind(cfg, topology)
    else:
        made = DDP(cfg, topology)
        made.notice = f"without workers, models are whole: {others} has no effect" if others else None
    if cfg.fragments != Fragments() and "pipeline" not in kinds:
        made.notice = "cfg.fragments has no effect without cfg.strategy=pipeline"
    return made
