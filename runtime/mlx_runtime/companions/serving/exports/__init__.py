"""Exports: a program and its weights in a folder that needs nothing of this package, and the proof of its outputs."""

from mlx_runtime.importing import door

__all__, __getattr__ = door(
    __name__,
    artifact="export",
    exported="EXPORT load_export",
)
