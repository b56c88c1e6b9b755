"""Find the prepared datasets that match a config, and write missing ones."""

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import IterableDataset

from mlx_runtime import companions
from mlx_runtime.companions.prepared.columns import column_writer
from mlx_runtime.companions.prepared.fingerprints import SAMPLE, Candidate, schema_of, some_rows
from mlx_runtime.companions.prepared.store import Manifest, PreparedSet, Store
from mlx_runtime.data.batches import Batch, BatchReader, dataset_error, rows_of
from mlx_runtime.data.readers import IterableReader, MapReader, Reader, ReadingProcesses
from mlx_runtime.data.sampling import LOADER_ARGUMENTS, ShardPlan, WorkerPass
from mlx_runtime.errors import USER_ERRORS, DatasetError, MlxError, short_message
from mlx_runtime.workers.placement import usable_cores

CALL_BYTES = 8 << 20
"""Approximate size of the batches that are written."""

STREAMED_ROWS = 64
"""Rows of these batches for streams of Ray Data, whose rows may be large."""

NOT_WORTH_A_PROCESS_S = 5.0
"""Duration of the work of one reading process."""

Progress = Callable[[str, int, int], None]
"""Called with the name of a dataset, the number of finished rows, and the total number."""


def find(
    candidates: Sequence[Candidate],
    root: str,
    tell: Callable[[str], None],
    ray_needed: Callable[[], object] = lambda: None,
) -> dict[str, PreparedSet]:
    """Return the prepared datasets in a store that match the datasets of a config, by name in `Datasets`.

    The driver constructs a dataset only if there is a prepared one with the same code and arguments. Before a
    stream of Ray Data is created, `ray_needed` must start Ray unless it is running; otherwise Ray would start itself,
    or join another Ray on this machine. `tell` is called with lines for the user.
    """
    store = Store(root)
    names = store.names()
    prepared = {}
    for candidate in candidates:
        manifests = [store.find(name) for name in names if name.startswith(f"{candidate.cls.__name__}-")]
        of_arguments = [item for item in manifests if item and candidate.describes(item)]
        is_current = any(item.name.startswith(candidate.prefix) for item in of_arguments)
        is_damaged = not is_current and any(store.is_damaged(n) for n in names if n.startswith(candidate.prefix))
        if candidate.refusal or not (of_arguments or is_damaged):
            continue
        title = f"datasets.{candidate.name}: its prepared dataset"
        unused = f"{title} is {{}}; reading samples. Prepare again with --prepare-batches"
        if not is_current:
            tell(unused.format("damaged" if is_damaged else "stale because its code changed"))
            continue
        if candidate.streamed:
            ray_needed()
        try:
            dataset = candidate.make()
            name = candidate.full_name(dataset)
            manifest = store.find(name)
        except Exception as error:  # workers may be able to construct it
            tell(f"{title} is not used: {short_message(error)}")
            continue
        if manifest is None:
            tell(unused.format("damaged" if store.is_damaged(name) else "stale because its data changed"))
            continue
        prepared[candidate.name] = PreparedSet(root, manifest, _attributes(dataset))
    return prepared


def make(
    candidates: Sequence[Candidate], root: str, tell: Callable[[str], None], progress: Progress
) -> dict[str, PreparedSet]:
    """Prepare all datasets of a config that are not prepared yet. For streams, Ray must be running.

    Raises:
        DatasetError: A dataset cannot be prepared; the message explains how to fix it.
        StorageError: The store cannot be written.
    """
    store = Store(root)
    prepared = {}
    with contextlib.ExitStack() as uses:
        for candidate in candidates:
            if candidate.refusal:
                tell(f"datasets.{candidate.name} is not prepared: {candidate.refusal}")
                continue
            started = time.monotonic()
            try:
                dataset = candidate.make()
                name = candidate.full_name(dataset)
                manifest = store.find(name)
                if manifest is None:
                    manifest = _write(candidate, dataset, store, name, progress)
                    size = f"{manifest.rows:,} rows, {manifest.size_bytes / 1e6:,.1f} MB"
                    tell(f"datasets.{candidate.name} is prepared: {size} in {time.monotonic() - started:.1f} s")
            except MlxError:
                raise
            except USER_ERRORS as error:
                raise dataset_error(error, f"datasets.{candidate.name} cannot be prepared") from error
            uses.enter_context(store.mark_used(name))  # preparing the others may take hours
            prepared[candidate.name] = PreparedSet(root, manifest, _attributes(dataset))
    return prepared


