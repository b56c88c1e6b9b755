"""Write prepared datasets: map all rows through `ray_map_batches`, in this process or with Ray Data on the cluster."""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy
import pyarrow
import ray
import ray.data
import torch

from mlx_runtime.companions.prepared.columns import ColumnWriter, as_numpy
from mlx_runtime.companions.prepared.fingerprints import Candidate, Schema, format_schema, schema_of, some_rows
from mlx_runtime.companions.prepared.store import Manifest, Store
from mlx_runtime.companions.ray.streams import columns_of, keep_order, rows_of_stream, stream_blocks, stream_of
from mlx_runtime.data.batches import Batch, BatchReader, rows_of
from mlx_runtime.errors import DatasetError
from mlx_runtime.storage import documents

CALL_BYTES = 8 << 20
"""Approximate size of the result of one call in a mapping process."""

NOT_WORTH_A_PROCESS_S = 5.0
"""Maximum duration of work in this process: starting another process that imports torch takes as long."""

Cluster = Callable[[], contextlib.AbstractContextManager[None]]
"""Returns a context manager within which Ray runs; entered only for longer work."""

PackedBatch = Mapping[str, Any]
"""The bytes of some rows by column."""

Progress = Callable[[str, int, int], None]
"""Called with the name of a dataset, the number of finished rows, and the total number."""


