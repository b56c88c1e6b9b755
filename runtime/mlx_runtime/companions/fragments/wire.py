"""The type in which float32 tensors travel between stages: as they are, or as halves."""

from collections.abc import Sequence

import torch

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Types by `cfg.fragments.traffic`."""


def wire_type(traffic: str | None, dtype: torch.dtype) -> torch.dtype:
    """Return the type in which values travel. Those that are not float32 travel as they are."""
    return HALVES[traffic] if traffic is not None and dtype == torch.float32 else dtype


def wire_bytes(traffic: str | None, shape: Sequence[int], dtype: torch.dtype) -> int:
    """Return the number of bytes of a tensor as it travels."""
    return torch.Size(shape).numel() * wire_type(traffic, dtype).itemsize
