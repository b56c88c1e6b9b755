"""Rows grouped by length: batches of similar lengths, every row once, exact resume with any number of workers."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from test_loaders import Rows, shard

from mlx_runtime.data.loaders import Loader
from mlx_runtime.errors import DatasetError

pytestmark = pytest.mark.pure

LENGTHS = torch.randint(1, 500, (990,), generator=torch.Generator().manual_seed(1))


class Texts(Rows):
    def __init__(self, rows: int = len(LENGTHS), batch_size: int = 8, lengths: Any = LENGTHS):
        super().__init__(rows, batch_size)
        self.group_by_length = lengths


def read(loader: Loader) -> list[list[int]]:
    return [batch["x"][:, 0].tolist() for batch in loader]


def interrupted(loader: Loader, batches: int) -> tuple[list[list[int]], dict[str, Any]]:
    """Read the first batches of a pass. Return them, and the state after them."""
    passed = iter(loader)
    taken = [next(passed)["x"][:, 0].tolist() for _ in range(batches)]
    return taken, loader.state_dict()


def loaders(workers: int, **options: Any) -> list[Loader]:
    return [shard(Texts(**options), rank, workers).iter_torch_batches() for rank in range(workers)]


def padding(batches: Sequence[Sequence[int]]) -> float:
    """Return the part of padded batches that is padding."""
    padded = sum(len(batch) * int(LENGTHS[batch].max()) for batch in batches)
    return 1 - sum(int(LENGTHS[batch].sum()) for batch in batches) / padded


@pytest.mark.parametrize("workers", [1, 3])
def test_batches_have_rows_of_similar_lengths_on_all_workers(workers: int) -> None:
    ranks = [read(loader) for loader in loaders(workers)]
    assert sorted(row for rank in ranks for batch in rank for row in batch) == list(range(990))
    assert len({len(rank) for rank in ranks}) == 1
    plain = [read(loader) for loader in loaders(workers, lengths=None)]
    assert padding([batch for rank in plain for batch in rank]) > 0.4
    assert padding([batch for rank in ranks for batch in rank]) < 0.08
    for step in list(zip(*ranks, strict=True))[:-2]:  # so that no worker waits for the others
        longest = [int(LENGTHS[batch].max()) for batch in step]
        assert max(longest) - min(longest) < 60


def test_the_order_is_a_function_of_seed_epoch_and_world_size() -> None:
    loader, again = loaders(1)[0], loaders(1)[0]
    first, second = read(loader), read(loader)
    assert first == read(again)
    assert first != second
    longest = [int(LENGTHS[batch].max()) for batch in first]
    assert longest != sorted(longest)
    val = shard(Texts(), name="val").iter_torch_batches()
    assert read(val) == read(val)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_an_interrupted_pass_reads_the_rows_that_are_left(workers: int) -> None:
    taken, states = zip(*(interrupted(loader, 50) for loader in loaders(2)), strict=True)
    assert states[0]["group"] == 16
    after = loaders(workers)
    for loader in after:
        loader.load_state_dict(states[0])
    left = [read(loader) for loader in after]
    rows = [row for rank in (*taken, *left) for batch in rank for row in batch]
    assert sorted(rows) == list(range(990))
    if workers == 2:
        assert [one + other for one, other in zip(taken, left, strict=True)] == [read(item) for item in loaders(2)]
    following = [read(loader) for loader in after]
    assert sorted(row for rank in following for batch in rank for row in batch) == list(range(990))
    assert after[0].current is not None
    assert after[0].current.plan.group == 8 * workers


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([1, 2, 3], r"group_by_length has shape \(3,\); it must be one number for each of 990 rows"),
        ("tokens", "group_by_length is a str; it must be one number per row"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(lengths: Any, message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        len(loaders(1, lengths=lengths)[0])
