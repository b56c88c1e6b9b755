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
    """Reads the rows that a `BlockAssigner`, or an actor that is one, assigns to this worker.

    All loaders of a dataset share one, which counts its passes.
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
        sizes = plan.sizes(rank)
        number, waiting = 0, 0
        columns: Batch = {}
        for index, share in enumerate(self._shares(plan, rank, seed % MAX_SEED if part.shuffle else None)):
            blocks = [columns_of(ray.get(block), start, stop, self._name) for block, start, stop in share]
            new = _concatenated(blocks)
            if part.shuffle:
                order = shuffled_share(_rows(new), seed, rank, index)
                new = {key: column[order] for key, column in new.items()}
            columns = _concatenated([columns, new]) if waiting else new
            waiting = _rows(columns)
            while number < len(sizes) and waiting >= sizes[number]:
                if number >= part.skip:
                    yield {key: column[: sizes[number]] for key, column in columns.items()}
                columns = {key: column[sizes[number] :] for key, column in columns.items()}
                waiting, number = waiting - sizes[number], number + 1
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
        """Return what the actor returned. Raises MlxError if it raised an exception, or was lost."""
        try:
            return ray.get(reference)
        except ray.exceptions.RayError as error:
            raise dataset_error(error, f"datasets.{self._name} cannot be read") from error


def _rows(columns: Batch) -> int:
    return len(next(iter(columns.values())))


def _concatenated(parts: Sequence[Batch]) -> Batch:
    if len(parts) == 1:
        return parts[0]
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
