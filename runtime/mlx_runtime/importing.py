"""Imports of large libraries without repeated garbage collection."""

import atexit
import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def many_imports() -> Iterator[None]:
    """Turn garbage collection off within the block.

    Imported objects stay, and scanning them repeatedly makes importing torch, Ray and TorchMetrics a third slower.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def exit_quickly() -> None:
    """Skip the final garbage collection when this process exits, which takes a second or two."""
    atexit.register(gc.freeze)
