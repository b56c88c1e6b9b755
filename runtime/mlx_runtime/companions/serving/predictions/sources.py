"""The rows to predict: a dataset of a run, another dataset of its code, or a file."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch.utils.data import IterableDataset

from mlx_runtime.companions.serving.loading import by_preference
from mlx_runtime.companions.serving.schema import Schema
from mlx_runtime.companions.serving.stored_code import public
from mlx_runtime.config.building import build
from mlx_runtime.config.composition import parse_overrides
from mlx_runtime.config.constructors.targets import object_at
from mlx_runtime.data.batches import Batch, BatchReader, dataset_error, rows_of
from mlx_runtime.data.definitions import adopt_dataset, construction
from mlx_runtime.data.sampling import mix_seeds
from mlx_runtime.distributed.randomness import set_seed, temporary_seed
from mlx_runtime.errors import USER_ERRORS, ConfigError, UsageError, full_message, suggest
from mlx_runtime.runs.folder import RunFolder
from mlx_runtime.runs.queries.reader import matching_code

SUFFIXES = (".parquet", ".jsonl", ".ndjson", ".csv", ".npy", ".npz")
"""Suffixes of files of rows, read and written."""


class Rows(NamedTuple):
    """Successive rows."""

    size: int
    columns: Batch  # those that predict reads; a list of values if rows differ in shape
    kept: Batch  # those that are copied to the output


class Source(Protocol):
    """Rows in their order."""

    title: str

    def read(self, start: int, count: int) -> Rows:
        """Return the rows from `start` on: `count`, or fewer at the end. `start` never decreases."""
        ...

    def alone(self, row: int) -> Rows | None:
        """Return one row, prepared without others; None if rows are not padded, or cannot be read again."""
        ...

    def total(self) -> int | None:
        """Return the number of rows, or an estimate of it; None if it is unknown."""
        ...

    def close(self) -> None:
        """Close the file, if there is one."""


@dataclass(frozen=True)
class Selection:
    """The rows that were asked for, before anything is opened."""

    title: str
    file: Path | None = None
    node: Mapping[str, Any] | None = None  # of a dataset, as in conf.yaml
    of_run: bool = False  # the node is that of the run, not of a class on the command line
    seed: int = 0

    def facts(self) -> dict[str, Any]:
        """Return plain values that change when the rows do."""
        if self.file is None:
            return {"dataset": self.title, "node": self.node}
        status = self.file.stat()
        return {"file": str(self.file.resolve()), "size_bytes": status.st_size, "changed_ns": status.st_mtime_ns}

    def open(self, folder: RunFolder, schema: Schema, keep: tuple[str, ...], size: int, *, trust: bool) -> Source:
        """Open the rows for reading `size` at a time."""
        if self.file is not None:
            return FileSource(self.file, schema, keep, size)
        with matching_code(folder, "predictor", self.title, self.node, trust=trust) as node:
            if hasattr(object_at(node["_target_"]), "to_ray"):
                raise UsageError(
                    f"{self.title} is a stream of Ray Data, which predict does not read; write its rows to a file: "
                    "to_ray().write_parquet(FOLDER)"
                )
            try:
                with construction(node, self.seed):
                    dataset = adopt_dataset(build(node, self.title), self.title, node)
            except ConfigError as error:
                if self.of_run:
                    raise
                raise UsageError(f"--dataset {public(full_message(error))}") from error
            except USER_ERRORS as error:
                raise dataset_error(error, f"{self.title} cannot be constructed") from error
        return DatasetSource(dataset, self.title, schema, keep, self.seed)


def select(config: Mapping[str, Any], text: str | None) -> Selection:
    """Return the rows named on a command line: a dataset of a run's config, a class with arguments, or a file.

    Raises:
        UsageError: there are no such rows.
        ConfigError: the arguments of a class are not understood.
    """
    nodes = {name: node for name, node in config.get("datasets", {}).items() if not name.startswith("_")}
    seed = config["cfg"].get("seed", 0)
    if text is None:
        if not nodes:
            raise UsageError("the run has no dataset; pass --dataset FILE")
        text = by_preference(nodes)[0]
    if text in nodes:
        return Selection(text, node=nodes[text], of_run=True, seed=seed)
    path, suffix = Path(text), Path(text).suffix.lower()
    if "(" in text and suffix not in SUFFIXES:
        return Selection(text, node=_node(text), seed=seed)
    if suffix in SUFFIXES or path.exists() or "/" in text:
        if not path.is_file():
            raise UsageError(f"there is no file {text}" if not path.exists() else f"{text} is not a file of rows")
        if suffix not in SUFFIXES:
            raise UsageError(f"{text}: files of rows end with {', '.join(SUFFIXES)}")
        return Selection(text, file=path)
    if "." in text:
        return Selection(text, node=_node(text), seed=seed)
    raise UsageError(f"the run has no dataset {text!r}, and there is no such file.{suggest(text, nodes)}")


def _node(text: str) -> dict[str, Any]:
    """Return the node of a class path with arguments, like `src.datasets.Digits(split=test, batch_size=8)`."""
    target, _, arguments = text.partition("(")
    if not all(part.isidentifier() for part in target.split(".")) or (arguments and not arguments.endswith(")")):
        raise ConfigError(
            f"{text} is not understood; write a class path with arguments: src.datasets.Digits(split=test)"
        )
    parsed = parse_overrides([item for item in _split(arguments.removesuffix(")")) if item])
    for item in parsed:
        if item.is_sweep_override() or item.type is None or item.type.name != "CHANGE" or "." in item.key_or_group:
            raise ConfigError(f"{item.input_line!r} in {text} is not an argument; write name=value")
    return {"_target_": target, **{item.key_or_group: item.value() for item in parsed}}


def _split(text: str) -> Iterator[str]:
    """Split arguments at commas outside of brackets and quotes."""
    depth, quote, item = 0, "", ""
    for letter in text:
        if letter == "," and not depth and not quote:
            yield item.strip()
            item = ""
            continue
        if letter in "'\"" and quote in ("", letter):
            quote = "" if quote else letter
        elif not quote:
            depth += (letter in "[{(") - (letter in "]})")
        item += letter
    yield item.strip()


class FileSource:
    """Rows of a file, checked by the schema."""

    def __init__(self, path: Path, schema: Schema, keep: tuple[str, ...], size: int) -> None:
        from mlx_runtime.companions.serving.predictions import tables

        self.title, self._path, self._columns, self._keep = str(path), path, schema.columns, keep
        self._tables, self._file = tables, tables.open_rows(path, schema.columns, keep, size)

    def read(self, start: int, count: int) -> Rows:
        count, values = self._file.read(start, count)
        if not count:
            return Rows(0, {}, {})
        batch = self._tables.checked(values, self._columns, self._path, start)
        return Rows(count, batch, {name: values[name] for name in self._keep})

    def alone(self, row: int) -> Rows | None:
        return None  # rows of a file are not padded

    def total(self) -> int | None:
        return self._file.total()

    def close(self) -> None:
        self._file.close()


class DatasetSource:
    """Rows of a dataset: map-style, an IterableDataset, or of Hugging Face."""

    def __init__(self, dataset: Any, name: str, schema: Schema, keep: tuple[str, ...], seed: int) -> None:
        self.title, self._dataset, self._names, self._keep = name, dataset, schema.names, keep
        self._reader, self._seed, self._position = BatchReader(dataset, name), seed, 0
        self._samples: Iterator[Any] | None = None
        if isinstance(dataset, IterableDataset):
            set_seed(seed)  # random samples are the same on each worker
            if hasattr(dataset, "set_epoch"):
                dataset.set_epoch(0)
            self._samples = dataset.in_order(None) if hasattr(dataset, "in_order") else iter(dataset)

    def read(self, start: int, count: int) -> Rows:
        try:
            numbers, batch = self._next(start, count) if self._samples is not None else self._at(start, count)
        except USER_ERRORS as error:
            raise dataset_error(error, f"{self.title} cannot be read") from error
        if not numbers:
            return Rows(0, {}, {})
        for name in (*self._names, *self._keep):
            if name not in batch:
                reader = "predict reads" if name in self._names else "--keep names"
                raise UsageError(f"{self.title} has the columns {', '.join(batch)}, but {reader} {name}")
        named = [{name: batch[name] for name in names} for names in (self._names, self._keep)]
        return Rows(len(numbers), *named)

    def alone(self, row: int) -> Rows | None:
        return None if self._samples is not None else self.read(row, 1)

    def total(self) -> int | None:
        try:
            return rows_of(self._dataset, self.title)
        except USER_ERRORS:
            if self._samples is None:
                raise
            return None

    def close(self) -> None:
        pass

    def _at(self, start: int, count: int) -> tuple[range, Batch]:
        numbers = range(start, min(start + count, rows_of(self._dataset, self.title)))
        with temporary_seed(mix_seeds(self._seed, start)):  # random samples do not depend on the worker
            return numbers, self._reader.read(numbers) if numbers else {}

    def _next(self, start: int, count: int) -> tuple[range, Batch]:
        assert self._samples is not None
        skipped = sum(1 for _ in islice(self._samples, start - self._position))
        samples = list(islice(self._samples, count)) if skipped == start - self._position else []
        self._position += skipped + len(samples)
        numbers = range(start, start + len(samples))
        return numbers, self._reader.stack(samples, numbers) if samples else {}
