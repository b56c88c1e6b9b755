"""Reads the blocks of a stream that are assigned to this worker."""

from collections.abc import Iterator, Sequence
from typing import Any

import ray
import ray.exceptions
import torch

from mlx_runtime.data.assigner import BlockAssigner, Share
from mlx_runtime.data.batches import Batch
from mlx_runtime.data.sampling import ShardPlan, WorkerPass, shuffled_share
from mlx_runtime.data.streams import columns_of, dataset_error
from mlx_runtime.errors import DatasetError

WINDOW_ROWS = 1024
"""Rows of a stream in one share, which are shuffled among each other for training."""


MAX_SEED = 2**31
"""Ray Data takes seeds of 32 bits and counts up from them."""


class StreamReader:
    """Reads the rows that are assigned to this worker. All loaders of a dataset share one, which counts its passes.

    Args:
        assigner: A `BlockAssigner`, or an actor that is one.
        name: Name of the dataset.
    """

    window_rows = WINDOW_ROWS
    advice = "prepare it once with --prepare-batches"

    def __init__(self, assigner: Any, name: str) -> None:
        self._assigner, self._name = assigner, name
        self._passes = 0

    def rows(self) -> int:
        if isinstance(self._assigner, BlockAssigner):
            return self._assigner.rows()
        return int(self._get(self._assigner.rows.remote()))

    def close(self) -> None:
        """Stop an assigner of this process; an actor ends with the workers."""
        if isinstance(self._assigner, BlockAssigner):
            self._assigner.close()

    def batches(self, part: WorkerPass) -> Iterator[Batch]:
        self._passes += 1
        plan, rank, seed = part.plan, part.rank, part.epoch_seed
        sizes = iter(plan.sizes(rank))
        size, number, buffer = next(sizes, None), 0, _Buffer()
        for index, share in enumerate(self._shares(plan, rank, seed % MAX_SEED if part.shuffle else None)):
            columns = _concatenated(
                [columns_of(ray.get(block), start, stop, self._name) for block, start, stop in share]
            )
            if part.shuffle:
                order = shuffled_share(len(next(iter(columns.values()))), seed, rank, index)
                columns = {key: column[order] for key, column in columns.items()}
            buffer.add(columns)
            while size is not None and buffer.rows >= size:
                batch = buffer.take(size)
                if number >= part.skip:
                    yield batch
                size, number = next(sizes, None), number + 1
        if number < plan.steps:
            raise DatasetError(
                f"datasets.{self._name} was iterated again before this pass had ended; "
                "read a stream of Ray Data with one loader at a time"
            )

    def _shares(self, plan: ShardPlan, rank: int, seed: int | None) -> Iterator[Share]:
        """Yield the shares of this worker, requesting the next while one is read."""
        arguments = (self._passes, plan, rank, seed)
        if isinstance(self._assigner, BlockAssigner):
            while (share := self._assigner.take(*arguments)) is not None:
                yield share
            return
        coming = self._assigner.take.remote(*arguments)
        while (share := self._get(coming)) is not None:
            coming = self._assigner.take.remote(*arguments)
            yield share

    def _get(self, reference: Any) -> Any:
        """Return what the actor returned.

        Raises:
            MlxError: The actor raised an exception, or was lost.
        """
        try:
            return ray.get(reference)
        except ray.exceptions.RayError as error:
            raise dataset_error(error, f"datasets.{self._name} cannot be read") from error


class _Buffer:
    """Rows that do not fill a batch yet."""

    def __init__(self) -> None:
        self.rows = 0
        self._columns: Batch = {}

    def add(self, columns: Batch) -> None:
        self._columns = _concatenated([self._columns, columns]) if self.rows else columns
        self.rows = len(next(iter(self._columns.values())))

    def take(self, size: int) -> Batch:
        batch = {key: column[:size] for key, column in self._columns.items()}
        self._columns = {key: column[size:] for key, column in self._columns.items()}
        self.rows -= size
        return batch


def _concatenated(parts: Sequence[Batch]) -> Batch:
    if len(parts) == 1:
        return parts[0]
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
