"""Tensors arrive in the form in which they travel."""

import pytest
import torch

from mlx_runtime.companions.fragments.wire import Feedback, Wire

pytestmark = pytest.mark.pure


def arrived(wire: Wire, value: torch.Tensor, feedback: Feedback | None = None) -> torch.Tensor:
    packed = wire.pack(value, feedback, "point")
    assert (packed.shape, packed.dtype) == (
        (expected := wire.empty(value.shape, value.dtype, value.device)).shape,
        expected.dtype,
    )
    return wire.unpack(packed, value.shape, value.dtype)


def test_int8_keeps_each_value_up_to_half_a_step_of_its_row() -> None:
    torch.manual_seed(0)
    value = torch.randn(3, 5, 16) * torch.tensor([1e-6, 1.0, 1e6]).view(3, 1, 1)
    value[0, 0] = 0
    found, wire = arrived(Wire("int8"), value), Wire("int8")
    steps = value.abs().amax(-1, keepdim=True) / 127
    assert ((found - value).abs() <= 0.501 * steps).all()
    assert (found != value).any()
    assert wire.pack(value).nbytes == value.numel() + 4 * 15


def test_what_is_not_finite_stays_so() -> None:
    value = torch.ones(3, 4)
    value[0, 1], value[1, 2] = float("nan"), float("inf")
    found = arrived(Wire("int8"), value)
    assert not found[:2].isfinite().any()
    assert torch.equal(found[2], value[2])


def test_errors_of_gradients_are_carried_over() -> None:
    torch.manual_seed(0)
    value, feedback, wire = torch.randn(4, 8), Feedback(), Wire("int8")
    total = sum((arrived(wire, value, feedback) for _ in range(50)), torch.zeros(4, 8))
    alone = (arrived(wire, value) - value).abs().max()
    assert (total / 50 - value).abs().max() < alone / 20
    assert torch.equal(arrived(wire, value[:2], feedback), arrived(wire, value[:2])), "of another shape"


@pytest.mark.parametrize("kind", [None, "bf16", "fp16", "int8"])
@pytest.mark.parametrize(
    "value",
    [torch.tensor(1.5), torch.arange(3.0), torch.zeros(0, 4), torch.arange(6).view(2, 3), torch.ones(2, 2).double()],
)
def test_other_tensors_arrive_as_they_are(kind: str | None, value: torch.Tensor) -> None:
    found = arrived(Wire(kind), value)
    assert (found.dtype, found.shape) == (value.dtype, value.shape)
    assert torch.equal(found, value)
