"""Losses for the group `Losses`: plain functions. Their epoch values are means over all rows of all workers."""

from mlx_runtime.loop.losses import Mean

__all__ = ["Mean"]