def _write(candidate: Candidate, dataset: Any, store: Store, name: str, progress: Progress) -> Manifest:
    """Write a dataset to a folder of a store, as the loader of one worker reads it."""
    sample: Batch = {}
    numbers: list[int] = []  # rows of the sample
    with contextlib.ExitStack() as stack:
        if candidate.streamed:
            streams = companions.part("ray.stream_reader")  # here, because it imports Ray
            assigner = streams.StreamAssigner(candidate.node, candidate.name, candidate.seed, candidate.project)
            reader: Reader = streams.StreamReader(assigner, candidate.name)
            per_call = STREAMED_ROWS
            stack.callback(assigner.close)
        else:
            rows = rows_of(dataset, candidate.name)
            started = time.monotonic()
            sample = candidate.sample(dataset, rows)
            expected_s = (time.monotonic() - started) / SAMPLE * rows
            streamed = isinstance(dataset, IterableDataset)
            numbers = list(range(SAMPLE)) if streamed else some_rows(rows)
            if not streamed:
                _check(sample, candidate, dataset, rows)
            row_bytes = sum(column[0].numel() * column.element_size() for column in sample.values())
            per_call = max(1, min(CALL_BYTES // max(1, row_bytes), math.ceil(rows / 100)))
            processes = min(usable_cores(), int(expected_s / NOT_WORTH_A_PROCESS_S))
            kind = IterableReader if streamed else MapReader
            # Processes would share the positions in files that `dataset` has opened by now.
            unread = candidate.make() if processes else dataset
            reader = kind(unread, candidate.name, ReadingProcesses(processes))
        rows = reader.rows()
        if rows == 0:
            raise DatasetError(f"datasets.{candidate.name} has no rows")
        batches = reader.batches(WorkerPass(ShardPlan(rows, 1, per_call), 0, 0, 0, candidate.seed, False))
        first = next(iter(batches))
        schema, done = candidate.tensors(first), 0
        target, arguments = candidate.node["_target_"], candidate.arguments
        writer = stack.enter_context(column_writer(store, name, rows, first, dataset=target, arguments=arguments))
        for batch in itertools.chain([first], batches):
            count = len(next(iter(batch.values())))
            candidate.check_schema(schema, schema_of(batch), f"{done} to {done + count - 1}")
            known = [index for index, row in enumerate(numbers) if done <= row < done + count]
            written = [numbers[index] - done for index in known]
            if known and not _alike(_rows_at(sample, known), _rows_at(batch, written)):
                raise candidate.error("a row changes when it is read again")
            writer.write(batch)
            done += count
            progress(candidate.name, done, rows)
        return writer.commit()


def _check(sample: Batch, candidate: Candidate, dataset: Any, rows: int) -> None:
    """Raise a DatasetError if the rows of a sample differ when read again, or when stacked into one batch."""
    if not _alike(sample, candidate.sample(dataset, rows)):
        raise candidate.error("a row changes each time it is read")
    if not _alike(sample, BatchReader(dataset, candidate.name).read(some_rows(rows))):
        raise candidate.error("a row changes when it is batched with others")


def _rows_at(batch: Batch, rows: list[int]) -> Batch:
    return {key: column[rows] for key, column in batch.items()}


def _alike(one: Batch, other: Batch) -> bool:
    """Return True if two batches have equal rows, up to rounding."""
    return schema_of(one) == schema_of(other) and all(
        torch.allclose(_widen(column), _widen(other[key]), rtol=1e-4, atol=1e-6, equal_nan=True)
        if column.is_floating_point() or column.is_complex()
        else torch.equal(column, other[key])
        for key, column in one.items()
    )


def _widen(column: torch.Tensor) -> torch.Tensor:
    """Return numbers in a type that supports comparison, unlike the narrowest types."""
    return column if column.is_complex() else column.double()


def _attributes(dataset: Any) -> dict[str, Any]:
    names = (*LOADER_ARGUMENTS, "training", "row_counts")
    return {name: getattr(dataset, name) for name in names if hasattr(dataset, name)}
