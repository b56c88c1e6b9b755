"""Make prepared sets: every row of a dataset through `ray_map_batches` once, in parallel on the cluster by Ray Data.

A set is found again by its name, which is a digest of everything that decides its content: the dataset's class and
arguments, the code it is made of, its number of rows, and a few of its rows as they are read today. So a set is never
used once the code, the arguments or the data have changed, and a dataset that reads differently each time (random
augmentation) is noticed before anything is stored.
"""

import contextlib
import hashlib
import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy
import pyarrow
import ray
import ray.data
import torch
from torch.utils.data import IterableDataset

from mlx_runtime import registry
from mlx_runtime.errors import RAISED_BY_USERS, DatasetError, MlxError, first_line
from mlx_runtime.prepared import Manifest, PreparedSet, Store, Writer
from mlx_runtime.reading import Batch, Samples, Stacked, as_numpy, dtype_name, rows_of
from mlx_runtime.signatures import object_at
from mlx_runtime.sources import code_of
from mlx_runtime.streaming import blocks_of, columns_of, keep_order, make_dataset, rows_of_stream, stream_of, told

BLOCK_BYTES = 8 << 20
"""What one call of the mapping processes gives back."""

NOT_WORTH_A_PROCESS_S = 5.0
"""Work that takes no longer is done right here: to start a process and import torch takes as long."""

LOADERS_OWN = ("batch_size", "shuffle", "drop_last")
"""Arguments by which rows are read, not made: changing them leaves a prepared set as it is."""

Tell = Callable[[str], None]
Cluster = Callable[[], contextlib.AbstractContextManager[None]]

Block = Mapping[str, Any]
"""The bytes of some rows by column."""

Progress = Callable[[str, int, int], None]
"""Called with the name of a dataset, the rows that are done, and all rows."""


@dataclass
class _Candidate:
    """A dataset that may be prepared: its node in conf.yaml, also without secrets, and what it says of itself."""

    name: str
    node: Mapping[str, Any]
    shown: Mapping[str, Any]
    seed: int
    project: Path

    def __post_init__(self) -> None:
        self.cls: type = object_at(self.node["_target_"])
        arguments, self.arguments = (
            {key: value for key, value in node.items() if key not in ("_target_", *LOADERS_OWN)}
            for node in (self.node, self.shown)
        )
        content = [self.node["_target_"], json.dumps(arguments, sort_keys=True), *code_of(self.cls, self.project)]
        self.prefix = f"{self.cls.__name__}-{_digest(content)}"

    @property
    def refusal(self) -> str | None:
        """Why this dataset is never prepared, if so."""
        if getattr(self.cls, "prepare", True) is False:
            return f"{self.cls.__name__}.prepare is False"
        if isinstance(self.cls, type) and issubclass(self.cls, IterableDataset):
            return f"{self.cls.__name__} is a stream"
        return None

    def make(self) -> Any:
        return make_dataset(self.node, self.name, self.seed, self.project)

    def made(self, manifest: Manifest) -> bool:
        """Whether a set is of this class with these arguments, by this or by earlier code."""
        arguments = json.loads(json.dumps(self.arguments, default=str))
        return (manifest.dataset, manifest.arguments) == (self.node["_target_"], arguments)

    @property
    def streamed(self) -> bool:
        return hasattr(self.cls, "to_ray")