def write_rows(
    candidate: Candidate, dataset: Any, store: Store, name: str, progress: Progress, cluster: Cluster
) -> Manifest:
    """Write a map-style dataset to a folder of a store."""
    rows = rows_of(dataset, candidate.name)
    sample, expected_s = _check_sample(candidate, dataset, rows)
    row_bytes = sum(column[0].numel() * column.element_size() for column in sample.values())
    per_call = max(1, min(CALL_BYTES // max(1, row_bytes), math.ceil(rows / 100)))
    samples = dict(zip(some_rows(rows), _split(sample), strict=True))
    work = _Work(candidate, schema_of(sample), rows, per_call, samples)
    with contextlib.ExitStack() as stack:
        writer = stack.enter_context(_writer(candidate, store, name, rows, sample))
        if expected_s < NOT_WORTH_A_PROCESS_S:
            batches = _map_here(work, dataset)
        else:
            stack.enter_context(cluster())
            batches = _map_on_cluster(work, expected_s)
        done = 0
        for batch in batches:
            writer.write(batch)
            done = min(rows, done + per_call)
            progress(candidate.name, done, rows)
        if done != rows:
            raise DatasetError(f"datasets.{candidate.name}: {done} of {rows} rows were mapped")
        return writer.commit(documents.now())


def write_stream(
    candidate: Candidate, dataset: Any, store: Store, name: str, progress: Progress, cluster: Cluster
) -> Manifest:
    """Write the rows that `to_ray` returns to a folder of a store."""
    stream = stream_of(dataset, candidate.name)
    rows = rows_of_stream(dataset, stream)
    writer, schema, done = None, {}, 0
    with contextlib.ExitStack() as stack:
        stack.enter_context(cluster())
        for reference, start, stop in stream_blocks(stream, candidate.name):
            if start == stop:
                continue
            batch = columns_of(ray.get(reference), start, stop, candidate.name)
            if writer is None:
                writer = stack.enter_context(_writer(candidate, store, name, rows, batch))
                schema = schema_of(batch)
            if schema_of(batch) != schema:
                raise DatasetError(
                    f"datasets.{candidate.name} cannot be prepared: rows are {format_schema(schema)}, "
                    f"but later ones are {format_schema(schema_of(batch))}. Make them match in to_ray()"
                )
            done += stop - start
            if done > rows:
                break
            writer.write(_pack(batch))
            progress(candidate.name, done, rows)
        if writer is None or done != rows:
            raise DatasetError(f"datasets.{candidate.name}: to_ray() did not return {rows} rows, as it promised")
        return writer.commit(documents.now())


def write_iterable(
    candidate: Candidate, dataset: Any, store: Store, name: str, progress: Progress, cluster: Cluster
) -> Manifest:
    """Write the rows of an `IterableDataset` to a folder of a store, in this process."""
    rows, reader = rows_of(dataset, candidate.name), BatchReader(dataset, candidate.name)
    samples, done = iter(dataset), 0
    first = reader.stack(list(islice(dataset, 1)), [0])
    schema = candidate.tensors(first)
    row_bytes = sum(column[0].numel() * column.element_size() for column in first.values())
    per_call = max(1, min(CALL_BYTES // max(1, row_bytes), math.ceil(rows / 100)))
    with _writer(candidate, store, name, rows, first) as writer:
        while done < rows and (some := list(islice(samples, min(per_call, rows - done)))):
            batch = reader.stack(some, range(done, done + len(some)))
            candidate.check_schema(schema, schema_of(batch), f"{done} to {done + len(some) - 1}")
            writer.write(_pack(batch))
            done += len(some)
            progress(candidate.name, done, rows)
        if done != rows:
            raise DatasetError(f"datasets.{candidate.name} ended after {done} rows, but __len__() is {rows}")
        return writer.commit(documents.now())


def _writer(candidate: Candidate, store: Store, name: str, rows: int, like: Batch) -> ColumnWriter:
    target = candidate.node["_target_"]
    return ColumnWriter(store, name, rows, like, dataset=target, arguments=candidate.arguments)


def _pack(batch: Batch) -> PackedBatch:
    return {key: pyarrow.py_buffer(as_numpy(column)) for key, column in batch.items()}


def _check_sample(candidate: Candidate, dataset: Any, rows: int) -> tuple[Batch, float]:
    """Return a few rows of a dataset, and the estimated time for reading all rows, in seconds.

    Raises DatasetError if the rows differ when read again, or when stacked into one batch.
    """
    few = some_rows(rows)
    sample = candidate.sample(dataset, few)
    started = time.monotonic()
    again = candidate.sample(dataset, few)
    expected_s = (time.monotonic() - started) * rows / len(few)
    if not _alike(sample, again):
        raise candidate.error("a row changes each time it is read")
    if not _alike(sample, BatchReader(dataset, candidate.name).read(few)):
        raise candidate.error("a row changes when it is batched with others")
    return sample, expected_s


@dataclass(frozen=True)
class _Work:
    """Work to be done by mapping processes."""

    candidate: Candidate
    schema: Schema  # of all rows
    rows: int  # in total
    per_call: int  # rows mapped at once
    samples: dict[int, Batch]  # some rows read before, by number, each as a batch of one

    def map_rows(self, reader: BatchReader, start: int) -> Batch:
        """Map `per_call` rows. Raises DatasetError if their schema, or a row read before, differs."""
        stop = min(self.rows, start + self.per_call)
        batch = reader.read(range(start, stop))
        self.candidate.check_schema(self.schema, schema_of(batch), f"{start} to {stop - 1}")
        for row, before in self.samples.items():
            if start <= row < stop and not _alike(before, _split(batch)[row - start]):
                raise self.candidate.error("a row changes in another process")
        return batch


def _map_here(work: _Work, dataset: Any) -> Iterator[PackedBatch]:
    """Map all rows in order in this process."""
    reader = BatchReader(dataset, work.candidate.name)
    return (_pack(work.map_rows(reader, start)) for start in range(0, work.rows, work.per_call))


def _map_on_cluster(work: _Work, expected_s: float) -> Iterator[PackedBatch]:
    """Map all rows in order with Ray Data; each row of its blocks has the bytes of `per_call` rows by column."""
    starts = numpy.arange(0, work.rows, work.per_call)
    parts = numpy.array_split(starts, min(len(starts), 2000))
    keep_order()
    mapped = ray.data.from_blocks([pyarrow.table({"start": part}) for part in parts]).map_batches(
        _map_in_task,
        fn_args=(work,),
        batch_size=1,
        batch_format="numpy",
        compute=ray.data.TaskPoolStrategy(size=max(1, math.ceil(expected_s / NOT_WORTH_A_PROCESS_S))),
        num_cpus=1,
        runtime_env={"env_vars": {"MLX_PREPARES": work.candidate.prefix}},  # processes that train do not inherit it
    )
    for reference, start, stop in stream_blocks(mapped, work.candidate.name):
        table = ray.get(reference)
        for row in range(start, stop):
            yield {key: table.column(key)[row].as_buffer() for key in work.schema}


def _map_in_task(batch: Mapping[str, Any], work: _Work) -> dict[str, list[bytes]]:
    """Map rows in a process of Ray Data. Each process constructs the dataset once."""
    with _task_reader.of(work.candidate) as reader:
        rows = work.map_rows(reader, int(batch["start"][0]))
    return {key: [as_numpy(rows[key]).tobytes()] for key in work.schema}


class _TaskReader:
    """The reader of the dataset that this process maps, released when idle, because Ray keeps idle processes.

    The environment of the tasks names the dataset, so a process never maps a second one.
    """

    _reader: BatchReader | None = None
    _timer: threading.Timer | None = None

    @contextlib.contextmanager
    def of(self, candidate: Candidate, idle_s: float = 20) -> Iterator[BatchReader]:
        """Provide the reader of a dataset for the duration of the batch. Unless used again, it is released later."""
        if self._timer is not None:
            self._timer.cancel()
        reader = self._reader
        if reader is None:
            torch.set_num_threads(1)
            reader = self._reader = BatchReader(candidate.make(), candidate.name)
        yield reader
        self._timer = threading.Timer(idle_s, self._drop)
        self._timer.daemon = True
        self._timer.start()

    def _drop(self) -> None:
        self._reader = None


_task_reader = _TaskReader()


def _split(batch: Batch) -> list[Batch]:
    """Return each row as a batch of one."""
    count = len(next(iter(batch.values())))
    return [{key: column[row : row + 1] for key, column in batch.items()} for row in range(count)]


def _alike(one: Batch, other: Batch) -> bool:
    """Return True if two batches have equal rows, up to rounding that differs between machines."""
    return schema_of(one) == schema_of(other) and all(
        torch.allclose(_widen(column), _widen(other[key]), rtol=1e-4, atol=1e-6, equal_nan=True)
        if column.is_floating_point() or column.is_complex()
        else torch.equal(column, other[key])
        for key, column in one.items()
    )


def _widen(column: torch.Tensor) -> torch.Tensor:
    """Return numbers in a type that supports comparison, unlike the narrowest types."""
    return column if column.is_complex() else column.double()
