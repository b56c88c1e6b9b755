"""Find the prepared datasets that match a config, and write missing ones."""

import contextlib
import dataclasses
import datetime
import itertools
import math
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from mlx_runtime.distributed.collectives import broadcast, gather, is_alone
from mlx_runtime.distributed.messages import decode, encode
from mlx_runtime.distributed.topology import Topology
from mlx_runtime.errors import USER_ERRORS, DatasetError, MlxError, short_message
from mlx_runtime.events import DatasetsPrepared, Event, Notice, PreparationProgress
from mlx_runtime.loop.job import Job
from mlx_runtime.loop.options import TrainConfig
from mlx_runtime.storage.files import storage_errors
from mlx_runtime.workers.placement import usable_cores

CALL_BYTES = 8 << 20
"""Approximate size of the batches that all workers read at the same time, and rank 0 writes."""

STREAMED_ROWS = 64
"""Rows in a batch of a stream, whose rows may be large."""

NOT_WORTH_A_PROCESS_S = 5.0
"""Duration of the work of one reading process."""


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
    candidates: Sequence[Candidate],
    root: str,
    max_bytes: float,
    emit: Callable[[Event], None],
    uses: contextlib.ExitStack,
) -> dict[str, PreparedSet]:
    """Return the prepared datasets of all datasets of a config; those that are missing have an attempt, for `write`.

    Streams are written here, because they can only be read in order. For those of Ray Data, Ray must be running. All
    are protected from removal until `uses` is closed.

    Raises:
        DatasetError: A dataset cannot be prepared; the message explains how to fix it.
        StorageError: The store cannot be written.
    """
    store, sets = Store(root), {}
    store.clean(math.inf)  # only what killed attempts left
    for candidate in candidates:
        if candidate.refusal:
            emit(Notice(f"datasets.{candidate.name} is not prepared: {candidate.refusal}"))
            continue
        with _errors(candidate):
            dataset = candidate.make()
            name = candidate.full_name(dataset)
            uses.enter_context(store.mark_used(name))
            if (manifest := store.find(name)) is not None:
                sets[candidate.name] = PreparedSet(root, manifest, _attributes(dataset), max_bytes)
                continue
            rows = 0 if candidate.streamed else rows_of(dataset, candidate.name)
            sample = {} if candidate.streamed else candidate.sample(dataset, rows)
            manifest = Manifest(name, rows, 0, {}, candidate.node["_target_"], candidate.arguments, "")
            attempt = uses.enter_context(store.attempt(name, encode(sample)))
            item = PreparedSet(root, manifest, _attributes(dataset), max_bytes, attempt)
            if candidate.streamed or isinstance(dataset, IterableDataset):
                item = dataclasses.replace(
                    item, attempt="", manifest=_write_stream(item, candidate, dataset, sample, emit)
                )
            else:
                _check(sample, candidate, dataset, rows)
            sets[candidate.name] = item
    return sets


def write_together(job: Job, topology: Topology, cfg: TrainConfig, send: Callable[[Event], None]) -> Job:
    """Write the missing prepared datasets of a job, each worker its share. Every worker must call this."""
    on_ray = job.cluster.reads_streams and not job.cluster.in_driver
    here = int(os.environ.get("LOCAL_WORLD_SIZE", topology.world_size))
    cores = cfg.cpus_per_worker if on_ray else usable_cores() // here  # Ray gives the others to other workers
    nodes = {name: job.tree["datasets"][name] for name, item in job.prepared.items() if item.attempt}
    candidates = [Candidate(name, node, node, cfg.seed, job.project) for name, node in nodes.items()]
    sets = write(job.prepared, candidates, topology, cores, send)
    if topology.writes:
        send(announcement(sets))
    return dataclasses.replace(job, prepared=sets)


def announcement(sets: Mapping[str, PreparedSet]) -> DatasetsPrepared:
    """Return the event for the prepared datasets that a run reads."""
    names = {name: item.manifest.name for name, item in sets.items()}
    created = max(item.manifest.created for item in sets.values())
    return DatasetsPrepared(names, next(iter(sets.values())).root, created)


def write(
    sets: Mapping[str, PreparedSet],
    candidates: Sequence[Candidate],
    topology: Topology,
    cores: int,
    emit: Callable[[Event], None],
) -> dict[str, PreparedSet]:
    """Write the missing ones of prepared datasets, given their candidates and any others. Return all.

    Every worker must call this, and reads its share with up to `cores` processes. Rank 0 receives the rows, writes
    them, and emits events.
    """
    # Rows may take any time. Engines notice lost workers by themselves.
    timeout, done = datetime.timedelta(days=365), dict(sets)
    group = None if is_alone() else torch.distributed.new_group(backend="gloo", timeout=timeout)
    for candidate in candidates:
        item = sets.get(candidate.name)
        if item is None or not item.attempt:
            continue
        # Before workers were restarted, or by another run.
        found = Store(item.root).find(item.manifest.name) if topology.writes else None
        text = broadcast(found and found.text(), group)
        if text is None:
            with _errors(candidate):
                written = _write_rows(item, candidate, topology, cores, group, emit)
                text = broadcast(written and written.text(), group)
        done[candidate.name] = dataclasses.replace(item, attempt="", manifest=Manifest.parse(text.encode()))
    return done


@contextlib.contextmanager
def _errors(candidate: Candidate) -> Iterator[None]:
    """Convert errors of the dataset in the block to a DatasetError."""
    try:
        yield
    except MlxError:
        raise
    except USER_ERRORS as error:
        raise dataset_error(error, f"datasets.{candidate.name} cannot be prepared") from error


