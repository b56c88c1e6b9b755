"""The form in which float32 tensors travel between stages: as they are, as halves, or as int8 with a scale per row."""

from collections.abc import Hashable, Sequence

import torch

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}

Feedback = dict[Hashable, torch.Tensor]
"""Rounding errors of the last tensor that was sent from each point of a pass, which are added to the next one."""


class Wire:
    """Packs tensors and unpacks them again.

    Args:
        kind: `cfg.fragments.traffic`.
    """

    def __init__(self, kind: str | None) -> None:
        self._half = HALVES.get(kind or "")
        self._int8 = kind == "int8"

    def type_of(self, dtype: torch.dtype) -> torch.dtype:
        """Return the type in which values travel, unless as int8."""
        return self._half if self._half is not None and dtype == torch.float32 else dtype

    def size(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Return the number of bytes of a packed tensor."""
        if not self._packs(shape, dtype):
            return torch.Size(shape).numel() * self.type_of(dtype).itemsize
        rows, width = _rows(shape)
        return rows * (4 + width)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for a packed tensor."""
        if not self._packs(shape, dtype):
            return torch.empty(shape, dtype=self.type_of(dtype), device=device)
        return torch.empty(self.size(shape, dtype), dtype=torch.uint8, device=device)

    def pack(self, value: torch.Tensor, feedback: Feedback | None = None, point: Hashable = None) -> torch.Tensor:
        """Return a tensor as it travels. With `feedback`, errors at a point are carried over to its next tensor."""
        if not self._packs(value.shape, value.dtype):
            return value.to(self.type_of(value.dtype)).contiguous()
        rows = value.reshape(_rows(value.shape))
        if feedback is not None and point in feedback and feedback[point].shape == rows.shape:
            rows = rows + feedback[point]
        scale = rows.abs().amax(1, keepdim=True) / 127  # inf or nan if a value of the row is
        steps = (rows / scale.where(scale != 0, 1.0)).round_()
        if feedback is not None:
            feedback[point] = rows - steps * scale
        numbers = steps.nan_to_num_().clamp_(-127, 127).to(torch.int8)
        return torch.cat([scale.view(torch.uint8).reshape(-1), numbers.view(torch.uint8).reshape(-1)])

    def unpack(self, packed: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        if not self._packs(shape, dtype):
            return packed.to(dtype)
        rows, width = _rows(shape)
        scale, numbers = packed[: 4 * rows], packed[4 * rows :]
        return (numbers.view(torch.int8).view(rows, width) * scale.view(torch.float32).unsqueeze(1)).view(*shape)

    def _packs(self, shape: Sequence[int], dtype: torch.dtype) -> bool:
        return self._int8 and dtype == torch.float32 and len(shape) > 1 and 0 not in shape


def _rows(shape: Sequence[int]) -> tuple[int, int]:
    """Return the number of rows of a tensor, along all dimensions but the last, and their width."""
    width = shape[-1]
    return torch.Size(shape).numel() // width, width
