"""The protocol of strategies. Only for annotations."""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from mlx_runtime.distributed.topology import Topology


class Strategy(Protocol):
    """Spreads models over the workers. Every worker must make each of these calls.

    What this worker does not hold of a model may be on the meta device, so that names and shapes are the same on all.
    """

    topology: Topology
    """The position of this worker, as the constructor received it."""

    notice: str | None
    """A line to show to the user."""

    shards: bool
    """True if workers hold different parts of models, so that norms and states take collectives of all workers."""

    def build(self, node: Mapping[str, Any]) -> Any:
        """Build the group `models` from its node in conf.yaml, with models that are spread over the workers.

        `load_state_dict` of each takes the state of the whole model.
        """
        ...

    def sync_gradients(self, models: Iterable[object], enabled: bool) -> None:
        """Enable or disable the synchronization of gradients by the backward passes that follow."""
        ...

    def drop_gradients(self, models: Iterable[object]) -> None:
        """Drop the gradients that were not synchronized yet, of an update that is abandoned."""
        ...

    def clip_grad_norm_(self, parameters: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
        """Clip the norm of gradients over all parts of a model, and return the norm before clipping."""
        ...

    def scaler(self, *, enabled: bool) -> torch.amp.GradScaler:
        """Return the scaler of losses and gradients for `cfg.precision=fp16`."""
        ...

    def prepare_optimizers(self, optimizers: Mapping[str, Optimizer]) -> None:
        """Prepare optimizers for the parameters of these models. They, too, load the states of whole models."""
        ...

    def consolidate(self, states: dict[str, Any]) -> dict[str, Any]:
        """Return the states of whole models, on rank 0, which stores them. Called only if the strategy `shards`.

        `states` are those of this worker, by group (`models`, `optimizers`, ...) and name. The checkpoint can be loaded
        without the strategy. DTensors may stay as they are: each worker stores its part.
        """
        ...

    def described(self) -> tuple[str, ...]:
        """Return a line for each model that is sharded: how, and the bytes per worker."""
        ...


class StrategyClass(Protocol):
    """A class of strategies, which `cfg.strategy` names."""

    shards: bool
    """See `Strategy`."""

    preloads: tuple[str, ...]
    """Modules that take long to import, and that workers are forked with."""

    def refusal(self, cfg: Any) -> str | None:
        """Return why the strategy cannot train with these settings, or None. A static method, like the next two."""
        ...

    def multiple_of(self, cfg: Any) -> int:
        """Return what the number of workers has to be a multiple of."""
        ...

    def model_parallel_size(self, cfg: Any, workers: int) -> int:
        """Return how many of the workers hold one replica of the models together, and read the same rows.

        They have consecutive ranks. Metrics, weights and the global batch count the rows of each replica once.
        """
        ...

    def __call__(self, cfg: Any, topology: Topology) -> Strategy: ...
