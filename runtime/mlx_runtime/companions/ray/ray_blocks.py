"""Developer API of Ray Data 2.60: references to blocks, and their rows. `test_ray_blocks.py` fails when Ray changes it.

The public iterators copy each block into the process that iterates, which would take all data through one node.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import ray.data
from ray.data.block import BlockAccessor


def block_references(dataset: "ray.data.Dataset") -> Iterator[tuple[Any, int, int]]:
    """Execute a dataset. Yield a reference to each block, the first of its rows and the row after the last."""
    for bundle in dataset.iter_internal_ref_bundles():
        slices = bundle.slices or [None] * len(bundle.block_refs)
        for reference, metadata, part in zip(bundle.block_refs, bundle.metadata, slices, strict=True):
            yield reference, *((part.start_offset, part.end_offset) if part else (0, metadata.num_rows))


def block_arrays(block: Any, start: int, stop: int) -> "dict[str, np.ndarray[Any, Any]]":
    """Return rows of a block as arrays (rows, ...) by column."""
    rows = BlockAccessor.for_block(block).slice(start, stop)
    return dict(BlockAccessor.for_block(rows).to_numpy())
