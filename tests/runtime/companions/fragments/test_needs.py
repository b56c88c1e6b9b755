"""Memory that models and optimizers need on a worker."""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.testing._internal.distributed.fake_pg import FakeStore

from mlx_runtime.companions.fragments.needs import memory_needs

pytestmark = pytest.mark.pure


def groups(optimizer: Callable[..., Any] = torch.optim.Adam) -> Any:
    net = nn.Sequential(nn.Linear(100, 50, bias=False), nn.Linear(50, 50, bias=False))
    net[1].requires_grad_(False)
    return SimpleNamespace(net=net, again=net[0]), SimpleNamespace(adam=optimizer(net.parameters(), lr=0.1))


@pytest.fixture
def two_workers() -> Iterator[None]:
    """A group whose collectives do nothing."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


class TestNeeds:
    @pytest.mark.parametrize(
        ("optimizer", "per_parameter"),
        [(torch.optim.Adam, 2), (torch.optim.SGD, 0), (partial(torch.optim.SGD, momentum=0.9), 1)],
    )
    def test_each_parameter_counts_once(self, optimizer: Callable[..., Any], per_parameter: int) -> None:
        needs = memory_needs(*groups(optimizer))
        assert (needs.parameters, needs.gradients) == (4 * 7500, 4 * 5000)
        assert needs.optimizer_states // 4 // 5000 == per_parameter

    def test_they_are_the_same_before_and_after_the_first_step(self) -> None:
        models, optimizers = groups()
        before = memory_needs(models, optimizers)
        models.net(torch.ones(3, 100)).sum().backward()
        optimizers.adam.step()
        stored = sum(item.nbytes for state in optimizers.adam.state.values() for item in state.values())
        assert before == memory_needs(models, optimizers) == dataclasses.replace(before, optimizer_states=stored)

    @pytest.mark.usefixtures("two_workers")
    def test_shards_count_even_while_they_are_gathered(self) -> None:
        models, _ = groups()
        fully_shard(models.net, mesh=init_device_mesh("cpu", (2,)))
        optimizers = SimpleNamespace(adam=torch.optim.Adam(models.net.parameters()))
        del models.again
        models.net.unshard()
        assert memory_needs(models, optimizers).parameters == 4 * 7500 // 2
        assert memory_needs(models, optimizers).optimizer_states // 4 // 2500 == 2

    def test_no_step_is_counted(self) -> None:
        seen: list[Any] = []
        hook = register_optimizer_step_post_hook(lambda *_: seen.append(1))
        memory_needs(*groups())
        hook.remove()
        assert not seen

    def test_an_optimizer_that_cannot_be_copied_counts_what_it_holds(self) -> None:
        class Stubborn(torch.optim.SGD):
            def __init__(self, params: Any, lr: float, *, must: int) -> None:
                super().__init__(params, lr, momentum=0.9)

        models, optimizers = groups(partial(Stubborn, must=1))
        assert memory_needs(models, optimizers).optimizer_states == 0
