"""`losses.Mean`: a plain function as a loss."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mlx_runtime import MlxError
from mlx_runtime.losses import Mean
from mlx_runtime.runs.metric_states import compute_from, merge_states, state_of

pytestmark = pytest.mark.pure


def weighted_error(outputs: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return (weights * (outputs - targets).square()).sum() / weights.sum()


def batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, 5, requires_grad=True), torch.randint(5, (rows,))


def test_the_loss_of_a_batch_and_the_mean_over_rows_of_workers() -> None:
    losses = [Mean(F.cross_entropy, label_smoothing=0.1) for _ in range(2)]
    batches = [batch(rows) for rows in (4, 1, 3)]
    for loss, (outputs, targets) in zip((losses[0], losses[0], losses[1]), batches, strict=True):
        value = loss(outputs, targets)
        assert torch.equal(value, F.cross_entropy(outputs, targets, label_smoothing=0.1))
        assert value.requires_grad
    states = [state_of(loss) for loss in losses]
    outputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    whole = F.cross_entropy(outputs, targets, label_smoothing=0.1)
    torch.testing.assert_close(compute_from(losses[0], merge_states(losses[0], states)), whole.detach())
    losses[0].reset()
    losses[0].update(*batches[0])
    assert losses[0].compute() == F.cross_entropy(*batches[0], label_smoothing=0.1)


def test_targets_that_are_ignored_count_nothing() -> None:
    loss = Mean(F.cross_entropy, ignore_index=-1)
    outputs, targets = batch(6)
    targets[:4] = -1
    loss(outputs, targets)
    assert (loss.calls, loss.counted) == (1, 2)
    nothing, none = batch(3)
    value = loss(nothing, torch.full_like(none, -1))
    value.backward()
    assert value == 0
    assert not nothing.grad.any()
    torch.testing.assert_close(loss.compute(), F.cross_entropy(outputs, targets, ignore_index=-1).detach())


def test_a_count_of_the_callers_own() -> None:
    loss = Mean(weighted_error)
    batches = [(torch.randn(rows), torch.randn(rows), torch.rand(rows)) for rows in (4, 2)]
    for parts in batches:
        loss.update(*parts, count=parts[2].sum())
    whole = weighted_error(*(torch.cat(parts) for parts in zip(*batches, strict=True)))
    torch.testing.assert_close(loss.compute(), whole)


def squares(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).square().sum()


@pytest.mark.parametrize("function", [squares, F.mse_loss, nn.MSELoss(reduction="sum")])
def test_a_function_that_sums(function: Any) -> None:
    """Its values are those of the mean over rows, also for `self.backward`."""
    summed, mean = Mean(function, reduction="sum"), Mean(F.mse_loss)
    for rows in (4, 1):
        batch = torch.randn(rows, requires_grad=True), torch.randn(rows)
        torch.testing.assert_close(summed(*batch), mean(*batch))
    torch.testing.assert_close(summed.compute(), mean.compute())
    nothing = Mean(F.cross_entropy, ignore_index=-1, reduction="sum")
    outputs = torch.randn(3, 5, requires_grad=True)
    nothing(outputs, torch.full((3,), -1)).backward()
    assert not outputs.grad.any()


def test_a_function_that_seems_to_sum() -> None:
    """Each pass ends with a short batch."""

    def read(loss: Mean) -> Mean:
        for rows in (8, 8, 3) * 3:
            loss(1 + torch.rand(rows, requires_grad=True) / 8, torch.zeros(rows))
        return loss

    assert read(Mean(total)).grows
    assert not read(Mean(F.mse_loss)).grows


def total(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).square().sum()


def test_what_is_no_mean() -> None:
    with pytest.raises(MlxError, match=r"^losses.Mean takes a function, like F.cross_entropy, not 'cross_entropy'$"):
        Mean("cross_entropy")
    for function in (partial(F.cross_entropy, reduction="sum"), nn.MSELoss(reduction="sum")):
        with pytest.raises(MlxError, match=r"^the function has reduction='sum', and losses.Mean 'mean'; give both the"):
            Mean(function)
    with pytest.raises(MlxError, match=r"^the function has reduction='mean', and losses.Mean 'sum'; give both"):
        Mean(nn.MSELoss(), reduction="sum")
    with pytest.raises(MlxError, match=r"^losses.Mean takes reduction='mean' or 'sum', not 'none'$"):
        Mean(F.cross_entropy, reduction="none")
    with pytest.raises(MlxError, match=r"returns the mean of a batch; this one returned a tensor \(3, 5\)$"):
        Mean(torch.sub)(torch.ones(3, 5), torch.ones(3, 5))
