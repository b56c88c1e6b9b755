"""The rows to predict: a dataset of a run, another class of its code, or files."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from torch.utils.data import IterableDataset

from mlx_runtime.companions.serving.loading import by_preference
from mlx_runtime.companions.serving.predictions.results import kept_array
from mlx_runtime.companions.serving.predictions.tables import NO_ROWS, FileRows, Rows, files_of
from mlx_runtime.companions.serving.schema import Schema
from mlx_runtime.config.building import build
from mlx_runtime.config.constructors.targets import object_at
from mlx_runtime.data.batches import Batch, BatchReader, dataset_error, rows_of
from mlx_runtime.data.definitions import adopt_dataset, construction
from mlx_runtime.data.sampling import mix_seeds
from mlx_runtime.distributed.randomness import set_seed, temporary_seed
from mlx_runtime.errors import USER_ERRORS, ConfigError, UsageError, suggest
from mlx_runtime.runs.folder import RunFolder
from mlx_runtime.runs.queries.reader import matching_code

SUFFIXES = (".parquet", ".jsonl", ".ndjson", ".csv")
"""Suffixes of files of rows."""


@dataclass(frozen=True)
class Selection:
    """The rows that were asked for, before anything is opened."""

    title: str
    path: Path | None = None
    node: Mapping[str, Any] | None = None  # of a dataset, as in conf.yaml
    seed: int = 0

    def facts(self) -> dict[str, Any]:
        """Return plain values that change when the rows do."""
        if self.path is None:
            return {"dataset": self.title, "node": self.node}
        found = [(file, file.stat()) for file in files_of(self.path)]
        return {"files": [[str(file.resolve()), status.st_size, status.st_mtime_ns] for file, status in found]}

    def open(
        self, folder: RunFolder, schema: Schema, keep: tuple[str, ...], size: int, *, trust: bool
    ) -> "FileRows | DatasetRows":
        """Open the rows for reading `size` at a time."""
        if self.path is not None:
            return FileRows(self.path, schema.columns, keep, size)
        with matching_code(folder, "predictor", self.title, self.node, trust=trust) as node:
            if hasattr(object_at(node["_target_"]), "to_ray"):
                raise UsageError(
                    f"{self.title} is a stream of Ray Data, which predict does not read; write its rows to files: "
                    "to_ray().write_parquet(FOLDER)"
                )
            try:
                with construction(node, self.seed):
                    dataset = adopt_dataset(build(node, self.title), self.title, node)
            except ConfigError:
                raise
            except USER_ERRORS as error:
                raise dataset_error(error, f"{self.title} cannot be constructed") from error
        return DatasetRows(dataset, self.title, schema, keep, self.seed)


def select(config: Mapping[str, Any], text: str | None) -> Selection:
    """Return the rows named on a command line: a dataset of a run's config, a class without arguments, or files.

    Raises:
        UsageError: there are no such rows.
    """
    nodes = {name: node for name, node in config.get("datasets", {}).items() if not name.startswith("_")}
    seed = config["cfg"].get("seed", 0)
    if text is None:
        if not nodes:
            raise UsageError("the run has no dataset; pass --dataset FILE")
        text = by_preference(nodes)[0]
    if text in nodes:
        return Selection(text, node=nodes[text], seed=seed)
    path = Path(text)
    if path.is_dir() and not files_of(path):
        raise UsageError(f"the folder {text} has no .parquet files")
    if path.is_dir() or (path.is_file() and path.suffix.lower() in SUFFIXES):
        return Selection(text, path, seed=seed)
    if path.exists():
        raise UsageError(f"{text} is not a file of rows; they end with {', '.join(SUFFIXES)}")
    if all(part.isidentifier() for part in text.split(".")) and "." in text and path.suffix not in SUFFIXES:
        return Selection(text, node={"_target_": text}, seed=seed)
    raise UsageError(f"the run has no dataset {text!r}, and there is no such file or class.{suggest(text, nodes)}")


class DatasetRows:
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
        """Return the rows from `start` on: `count`, or fewer at the end. `start` never decreases."""
        try:
            numbers, batch = self._next(start, count) if self._samples is not None else self._at(start, count)
        except USER_ERRORS as error:
            raise dataset_error(error, f"{self.title} cannot be read") from error
        if not numbers:
            return NO_ROWS
        for name in (*self._names, *self._keep):
            if name not in batch:
                reader = "predict reads" if name in self._names else "--keep names"
                raise UsageError(f"{self.title} has the columns {', '.join(batch)}, but {reader} {name}")
        kept = {name: kept_array(name, batch[name]) for name in self._keep}
        return Rows(len(numbers), {name: batch[name] for name in self._names}, kept)

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