def find(
    tree: Mapping[str, Any],
    root: str,
    *,
    seed: int,
    project: Path,
    tell: Tell,
    shown: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, PreparedSet]:
    """The prepared sets that fit the datasets of a config, by name in `Datasets`.

    A dataset is made here, on the driver, only when there is a set made by the same code with the same arguments.

    Args:
        tree: of the config.
        root: of the store.
        seed: `cfg.seed`.
        project: folder of the experiment.
        tell: called with a line for the user.
        shown: nodes of datasets without secrets, for the manifests.
    """
    store = Store(root)
    names = store.names()
    found = {}
    for candidate in _candidates(tree, shown, seed, project):
        manifests = [store.find(name) for name in names if name.startswith(f"{candidate.cls.__name__}-")]
        of_these = [item for item in manifests if item and candidate.made(item)]
        if candidate.refusal or not of_these:
            continue
        if not any(item.name.startswith(candidate.prefix) for item in of_these):
            tell(
                f"datasets.{candidate.name}: its prepared set is stale, the code has changed; reading samples. "
                "Prepare again with --prepare-batches"
            )
            continue
        try:
            dataset = candidate.make()
            manifest = store.find(_full_name(candidate, dataset))
        except Exception as error:  # workers may well be able to make it
            tell(f"datasets.{candidate.name}: its prepared set is not used: {first_line(error)}")
            continue
        if manifest is None:
            tell(
                f"datasets.{candidate.name}: its prepared set is stale, the data has changed; reading samples. "
                "Prepare again with --prepare-batches"
            )
            continue
        found[candidate.name] = PreparedSet(root, manifest, _attributes(dataset))
    return found


def make(
    tree: Mapping[str, Any],
    root: str,
    *,
    seed: int,
    project: Path,
    tell: Tell,
    progress: Progress,
    cluster: Cluster,
    shown: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, PreparedSet]:
    """Prepare every dataset that is not prepared yet.

    Arguments as for `find`, and:
        progress: called as rows are done.
        cluster: has Ray run while a block runs; entered only for work that is worth it.

    Raises:
        DatasetError: a dataset cannot be prepared; the message says how to go on.
        StorageError: the store cannot be written.
    """
    store = Store(root)
    made = {}
    for candidate in _candidates(tree, shown, seed, project):
        if candidate.refusal:
            tell(f"datasets.{candidate.name} is not prepared: {candidate.refusal}")
            continue
        started = time.monotonic()
        try:
            dataset = candidate.make()
            name = _full_name(candidate, dataset)
            manifest = store.find(name)
            if manifest is None:
                write = _write_stream if candidate.streamed else _write_rows
                manifest = write(candidate, dataset, store, name, progress, cluster)
                size = f"{manifest.rows:,} rows, {manifest.size_bytes / 1e6:,.1f} MB"
                tell(f"datasets.{candidate.name} is prepared: {size} in {time.monotonic() - started:.1f} s")
        except MlxError:
            raise
        except RAISED_BY_USERS as error:
            raise told(error, f"datasets.{candidate.name} cannot be prepared") from error
        made[candidate.name] = PreparedSet(root, manifest, _attributes(dataset))
    return made


def _candidates(tree: Mapping[str, Any], shown: Mapping[str, Any], seed: int, project: Path) -> list[_Candidate]:
    nodes = {name: node for name, node in tree.get("datasets", {}).items() if isinstance(node, dict)}
    return [
        _Candidate(name, node, shown.get(name, node), seed, project)
        for name, node in nodes.items()
        if "_target_" in node
    ]


def _attributes(dataset: Any) -> dict[str, Any]:
    return {name: getattr(dataset, name) for name in (*LOADERS_OWN, "training") if hasattr(dataset, name)}


def _full_name(candidate: _Candidate, dataset: Any) -> str:
    content: list[Any]
    if candidate.streamed:
        stream = stream_of(dataset, candidate.name)
        content = [stream.schema(), *map(_file_facts, sorted(stream.input_files()))]
        for row in stream.take(8):
            content += [numpy.asarray(row[key]).tobytes() for key in sorted(row)]
    else:
        rows = rows_of(dataset, candidate.name)
        if rows == 0:
            raise DatasetError(f"datasets.{candidate.name} has no rows")
        sample = _sample(candidate, dataset, _few(rows))
        content = [rows, *_files_in(candidate.arguments)]
        for key, column in sample.items():
            content += [key, dtype_name(column), tuple(column.shape), as_numpy(column).tobytes()]
    return f"{candidate.prefix}-{_digest(content)}"


