"""Predictions for datasets and files: blocks of rows, in order, that survive an interruption."""

from mlx_runtime.importing import door

__all__, __getattr__ = door(
    __name__,
    offline="Options predict",
    tables="is_list is_number values_of",
)
