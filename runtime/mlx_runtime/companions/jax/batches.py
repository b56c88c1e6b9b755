"""Batches as arrays on the mesh, of the same shape on every worker and in every step."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import torch

from mlx_runtime.companions.jax.states import array_of, part_of
from mlx_runtime.companions.jax.strategy import JAX
from mlx_runtime.companions.notebook.arrays import as_tensors
from mlx_runtime.data.batches import Batch
from mlx_runtime.data.loaders import DatasetShard, Loader
from mlx_runtime.distributed.collectives import broadcast
from mlx_runtime.errors import DatasetError, MlxError

MASK = "mask"
"""Column of batches, bool (rows,): False for rows that only fill up a short batch."""


class Batches:
    """Iterable of the batches of a loader: `{name: array (rows of all workers, ...)}`, sharded along `data`.

    All have the same number of rows. Short ones are filled with rows of their own, for which the column `mask` is
    False. Values that are not tensors, like strings, are those of this worker.
    """

    def __init__(self, loader: Loader, strategy: JAX) -> None:
        self._loader, self._strategy = loader, strategy
        self._shapes: dict[str, list[int]] | None = None

    def __len__(self) -> int:
        """Return the number of steps in a whole pass, the same on every worker."""
        return len(self._loader)

    @property
    def updates(self) -> int:
        """Number of updates in a whole pass, which are its steps."""
        return len(self)

    @property
    def batch_size(self) -> int:
        """Rows per worker and step."""
        return self._loader.batch_size

    @property
    def shard(self) -> DatasetShard:
        return self._loader.shard

    def __iter__(self) -> Iterator[Batch]:
        return self._arrays(iter(self._loader))

    def _arrays(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        loader, multiple = self._loader, self._strategy.row_multiple
        if self._strategy.topology.world_size > 1 and not loader.compared:
            loader.compare_rows()
        rows = -(-loader.largest // multiple) * multiple
        with contextlib.closing(batches):  # type: ignore[type-var]  # a generator
            for batch in batches:
                yield self._filled(batch, rows)

    def _filled(self, batch: Batch, rows: int) -> Batch:
        """Return a batch with this number of rows of this worker."""
        if MASK in batch:
            raise DatasetError(f"datasets.{self.shard.name} has a column {MASK!r}, as all batches in JAX do; rename it")
        tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
        self._check_shapes(tensors)
        count, mask = len(next(iter(tensors.values()), range(rows))), None
        if count < rows:
            filled = torch.arange(rows)
            tensors = {name: value[filled % count] for name, value in tensors.items()}
            mask = self._put(MASK, filled < count)
        arrays = {name: self._put(name, value) for name, value in tensors.items()}
        return {**batch, **arrays, MASK: self._strategy.whole_mask(rows) if mask is None else mask}

    def _check_shapes(self, tensors: Batch) -> None:
        """Check that rows have the shapes of the first batch on rank 0, because all of them become one array."""
        if self._strategy.topology.world_size == 1:
            return
        shapes = {name: list(value.shape[1:]) for name, value in tensors.items()}
        if self._shapes is None:
            self._shapes = broadcast(shapes)
        for name in sorted(shapes.keys() | self._shapes.keys()):
            here, first = shapes.get(name), self._shapes.get(name)
            if here != first:
                raise DatasetError(
                    f"datasets.{self.shard.name}: rows of {name!r} have the shape {here} on rank "
                    f"{self._strategy.topology.rank}, and {first} in the first batch of rank 0; several workers need "
                    "rows of one shape, so pad or cut them in the dataset"
                )

    def _put(self, name: str, tensor: torch.Tensor) -> jax.Array:
        return self._strategy.put(narrowed(tensor, f"datasets.{self.shard.name}: {name!r}"))


def narrowed(tensor: torch.Tensor, title: str) -> Any:
    """Return the array of a tensor on the CPU, of the type that it has in JAX: 32 bits, unless x64 is enabled.

    Raises:
        DatasetError: it has integers that do not fit.
    """
    array = array_of(tensor)
    narrow = array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)
    if narrow is not array and array.dtype.kind in "iu" and not np.array_equal(narrow, array):
        raise DatasetError(
            f"{title} has integers that do not fit {narrow.dtype}; make them smaller, or set JAX_ENABLE_X64=1"
        )
    return narrow


def own_rows(batch: Batch, arrays: tuple[Any, ...], strategy: JAX) -> list[torch.Tensor]:
    """Return the rows of this worker in arrays that belong to a batch, without those that fill it up."""
    mask, sharding = batch[MASK], strategy.of_batches
    for array in arrays:
        if array.shape[:1] != mask.shape:
            raise MlxError(
                f"self.local takes arrays with the {len(mask)} rows of the batch, not one of shape {array.shape}"
            )
    whole = mask is strategy.whole_mask(len(mask) // strategy.topology.data_parallel_size)
    rows = slice(None) if whole else part_of(mask)[0]
    found = []
    for array in arrays:
        if array.sharding != sharding and not array.sharding.is_equivalent_to(sharding, array.ndim):
            array = jax.device_put(array, sharding)
        found.append(as_tensors(part_of(array)[0][rows]))
    return found