def _sample(candidate: _Candidate, dataset: Any, rows: Sequence[int]) -> Batch:
    """A few rows, each stacked alone and then put together.

    Raises:
        DatasetError: they are not alike, or not tensors.
    """
    samples, stacked = Samples(dataset, candidate.name), Stacked(dataset, candidate.name)
    batches = [stacked(samples.__getitems__([row])) for row in rows]
    for key, value in batches[0].items():
        if not isinstance(value, torch.Tensor):
            raise DatasetError(
                f"datasets.{candidate.name} cannot be prepared: {key!r} is a {type(value).__name__}, and only tensors "
                f"are stored. Leave it out of ray_map_batches, or set prepare = False in {candidate.cls.__name__}"
            )
    for row, batch in zip(rows, batches, strict=True):
        if _schema(batch) != _schema(batches[0]):
            raise DatasetError(_unlike(candidate, _schema(batches[0]), str(row), _schema(batch)))
    return {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}


def _unlike(candidate: _Candidate, schema: "Schema", rows: str, other: "Schema") -> str:
    return (
        f"datasets.{candidate.name} cannot be prepared: row 0 is {_shown(schema)}, row {rows} is {_shown(other)}. "
        f"Make them alike in ray_map_batches, or set prepare = False in {candidate.cls.__name__}"
    )


def _files_in(arguments: Any) -> list[str]:
    """Facts of every file and folder that arguments name."""
    if isinstance(arguments, dict | list):
        items = arguments.values() if isinstance(arguments, dict) else arguments
        return [facts for item in items for facts in _files_in(item)]
    return [_file_facts(arguments)] if isinstance(arguments, str) and len(arguments) < 4096 else []


def _file_facts(path: str, most: int = 100_000) -> str:
    """A path, and when what is there was written and how large it is; of a folder, of the files in it."""
    if Path(path).is_file():
        facts = Path(path).stat()
        return f"{path} {facts.st_size} {facts.st_mtime_ns}"
    if not path or not Path(path).is_dir():
        return path
    found = [item.stat() for item in islice(Path(path).rglob("*"), most)]
    return (
        f"{path} {len(found)} {sum(item.st_size for item in found)} {max(item.st_mtime_ns for item in found)}"
        if found
        else path
    )


def _few(rows: int, count: int = 8) -> list[int]:
    """Some rows from the first to the last."""
    return sorted({round(index * (rows - 1) / (count - 1)) for index in range(count)})


def _digest(content: Sequence[Any]) -> str:
    digest = hashlib.sha256()
    for item in content:
        data = item if isinstance(item, bytes) else str(item).encode()
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()[:12]


# -- mapping --


