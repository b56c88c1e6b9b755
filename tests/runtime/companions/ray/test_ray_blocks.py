"""The developer API of Ray that ray_blocks.py uses. A version of Ray that changes it fails here, not in a run."""

import inspect
import typing

import numpy as np
import pyarrow
import pytest
import ray.data
from ray.data._internal.execution.interfaces import RefBundle
from ray.data.block import BlockMetadata

from mlx_runtime.companions.ray.ray_blocks import block_arrays

pytestmark = pytest.mark.pure


def test_a_dataset_gives_bundles_of_references() -> None:
    returned = inspect.signature(ray.data.Dataset.iter_internal_ref_bundles).return_annotation
    assert typing.get_args(returned) == (RefBundle,)
    for name in ("block_refs", "metadata"):
        assert isinstance(getattr(RefBundle, name), property)
    assert "slices" in RefBundle.__dataclass_fields__
    assert "num_rows" in BlockMetadata.__dataclass_fields__


def test_rows_of_a_block_as_arrays() -> None:
    block = pyarrow.table({"x": [1, 2, 3, 4], "y": [0.5, 1.5, 2.5, 3.5]})
    arrays = block_arrays(block, 1, 3)
    assert {name: array.tolist() for name, array in arrays.items()} == {"x": [2, 3], "y": [1.5, 2.5]}
    assert all(isinstance(array, np.ndarray) for array in arrays.values())
