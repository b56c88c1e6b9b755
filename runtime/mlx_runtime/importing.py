"""Importing large libraries without the work that Python's garbage collector makes of it."""

import atexit
import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def many_imports() -> Iterator[None]:
    """Let the collector rest while the block imports: it would look again and again at objects that all stay.

    Importing torch, Ray and TorchMetrics takes a quarter less. What has been imported is not looked at afterwards
    either, so that forked processes keep sharing its memory.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def exit_quickly() -> None:
    """Let this process end without a last collection over all modules, which takes a second or two."""
    atexit.register(gc.freeze)
