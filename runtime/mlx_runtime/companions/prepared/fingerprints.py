"""Names of prepared datasets: digests of everything that determines their content.

These are the dataset's class, arguments and code, its number of rows, and the current content of a few rows. So a
prepared dataset is never used after the code, the arguments or the data have changed.
"""

import ast
import contextlib
import hashlib
import importlib.util
import json
import os
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.machinery import ModuleSpec
from itertools import islice
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.utils.data import IterableDataset

from mlx_runtime import __version__
from mlx_runtime.companions.prepared.columns import as_numpy
from mlx_runtime.companions.prepared.store import Manifest
from mlx_runtime.companions.ray.streams import make_dataset, stream_of
from mlx_runtime.config.constructors.targets import object_at
from mlx_runtime.data.batches import Batch, BatchReader, dtype_name, rows_of
from mlx_runtime.data.sampling import LOADER_ARGUMENTS
from mlx_runtime.errors import DatasetError

SAMPLE = 8
"""Number of rows whose content is part of the digest."""

Schema = dict[str, tuple[str, tuple[int, ...]]]
"""Type and shape of one row, by column."""


@dataclass
class Candidate:
    """A dataset that may be prepared.

    The names of its prepared datasets start with `prefix`: its class, and a digest of its code and arguments, and of
    the version of this package. The manifest contains `arguments`: those of its constructor, without secrets.
    """

    name: str  # in `Datasets`
    node: Mapping[str, Any]  # in conf.yaml
    shown: Mapping[str, Any]  # the node without secrets
    seed: int
    project: Path  # folder of the experiment, whose code is part of the digest
    storage: str = ""  # changes with every run, so it is no data

    def __post_init__(self) -> None:
        self.cls: type = object_at(self.node["_target_"])
        self.arguments = _arguments(self.shown)

    @cached_property
    def prefix(self) -> str:
        arguments = json.dumps(_arguments(self.node), sort_keys=True)
        content = [self.node["_target_"], __version__, arguments, *_code_of(self.cls, self.project)]
        return f"{self.cls.__name__}-{digest(content)}"

    @property
    def refusal(self) -> str | None:
        """Reason never to prepare this dataset, or None."""
        if getattr(self.cls, "prepare", True) is False:
            return f"{self.cls.__name__}.prepare is False"
        if hasattr(self.cls, "set_epoch"):
            return f"{self.cls.__name__} has set_epoch, so its rows may differ by epoch"
        if hasattr(self.cls, "to_reader"):
            return f"{self.cls.__name__} has its own reader"
        if isinstance(self.cls, type) and issubclass(self.cls, IterableDataset):
            return f"{self.cls.__name__} is a stream"
        return None

    @property
    def streamed(self) -> bool:
        """True if Ray Data reads the rows."""
        return hasattr(self.cls, "to_ray")

    def make(self) -> Any:
        return make_dataset(self.node, self.name, self.seed, self.project)

    def describes(self, manifest: Manifest) -> bool:
        """Return True if a prepared dataset has this class and these arguments, whatever its code."""
        arguments = json.loads(json.dumps(self.arguments, default=str))
        return (manifest.dataset, manifest.arguments) == (self.node["_target_"], arguments)

    def full_name(self, dataset: Any) -> str:
        """Return the name of the prepared dataset for a dataset. Raises DatasetError if it cannot be prepared."""
        content: list[Any]
        if self.streamed:
            stream = stream_of(dataset, self.name)
            content = [stream.schema(), *map(_file_facts, sorted(stream.input_files()))]
            for row in stream.take(SAMPLE):
                content += [numpy.asarray(row[key]).tobytes() for key in sorted(row)]
        else:
            rows = rows_of(dataset, self.name)
            if rows == 0:
                raise DatasetError(f"datasets.{self.name} has no rows")
            skipped = {self.storage, *map(str, self.project.resolve().parents)}
            content = [rows, *_files_in(self.arguments, skipped)]
            for key, column in self.sample(dataset, rows).items():
                content += [key, dtype_name(column), tuple(column.shape), as_numpy(column).tobytes()]
        return f"{self.prefix}-{digest(content)}"

    def sample(self, dataset: Any, rows: int) -> Batch:
        """Return a batch of `some_rows`, or of the first rows of a stream, each stacked alone.

        Raises DatasetError if they differ or are not tensors.
        """
        reader = BatchReader(dataset, self.name)
        if isinstance(dataset, IterableDataset):
            batches = {number: reader.stack([row], [number]) for number, row in enumerate(islice(dataset, SAMPLE))}
        else:
            batches = {row: reader.read([row]) for row in some_rows(rows)}
        if not batches:
            raise DatasetError(f"datasets.{self.name} has no rows")
        schema = self.tensors(next(iter(batches.values())))
        for row, batch in batches.items():
            self.check_schema(schema, schema_of(batch), str(row))
        return {key: torch.cat([batch[key] for batch in batches.values()]) for key in schema}

    def tensors(self, batch: Batch) -> Schema:
        """Return the schema of a batch. Raises DatasetError if a value is not a tensor."""
        for key, value in batch.items():
            if not isinstance(value, torch.Tensor):
                problem = f"{key!r} is a {type(value).__name__}, and only tensors are stored"
                raise self.error(problem, "Leave it out of ray_map_batches")
        return schema_of(batch)

    def check_schema(self, expected: Schema, schema: Schema, rows: str) -> None:
        if schema != expected:
            raise self.error(
                f"row 0 is {format_schema(expected)}, row {rows} is {format_schema(schema)}",
                f"Make them match in {'to_ray' if self.streamed else 'ray_map_batches'}",
            )

    def error(self, problem: str, hint: str = "") -> DatasetError:
        switch = f"prepare = False in {self.cls.__name__}"
        cure = f"{hint}, or set {switch}" if hint else f"Set {switch}, so that its samples are read every time"
        return DatasetError(f"datasets.{self.name} cannot be prepared: {problem}. {cure}")


