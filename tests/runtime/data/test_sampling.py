"""Plans: every row once, the same number of steps on every rank, and reassignment of the rest of a pass."""

import dataclasses
import random

import pytest

from mlx_runtime.data.sampling import ShardPlan, epoch_order, micro_batches

pytestmark = pytest.mark.pure


def random_plan(chance: random.Random) -> ShardPlan:
    world_size, batch_size = chance.randint(1, 9), chance.randint(1, 12)
    rows = chance.randint(world_size, 200)
    return ShardPlan(rows, world_size, batch_size, drop_last=chance.random() < 0.3, chunk=chance.randint(1, 4))


def assigned(plan: ShardPlan) -> list[list[int]]:
    """Return the positions of each rank."""
    return [plan.positions(rank).tolist() for rank in range(plan.world_size)]


def unread(plan: ShardPlan) -> list[int]:
    return [position for start, stop in plan.unread for position in range(start, stop)]


@pytest.mark.parametrize("seed", range(5))
def test_every_row_once_in_equal_steps_whatever_was_read_before_and_by_how_many(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(400):
        plan = random_plan(chance)
        for _ in range(3):  # interrupted twice, and resumed with a different number of workers each time
            positions = assigned(plan)
            sizes = [plan.sizes(rank) for rank in range(plan.world_size)]
            assert {len(of_rank) for of_rank in sizes} == {plan.steps}
            assert [len(of_rank) for of_rank in positions] == [sum(of_rank) for of_rank in sizes]
            read, left = sorted(position for of_rank in positions for position in of_rank), unread(plan)
            if plan.drop_last:
                assert read == left[: len(read)]
                assert len(left) - len(read) < plan.world_size * plan.batch_size
                assert {size for of_rank in sizes for size in of_rank} <= {plan.batch_size}
            else:
                assert read == left or (read == [] and len(left) < plan.world_size)
                assert all(1 <= size <= max(2, plan.batch_size) for of_rank in sizes for size in of_rank)
                assert {size for of_rank in sizes for size in of_rank[:-2]} <= {plan.batch_size}
            if plan.steps > 1 and plan.batch_size > 3:
                assert min(size for of_rank in sizes for size in of_rank) > 1
            if plan.batch_size > 1:
                assert max((size for of_rank in sizes for size in of_rank), default=1) <= plan.batch_size
            stop = chance.randint(0, plan.steps)
            before = plan.read_after(stop)
            taken = {
                position
                for of_rank, size in zip(positions, sizes, strict=True)
                for position in of_rank[: sum(size[:stop])]
            }
            assert {position for start, end in before for position in range(start, end)} == taken | (
                set(range(plan.rows)) - set(left)
            )
            plan = ShardPlan(plan.rows, chance.randint(1, 9), plan.batch_size, plan.drop_last, plan.chunk, before)


def test_a_limited_pass_ends_early_whoever_goes_on_with_it() -> None:
    chance = random.Random(2)
    for _ in range(400):
        whole = random_plan(chance)
        limit = chance.randint(1, 8)
        most = limit * whole.world_size * whole.batch_size
        plan = dataclasses.replace(whole, limit=most)
        assert plan.steps == min(limit, whole.steps)
        if most <= whole.assigned:
            read = sorted(position for of_rank in assigned(plan) for position in of_rank)
            assert read == list(range(most))
            assert {tuple(plan.sizes(rank)) for rank in range(plan.world_size)} == {(plan.batch_size,) * limit}
        before = plan.read_after(chance.randint(0, plan.steps))
        rest = dataclasses.replace(plan, world_size=chance.randint(1, 9), drop_last=False, read=before)
        left = min(most, plan.rows) - sum(stop - start for start, stop in before)
        assert sum(len(positions) for positions in assigned(rest)) == (left if left >= rest.world_size else 0)
        assert len({len(rest.sizes(rank)) for rank in range(rest.world_size)}) == 1


def test_the_last_two_batches_share_what_is_left() -> None:
    plan = ShardPlan(rows=9, world_size=2, batch_size=4)  # one worker has five rows, the other four
    assert [plan.sizes(0), plan.sizes(1)] == [[3, 2], [2, 2]]
    assert ShardPlan(rows=65, world_size=1, batch_size=32).sizes(0) == [32, 31, 2]  # BatchNorm rejects a single row


@pytest.mark.parametrize(
    ("batch_size", "wanted", "workers", "found"),
    [
        (4, 3, 2, (3, 2)),
        (4, 2, 3, (3, 1)),  # 8 rows cannot be divided: 9 is closest
        (10, 11, 10, (10, 1)),  # 100 rows of 110, not eleven steps of one row
    ],
)
def test_another_number_of_workers_comes_to_the_same_global_batch(
    batch_size: int, wanted: int, workers: int, found: tuple[int, int]
) -> None:
    assert micro_batches(batch_size, wanted, workers) == found


def test_order_changes_with_epoch_and_seed_and_nothing_else() -> None:
    orders = {(seed, epoch): epoch_order(50, seed, epoch, shuffle=True).tolist() for seed in (0, 1) for epoch in (0, 1)}
    assert len({tuple(order) for order in orders.values()}) == 4
    assert epoch_order(50, 1, 1, shuffle=True).tolist() == orders[1, 1]
    assert epoch_order(5, 1, 1, shuffle=False).tolist() == [0, 1, 2, 3, 4]
