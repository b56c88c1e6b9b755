"""The steps that form an update. test_optimization.py tests that the update equals that of one large step."""

import pytest

from mlx_runtime.data.sampling import micro_batches

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("batch_size", "wanted", "workers", "found"),
    [
        (4, 2, 1, (4, 2)),
        (4, 3, 2, (3, 2)),
        (4, 2, 3, (3, 1)),  # 8 rows cannot be divided: 9 is closest
        (1, 1, 4, (1, 1)),
        (10, 11, 10, (10, 1)),  # 100 rows of 110, not eleven steps of one row
    ],
)
def test_another_number_of_workers_comes_to_the_same_global_batch(
    batch_size: int, wanted: int, workers: int, found: tuple[int, int]
) -> None:
    assert micro_batches(batch_size, wanted, workers) == found
    assert found[0] <= batch_size