def _write_rows(
    item: PreparedSet, candidate: Candidate, topology: Topology, cores: int, group: Any, emit: Callable[[Event], None]
) -> Manifest | None:
    """Read every n-th batch of rows on each of n workers. Rank 0 receives and writes them, and returns the manifest."""
    rows, workers, dataset = item.manifest.rows, topology.world_size, candidate.make()
    started = time.monotonic()
    own = candidate.sample(dataset, rows) if rows_of(dataset, candidate.name) == rows else {}
    expected_s = (time.monotonic() - started) / SAMPLE * rows / workers
    store, here = Store(item.root), f"rank {topology.rank} on {socket.gethostname()}"
    with storage_errors(f"{here} cannot read {item.root}; cfg.preparation.path must be a folder or URI that all share"):
        sample = decode(store.storage.read(item.manifest.name, f"{item.attempt}.sample"))
    if not _alike(sample, own):
        raise candidate.error(f"{here} reads other rows than the driver", "Make its files the same on every machine")
    row_bytes = sum(column[0].numel() * column.element_size() for column in own.values())
    per_call = max(1, min(CALL_BYTES // max(1, row_bytes), math.ceil(rows / 100)) // workers)
    processes = min(cores, int(expected_s / NOT_WORTH_A_PROCESS_S))
    # Processes would share the positions in files that `dataset` has opened by now.
    unread = candidate.make() if processes else dataset
    share = _Share(ShardPlan(rows, workers, per_call), topology.rank, 0, 0, candidate.seed, False)
    batches = MapReader(unread, candidate.name, ReadingProcesses(processes)).batches(share)
    rounds = (gather(next(batches, None), group) or [] for _ in range(math.ceil(rows / (per_call * workers))))
    if topology.writes:
        store.discard(item.manifest.name, f"{item.attempt}-")  # files of a rank 0 that was lost
        in_order = (batch for received in rounds for batch in received if batch is not None)
        return _store(item, candidate, in_order, sample, some_rows(rows), emit)
    for _ in rounds:
        pass
    return None


class _Share(WorkerPass):
    """Batches of consecutive rows, of which each worker reads every n-th."""

    def batch_rows(self) -> Iterator[list[int]]:
        rows, size = self.plan.rows, self.plan.batch_size
        for first in range(self.rank * size, rows, size * self.plan.world_size):
            yield [*range(first, min(first + size, rows))]


def _write_stream(
    item: PreparedSet, candidate: Candidate, dataset: Any, sample: Batch, emit: Callable[[Event], None]
) -> Manifest:
    """Write a stream, as the loader of one worker reads it."""
    with contextlib.ExitStack() as stack:
        if candidate.streamed:
            streams = companions.part("ray.stream_reader")  # here, because it imports Ray
            assigner = streams.StreamAssigner(candidate.node, candidate.name, candidate.seed, candidate.project)
            reader: Reader = streams.StreamReader(assigner, candidate.name)
            stack.callback(assigner.close)
        else:
            reader = IterableReader(dataset, candidate.name, ReadingProcesses())
        if (rows := reader.rows()) == 0:
            raise DatasetError(f"datasets.{candidate.name} has no rows")
        item = dataclasses.replace(item, manifest=dataclasses.replace(item.manifest, rows=rows))
        plan = ShardPlan(rows, 1, STREAMED_ROWS)
        batches = reader.batches(WorkerPass(plan, 0, 0, 0, candidate.seed, False))
        return _store(item, candidate, batches, sample, list(range(SAMPLE)) if sample else [], emit)


def _store(
    item: PreparedSet,
    candidate: Candidate,
    batches: Iterator[Batch],
    sample: Batch,
    numbers: list[int],
    emit: Callable[[Event], None],
) -> Manifest:
    """Write the batches of a dataset in order, and compare them with its sample, of the rows with these numbers.

    Then, remove the least recently used datasets of the store until the total is below its maximum.
    """
    started, done, first = time.monotonic(), 0, next(batches)
    schema, rows = candidate.tensors(first), item.manifest.rows
    with column_writer(Store(item.root), item.manifest, first, item.attempt) as writer:
        for batch in itertools.chain([first], batches):
            count = len(next(iter(batch.values())))
            candidate.check_schema(schema, schema_of(batch), f"{done} to {done + count - 1}")
            known = [index for index, row in enumerate(numbers) if done <= row < done + count]
            written = [numbers[index] - done for index in known]
            if known and not _alike(_rows_at(sample, known), _rows_at(batch, written)):
                raise candidate.error("a row changes when it is read again")
            writer.write(batch)
            done += count
            emit(PreparationProgress(candidate.name, done, rows))
        manifest = writer.commit()
    size = f"{rows:,} rows, {manifest.size_bytes / 1e6:,.1f} MB"
    emit(Notice(f"datasets.{candidate.name} is prepared: {size} in {time.monotonic() - started:.1f} s"))
    for removed in Store(item.root).clean(item.max_bytes):
        size = f"{removed.size_bytes / 1e6:,.1f} MB"
        emit(Notice(f"removed the prepared dataset {removed.name}, {size}: not used recently"))
    return manifest


def _check(sample: Batch, candidate: Candidate, dataset: Any, rows: int) -> None:
    """Raise a DatasetError if the rows of a sample differ when read again, or when stacked into one batch."""
    if not _alike(sample, candidate.sample(dataset, rows)):
        raise candidate.error("a row changes each time it is read")
    if not _alike(sample, BatchReader(dataset, candidate.name).read(some_rows(rows))):
        raise candidate.error("a row changes when it is batched with others")


def _rows_at(batch: Mapping[str, Any], rows: list[int]) -> Batch:
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
