"""Updates of several steps are those of one large step."""

import pytest
import torch
from torch import nn

from mlx_runtime.accumulation import Accumulation
from mlx_runtime.sampling import micro_batches

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("batch_size", "wanted", "workers", "found"),
    [
        (4, 2, 1, (4, 2)),
        (4, 4, 2, (4, 2)),
        (4, 3, 2, (3, 2)),
        (8, 2, 4, (4, 1)),
        (4, 2, 3, (3, 1)),  # 8 rows cannot be shared out: 9 is nearest
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


@pytest.mark.parametrize("zero_first", [False, True], ids=["zero_grad last", "zero_grad first"])
def test_updates_are_those_of_whole_batches(zero_first: bool) -> None:
    """Eight rows at a time, and the same as four and four; the last update of the pass has four only."""
    data = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))

    def trained(batch: int, steps_each: int) -> tuple[nn.Module, list[float]]:
        torch.manual_seed(0)
        net = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
        accumulation = Accumulation()
        accumulation.patch([optimizer, schedule, "something else"])
        accumulation.patch([optimizer, schedule])  # a second time changes nothing
        rates = []
        parts = data.split(batch)
        for number, rows in enumerate(parts, start=1):
            accumulation.over(number, len(parts), steps_each)
            if zero_first:
                optimizer.zero_grad()
            net(rows).square().mean().backward()
            optimizer.step()
            schedule.step()
            if not zero_first:
                optimizer.zero_grad()
            rates.append(optimizer.param_groups[0]["lr"])
        return net, rates

    whole, rates = trained(8, 1)
    parts, more_rates = trained(4, 2)
    assert torch.allclose(whole.weight, parts.weight, atol=1e-6)
    assert rates == more_rates[1::2] + more_rates[-1:]


def test_hooks_see_updates_only() -> None:
    net = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    seen: list[int] = []
    optimizer.register_step_post_hook(lambda *_: seen.append(1))
    accumulation = Accumulation()
    accumulation.patch([optimizer])
    for number in range(1, 5):
        accumulation.over(number, 4, 2)
        net(torch.ones(1, 1)).backward()
        optimizer.step()
    assert len(seen) == 2


def test_an_update_that_was_left_in_the_middle_is_forgotten() -> None:
    net = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    accumulation = Accumulation()
    accumulation.patch([optimizer])
    before = net.weight.item()
    accumulation.over(1, 4, 2)
    net(torch.full((1, 1), 50.0)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    accumulation.begin()
    for number in (1, 2):
        accumulation.over(number, 4, 2)
        net(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert net.weight.item() == pytest.approx(before - 1)


def test_a_gradient_that_only_an_earlier_step_has_counts() -> None:
    net = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    accumulation = Accumulation()
    accumulation.patch([optimizer])
    before = net.weight.item()
    accumulation.over(1, 2, 2)
    net(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    accumulation.over(2, 2, 2)
    optimizer.step()
    assert net.weight.item() == pytest.approx(before - 0.5)
