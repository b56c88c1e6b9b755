"""Tensors that share the memory of others, but are neither their views nor leaves."""

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
"""Returns a tensor with the memory and the gradient of another one, which may be changed in place."""