def _arguments(node: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in node.items() if key not in ("_target_", *LOADER_ARGUMENTS)}


def some_rows(rows: int) -> list[int]:
    """Return the numbers of `SAMPLE` rows, from the first to the last."""
    return sorted({round(index * (rows - 1) / (SAMPLE - 1)) for index in range(SAMPLE)})


def schema_of(batch: Batch) -> Schema:
    return {
        key: (dtype_name(column), tuple(column.shape[1:]))
        if isinstance(column, torch.Tensor)
        else (type(column).__name__, ())
        for key, column in batch.items()
    }


def format_schema(schema: Schema) -> str:
    return ", ".join(f"{key} {dtype} {shape}" for key, (dtype, shape) in schema.items())


def _files_in(arguments: Any, skipped: Set[str]) -> list[str]:
    """Return sizes and times of every file and folder named in arguments."""
    if isinstance(arguments, dict | list):
        items = arguments.values() if isinstance(arguments, dict) else arguments
        return [facts for item in items for facts in _files_in(item, skipped)]
    return [_file_facts(arguments, skipped)] if isinstance(arguments, str) and len(arguments) < 4096 else []


def _file_facts(path: str, skipped: Set[str] = frozenset()) -> str:
    """Return a path with the size and modification time of its file, or a digest of those of all files in its folder.

    Hidden folders and `skipped` are left out: the storage, to which runs write, and folders that contain the project,
    such as the whole disk of an argument `sep="/"`.
    """
    if Path(path).is_file():
        facts = Path(path).stat()
        return f"{path} {facts.st_size} {facts.st_mtime_ns}"
    if not path or not Path(path).is_dir():
        return path
    root, files, seen = os.path.realpath(path), list[str](), {*skipped}
    for folder, folders, names in os.walk(root, followlinks=True):
        if (real := os.path.realpath(folder)) in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "__pycache__")
        for name in names:
            with contextlib.suppress(OSError):  # a broken link, or one to itself
                facts = Path(folder, name).stat()
                files.append(f"{folder[len(root) :]}/{name} {facts.st_size} {facts.st_mtime_ns}")
    return f"{path} {digest(sorted(files))}" if files else path


def digest(content: Sequence[Any]) -> str:
    """Return a short digest of bytes, and of other values as text."""
    found = hashlib.sha256()
    for item in content:
        data = item if isinstance(item, bytes) else str(item).encode()
        found.update(len(data).to_bytes(8, "big") + data)
    return found.hexdigest()[:12]


def _code_of(cls: type, project: Path) -> list[str]:
    """Return the definitions of a class and of all project code that it refers to, without comments and layout."""
    code: dict[tuple[str, str], str] = {}
    definitions_in = cache(_definitions)  # until a notebook changes them
    todo = [(cls.__module__, cls.__name__)]
    while todo:
        module, name = todo.pop()
        if (module, name) in code:
            continue
        definitions = definitions_in(module, project)
        nodes = definitions.get(name, []) if name else [node for nodes in definitions.values() for node in nodes]
        code[module, name] = "\n".join(ast.dump(node) for node in nodes)
        for node in nodes:
            todo += _references(node, module)
    return [f"{module}.{name}: {text}" for (module, name), text in sorted(code.items()) if text]


def _definitions(module: str, project: Path) -> dict[str, list[ast.AST]]:
    """Return the statements that define each name of a module; empty for modules of libraries."""
    found = _spec(module) if module.partition(".")[0] != "mlx_runtime" else None
    file = Path((found.origin if found else None) or "/")
    if file.suffix != ".py" or not file.is_relative_to(project) or "site-packages" in file.parts:
        return {}
    definitions: dict[str, list[ast.AST]] = {}
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [(alias.asname or alias.name).partition(".")[0] for alias in node.names]
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [item.id for target in targets for item in ast.walk(target) if isinstance(item, ast.Name)]
        for name in names:
            definitions.setdefault(name, []).append(node)
    return definitions


def _references(node: ast.AST, module: str) -> Iterator[tuple[str, str]]:
    """Yield the references of a statement as (module, name), with an empty name for a whole module."""
    for item in ast.walk(node):
        if isinstance(item, ast.Name):
            yield module, item.id
        elif isinstance(item, ast.Import):
            yield from ((alias.name, "") for alias in item.names)
        elif isinstance(item, ast.ImportFrom):
            source = "." * item.level + (item.module or "")
            if item.level:
                found = _spec(module)
                in_package = found is not None and found.submodule_search_locations is not None
                source = importlib.util.resolve_name(source, module if in_package else module.rpartition(".")[0])
            for alias in item.names:
                yield source, "" if alias.name == "*" else alias.name
                yield f"{source}.{alias.name}", ""  # may be a module


def _spec(module: str) -> ModuleSpec | None:
    """Return the spec of a module, imported or not; None if there is none."""
    with contextlib.suppress(ImportError, ValueError, AttributeError):
        return importlib.util.find_spec(module)
    return None
