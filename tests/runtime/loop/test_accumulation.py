"""The steps that form an update. test_optimization.py tests that the update equals that of one large step."""

import pytest

from mlx_runtime.data.sampling import micro_batches
from mlx_runtime.loop.optimization import Accumulation

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("batch_size", "wanted", "workers", "found"),
    [
        (4, 2, 1, (4, 2)),
        (4, 4, 2, (4, 2)),
        (4, 3, 2, (3, 2)),
        (8, 2, 4, (4, 1)),
        (4, 2, 3, (3, 1)),  # 8 rows cannot be divided: 9 is closest
        (1, 1, 4, (1, 1)),
        (6, 5, 4, (4, 2)),
        (6, 4, 3, (4, 2)),
        (10, 11, 10, (10, 1)),  # 100 rows of 110, not eleven steps of one row
        (1, 8, 7, (1, 1)),
    ],
)
def test_another_number_of_workers_comes_to_the_same_global_batch(
    batch_size: int, wanted: int, workers: int, found: tuple[int, int]
) -> None:
    assert micro_batches(batch_size, wanted, workers) == found
    assert found[0] <= batch_size


def test_the_last_update_of_a_pass_may_have_fewer_steps() -> None:
    accumulation = Accumulation()
    seen = []
    for number in range(1, 6):
        accumulation.begin_step(number, 5, 2)
        seen.append((accumulation.first, accumulation.last, accumulation.steps))
    assert seen == [(True, False, 2), (False, True, 2), (True, False, 2), (False, True, 2), (True, True, 1)]
