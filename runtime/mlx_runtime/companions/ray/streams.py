"""Streams of Ray Data: results of `to_ray()` of datasets, their blocks, and their errors.

Blocks are read through developer API of Ray Data 2.60, because its public iterators copy each block into the process
that iterates, so all data would go through one node. `test_streams.py` fails when Ray changes it.
"""

import inspect
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mlx_runtime.config.building import build
from mlx_runtime.data.batches import Batch, dataset_error
from mlx_runtime.data.definitions import adopt_dataset, construction
from mlx_runtime.errors import DatasetError, MlxError
from mlx_runtime.importing import add_to_path

Part = tuple[Any, int, int]
"""Rows of a block: (reference to the block, first row, row after the last)."""


def make_dataset(node: Mapping[str, Any], name: str, seed: int, project: Path) -> Any:
    """Construct the dataset of a node in conf.yaml, in any process of the cluster."""
    if project.is_dir():
        add_to_path(project)
    with construction(node, seed):
        return adopt_dataset(build(node, f"datasets.{name}"), name, node)


def stream_of(dataset: Any, name: str, seed: int | None = None) -> Any:
    """Return the `ray.data.Dataset` from `to_ray`, set to preserve its order.

    `to_ray` has an argument `seed` if it can shuffle; None means the stored order.
    """
    import ray.data

    keep_order()
    takes_seed = "seed" in inspect.signature(dataset.to_ray).parameters
    stream = dataset.to_ray(seed=seed) if takes_seed else dataset.to_ray()
    if not isinstance(stream, ray.data.Dataset):
        returned = f"{type(dataset).__name__}.to_ray() returned {type(stream).__name__}"
        raise DatasetError(f"datasets.{name}: {returned}; it must return a ray.data.Dataset")
    keep_order(stream.context)  # a dataset created earlier has its own settings
    return stream


def keep_order(context: Any = None) -> None:
    """Make Ray Data preserve the order of blocks and raise user exceptions, in this process or for one dataset."""
    import ray.data

    context = context or ray.data.DataContext.get_current()
    context.execution_options.preserve_order = True
    context.raise_original_map_exception = True


def rows_of_stream(dataset: Any, stream: Any) -> int:
    """Return the number of rows in one pass: the dataset's `__len__`, by default Ray Data's count."""
    return len(dataset) if hasattr(dataset, "__len__") else int(stream.count())


def stream_blocks(stream: Any, name: str) -> Generator[Part]:
    """Yield the blocks of a stream in order. Raises MlxError if reading or mapping failed."""
    try:
        for bundle in stream.iter_internal_ref_bundles():
            slices = bundle.slices or [None] * len(bundle.block_refs)
            for reference, metadata, part in zip(bundle.block_refs, bundle.metadata, slices, strict=True):
                yield reference, *((part.start_offset, part.end_offset) if part else (0, metadata.num_rows))
    except MlxError:
        raise
    except Exception as error:  # of Ray, or of user code
        raise dataset_error(error, f"datasets.{name} cannot be read") from error


def columns_of(block: Any, start: int, stop: int, name: str) -> Batch:
    """Return rows of a block as `{name: tensor (rows, ...)}`. Raises DatasetError if a column is not numeric."""
    from ray.data.block import BlockAccessor

    rows, columns = BlockAccessor.for_block(block).slice(start, stop), {}
    for key, array in BlockAccessor.for_block(rows).to_numpy().items():
        try:
            columns[key] = torch.from_numpy(np.array(array))  # a copy: blocks are shared and read-only
        except TypeError as error:
            raise DatasetError(
                f"datasets.{name}: column {key!r} is {array.dtype}, not numbers of one shape; "
                "convert it to numbers, or drop it, in to_ray()"
            ) from error
    return columns
