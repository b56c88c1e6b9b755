"""The private API of torch that torch_private.py uses. A version of torch that changes it fails here, not in a run."""

import inspect

import pytest
import torch

pytestmark = pytest.mark.pure


def test_a_scaler_finds_infinite_gradients_by_this_name() -> None:
    assert list(inspect.signature(torch.amp.GradScaler._found_inf_per_device).parameters) == ["self", "optimizer"]