def _write_rows(
    candidate: _Candidate, dataset: Any, store: Store, name: str, progress: Progress, cluster: Cluster
) -> Manifest:
    """Prepare a map-style dataset."""
    rows = rows_of(dataset, candidate.name)
    few = _few(rows)
    sample = _sample(candidate, dataset, few)
    started = time.monotonic()
    again = _sample(candidate, dataset, few)
    expected_s = (time.monotonic() - started) * rows / len(few)
    if not _alike(sample, again):
        raise DatasetError(_differs(candidate, "a row reads differently each time"))
    together = Stacked(dataset, candidate.name)(Samples(dataset, candidate.name).__getitems__(few))
    if not _alike(sample, together):
        raise DatasetError(_differs(candidate, "a row comes out differently in a batch with others"))
    row_bytes = sum(column[0].numel() * column.element_size() for column in sample.values())
    per_call = max(1, min(BLOCK_BYTES // max(1, row_bytes), math.ceil(rows / 100)))
    work = _Work(candidate, _schema(sample), rows, per_call, dict(zip(few, _rows(sample), strict=True)))
    about: dict[str, Any] = {"dataset": candidate.node["_target_"], "arguments": candidate.arguments}
    with contextlib.ExitStack() as stack:
        writer = stack.enter_context(Writer(store, name, rows, sample, **about))
        done = 0
        here = expected_s < NOT_WORTH_A_PROCESS_S
        if not here:
            stack.enter_context(cluster())
        blocks = _mapped_here(work, dataset) if here else _mapped_on_cluster(work, expected_s)
        for block in blocks:
            writer.write(block)
            done = min(rows, done + per_call)
            progress(candidate.name, done, rows)
        if done != rows:
            raise DatasetError(f"datasets.{candidate.name}: {done} of {rows} rows were mapped")
        return writer.commit(registry.now())


Schema = dict[str, tuple[str, tuple[int, ...]]]
"""Type and shape of one row by column."""


@dataclass(frozen=True)
class _Work:
    """What mapping processes need to know.

    Attributes:
        candidate: the dataset.
        schema: that all rows must have.
        rows: in all.
        per_call: rows that are mapped at once.
        known: some rows as they were read before, by number; each as a batch of one.
    """

    candidate: _Candidate
    schema: Schema
    rows: int
    per_call: int
    known: dict[int, Batch]

    def mapped(self, samples: Samples, stacked: Stacked, start: int) -> Batch:
        """The rows from `start` on that are mapped at once.

        Raises:
            DatasetError: they are not like the others.
        """
        stop = min(self.rows, start + self.per_call)
        made = stacked(samples.__getitems__(range(start, stop)))
        if _schema(made) != self.schema:
            raise DatasetError(_unlike(self.candidate, self.schema, f"{start} to {stop - 1}", _schema(made)))
        for row, known in self.known.items():
            if start <= row < stop and not _alike(known, _rows(made)[row - start]):
                raise DatasetError(_differs(self.candidate, "a row reads differently in another process"))
        return made


def _mapped_here(work: _Work, dataset: Any) -> Iterator[Block]:
    """All rows in order, mapped in this process."""
    samples, stacked = Samples(dataset, work.candidate.name), Stacked(dataset, work.candidate.name)
    for start in range(0, work.rows, work.per_call):
        made = work.mapped(samples, stacked, start)
        yield {key: pyarrow.py_buffer(as_numpy(made[key])) for key in work.schema}


def _mapped_on_cluster(work: _Work, expected_s: float) -> Iterator[Block]:
    """All rows in order, mapped by Ray Data; one row of its blocks has the bytes of `per_call` rows by column."""
    starts = numpy.arange(0, work.rows, work.per_call)
    parts = numpy.array_split(starts, min(len(starts), 2000))
    keep_order()
    mapped = ray.data.from_blocks([pyarrow.table({"start": part}) for part in parts]).map_batches(
        _mapped_by_task,
        fn_args=(work,),
        batch_size=1,
        batch_format="numpy",
        compute=ray.data.TaskPoolStrategy(size=max(1, math.ceil(expected_s / NOT_WORTH_A_PROCESS_S))),
        num_cpus=1,
        runtime_env={"env_vars": {"MLX_PREPARES": work.candidate.prefix}},  # processes that train do not inherit it
    )
    for reference, start, stop in blocks_of(mapped, work.candidate.name):
        table = ray.get(reference)
        for row in range(start, stop):
            yield {key: table.column(key)[row].as_buffer() for key in work.schema}


def _mapped_by_task(batch: Mapping[str, Any], work: _Work) -> dict[str, list[bytes]]:
    """Map rows in a process of Ray Data, which makes the dataset itself, once."""
    with _mapping.readers_of(work.candidate) as readers:
        made = work.mapped(*readers, int(batch["start"][0]))
    return {key: [as_numpy(made[key]).tobytes()] for key in work.schema}


class _Mapping:
    """The dataset that this process maps, forgotten when no more work comes: Ray keeps idle processes for a while.

    The environment of the tasks names the dataset, so a process never gets to see a second one.
    """

    _readers: tuple[Samples, Stacked] | None = None
    _timer: threading.Timer | None = None

    @contextlib.contextmanager
    def readers_of(self, candidate: _Candidate, idle_s: float = 20) -> Iterator[tuple[Samples, Stacked]]:
        """What reads the dataset; forgotten some time after the block unless it is asked for again."""
        if self._timer is not None:
            self._timer.cancel()
        readers = self._readers
        if readers is None:
            torch.set_num_threads(1)
            dataset = candidate.make()
            readers = self._readers = Samples(dataset, candidate.name), Stacked(dataset, candidate.name)
        yield readers
        self._timer = threading.Timer(idle_s, self._forget)
        self._timer.daemon = True
        self._timer.start()

    def _forget(self) -> None:
        self._readers = None


_mapping = _Mapping()


def _write_stream(
    candidate: _Candidate, dataset: Any, store: Store, name: str, progress: Progress, cluster: Cluster
) -> Manifest:
    """Prepare what `to_ray` gives."""
    stream = stream_of(dataset, candidate.name)
    rows = rows_of_stream(dataset, stream)
    about: dict[str, Any] = {"dataset": candidate.node["_target_"], "arguments": candidate.arguments}
    writer, schema, done = None, {}, 0
    with contextlib.ExitStack() as stack:
        stack.enter_context(cluster())
        for reference, start, stop in blocks_of(stream, candidate.name):
            if start == stop:
                continue
            block = columns_of(ray.get(reference), start, stop, candidate.name)
            if writer is None:
                writer, schema = stack.enter_context(Writer(store, name, rows, block, **about)), _schema(block)
            if _schema(block) != schema:
                raise DatasetError(
                    f"datasets.{candidate.name} cannot be prepared: rows are {_shown(schema)}, "
                    f"but later ones are {_shown(_schema(block))}. Make them alike in to_ray()"
                )
            done += stop - start
            if done > rows:
                break
            writer.write({key: pyarrow.py_buffer(as_numpy(column)) for key, column in block.items()})
            progress(candidate.name, done, rows)
        if writer is None or done != rows:
            raise DatasetError(f"datasets.{candidate.name}: to_ray() does not give the {rows} rows it is said to have")
        return writer.commit(registry.now())


def _rows(batch: Batch) -> list[Batch]:
    """Each row as a batch of one."""
    count = len(next(iter(batch.values())))
    return [{key: column[row : row + 1] for key, column in batch.items()} for row in range(count)]


def _schema(batch: Batch) -> Schema:
    return {key: _kind(column) for key, column in batch.items()}


def _kind(column: Any) -> tuple[str, tuple[int, ...]]:
    if not isinstance(column, torch.Tensor):
        return type(column).__name__, ()
    return dtype_name(column), tuple(column.shape[1:])


def _shown(schema: Schema) -> str:
    return ", ".join(f"{key} {dtype} {shape}" for key, (dtype, shape) in schema.items())


def _alike(one: Batch, other: Batch) -> bool:
    """Whether two batches hold the same rows, up to what floating-point numbers do on different machines."""
    return _schema(one) == _schema(other) and all(
        torch.allclose(_wide(column), _wide(other[key]), rtol=1e-4, atol=1e-6, equal_nan=True)
        if column.is_floating_point() or column.is_complex()
        else torch.equal(column, other[key])
        for key, column in one.items()
    )


def _wide(column: torch.Tensor) -> torch.Tensor:
    """Numbers of a type that can be compared; the narrowest cannot."""
    return column if column.is_complex() else column.double()


def _differs(candidate: _Candidate, how: str) -> str:
    return (
        f"datasets.{candidate.name} cannot be prepared: {how}. "
        f"Set prepare = False in {candidate.cls.__name__}, so that it is always read anew"
    )
