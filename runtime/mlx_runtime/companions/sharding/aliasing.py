"""Tensors that share the memory of others."""

from typing import Any

import torch


class _Alias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


alias: Any = _Alias.apply
"""Returns a tensor with the memory and the gradient of another one, which may be changed in place.

It is neither a view nor a leaf.
"""


def raw(value: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor, because NCCL has fewer types than torch."""
    return value.detach().view(-1).view(torch.uint8)
