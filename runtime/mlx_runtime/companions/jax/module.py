"""`JaxModule`: the base class of experiments in JAX."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn, cast, overload

import jax
import jax.numpy as jnp
import torch
from flax import nnx
from jax.sharding import Mesh

from mlx_runtime.companions.jax.batches import Batches, narrowed, own_rows
from mlx_runtime.companions.jax.states import adapter
from mlx_runtime.companions.jax.strategy import JAX
from mlx_runtime.companions.notebook.arrays import as_tensors
from mlx_runtime.data.batches import Batch, move_tensors
from mlx_runtime.data.loaders import DatasetShard, DatasetShards
from mlx_runtime.errors import MlxError
from mlx_runtime.loop.experiment import BaseModule
from mlx_runtime.runs.checkpoints import groups

groups.adapters.append(adapter)

_MODES = ("deterministic", "use_running_average")


class JaxModule(BaseModule):
    """An experiment in JAX: a `BaseModule` whose loop computes with JAX, on a mesh of the devices of all workers.

    Every worker runs the same loop, and computes its part of each array. Checkpoints include the objects of Flax NNX in
    `models` and `tools` and on the experiment itself, like `self.optimizer = nnx.Optimizer(...)`, and attributes of it
    that are trees of arrays, like `self.opt_state = tx.init(params)`.
    """

    library = "jax"

    @property
    def _strategy(self) -> JAX:
        return cast(JAX, self._session.optimization.strategy)

    @property
    def mesh(self) -> Mesh:
        """The devices of all workers, with the axes of `cfg.mesh`. It is that of all computations in the loop."""
        return self._strategy.mesh

    @overload  # type: ignore[override]
    def generate_loaders(self, dataset_shards: DatasetShards) -> list[Batches]: ...

    @overload
    def generate_loaders(self, dataset_shards: DatasetShard) -> Batches: ...

    def generate_loaders(self, dataset_shards: DatasetShards | DatasetShard) -> list[Batches] | Batches:
        """Return one loader per dataset, in the order of `Datasets`; see `BaseModule.generate_loaders`.

        Returns:
            Re-iterable loaders of `{name: array (rows of all workers, ...)}`, sharded along the axis `data`. All
                have as many rows, because short ones are filled with rows of their own, for which the column `mask`,
                bool (rows,), is False, as in `losses.mean(where=batch["mask"])`.
        """
        strategy, made = self._strategy, super().generate_loaders(dataset_shards)
        return [Batches(item, strategy) for item in made] if isinstance(made, list) else Batches(made, strategy)

    def local(self, batch: Batch, *arrays: jax.Array) -> tuple[torch.Tensor, ...]:
        """Return the rows of this worker, without those that fill up the batch, for metrics. Every worker must call it.

            self.metrics.accuracy.update(*self.local(batch, logits, batch["label"]))

        Args:
            batch: the batch to which the arrays belong.
            arrays: (rows of all workers, ...), as in the batch.

        Returns:
            One tensor for each array, (rows, ...), on the CPU.
        """
        return tuple(own_rows(batch, arrays, self._strategy))

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """Evaluate in a `with` block: metrics and losses reset, all `self.models` in eval mode; see `BaseModule`."""
        with super().evaluation(), _evaluating(self.models):
            yield

    def backward(self, *args: Any, **options: Any) -> NoReturn:
        """Refuse: gradients are JAX's."""
        how = "loss, grads = nnx.value_and_grad(loss_of)(net, batch); optimizer.update(net, grads)"
        raise MlxError(f"self.backward and self.optimizer_step are for torch; in JAX, write: {how}")

    def optimizer_step(self, name: str | None = None) -> NoReturn:
        """Refuse: updates are those of `nnx.Optimizer` or optax."""
        self.backward()

    def _answer(self, batch: Batch) -> Any:
        arrays = move_tensors(batch, lambda item: jnp.asarray(narrowed(item.cpu(), "the batch")))
        with _evaluating(self.models):
            outputs = self.predict(arrays)
        return as_tensors(dict(outputs)) if isinstance(outputs, Mapping) else outputs


@contextlib.contextmanager
def _evaluating(models: Any) -> Iterator[None]:
    """Put models of Flax NNX into eval mode within the block, and each part of them back into its mode after it."""
    found = groups.members(models, nnx.Module).values()
    parts = [part for model in found for _, part in nnx.iter_modules(model)]
    modes = [(part, name, vars(part)[name]) for part in parts for name in _MODES if name in vars(part)]
    for model in found:
        model.eval()
    try:
        yield
    finally:
        for part, name, mode in modes:
            setattr(part, name, mode)
