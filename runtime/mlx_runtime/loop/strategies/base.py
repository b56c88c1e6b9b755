"""The protocol of strategies. Only for annotations."""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from mlx_runtime.distributed.topology import Topology


class Strategy(Protocol):
    """Distributes models across the workers. Every worker must make each of these calls.

    Parts of a model that this worker does not hold may be on the meta device, so that names and shapes are the same on
    all workers.

    A strategy that owns the backward pass has an attribute `schedule` with a method like
    `companions/fragments/schedules.py: Schedule.step`, which `BaseModule.forward_backward` calls. One that records
    numbers of its own has a method `observe(session)`, called once before training.
    """

    topology: Topology
    """The position of this worker, as passed to the constructor."""

    notice: str | None
    """A line for the user, or None."""

    shards: bool
    """True if workers hold different parts of models, so that norms and states need collectives of all workers."""

    def model_parallel_size(self, cfg: Any, workers: int) -> int:
        """See `StrategyClass`."""
        ...

    def build(self, node: Mapping[str, Any]) -> Any:
        """Build the group `models` from its node in conf.yaml, with models distributed across the workers.

        `load_state_dict` of each model must accept the state of the whole model.
        """
        ...

    def sync_gradients(self, models: Iterable[object], enabled: bool) -> None:
        """Enable or disable the synchronization of gradients in the following backward passes."""
        ...

    def drop_gradients(self, models: Iterable[object]) -> None:
        """Drop the unsynchronized gradients of an abandoned update."""
        ...

    def clip_grad_norm_(self, parameters: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
        """Clip the norm of gradients over all parts of a model, and return the norm before clipping."""
        ...

    def scaler(self, *, enabled: bool) -> torch.amp.GradScaler:
        """Return the scaler of losses and gradients for `cfg.precision=fp16`."""
        ...

    def prepare_optimizers(self, optimizers: Mapping[str, Optimizer]) -> None:
        """Prepare optimizers for the parameters of these models. They must also accept the states of whole models."""
        ...

    def consolidate(self, states: dict[str, Any]) -> dict[str, Any]:
        """Return the states of whole models on rank 0, which stores them. Called only if the strategy `shards`.

        `states` are the states of this worker, by group (`models`, `optimizers`, ...) and name. Whole states can be
        loaded without the strategy. DTensors may stay as they are, because each worker stores its part.
        """
        ...

    def described(self) -> tuple[str, ...]:
        """Return a line about each sharded model, with its layout and the bytes per worker."""
        ...


class StrategyClass(Protocol):
    """A class of strategies, named by `cfg.strategy`."""

    shards: bool
    """See `Strategy`."""

    preloads: tuple[str, ...]
    """Modules that are slow to import, to be imported before workers are forked."""

    def refusal(self, cfg: Any) -> str | None:
        """Return the reason why the strategy cannot train with these settings, or None.

        A static method, like the next two.
        """
        ...

    def multiple_of(self, cfg: Any) -> int:
        """Return a number that must divide the number of workers."""
        ...

    def model_parallel_size(self, cfg: Any, workers: int) -> int:
        """Return the number of workers that share one replica of the models, and read the same rows.

        They have consecutive ranks. Metrics, weights and the global batch count the rows of each replica once.
        """
        ...

    def __call__(self, cfg: Any, topology: Topology) -> Strategy: ...
