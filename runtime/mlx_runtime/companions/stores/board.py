"""TensorBoard for runs in an object store, on local copies of their event files."""

import contextlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from mlx_runtime.errors import MlxError
from mlx_runtime.storage.documents import stays_below
from mlx_runtime.storage.files import storage_at

MIRROR_S = 10.0
"""Interval for refreshing the copies."""


def serve(uri: str, command: Callable[[str], list[str]]) -> None:
    """Run the command for a folder with copies of the event files, and refresh them. Exits with it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends TensorBoard and deletes the copies
    with tempfile.TemporaryDirectory(prefix="mlx-board-") as temporary:
        _mirror(uri, Path(temporary))
        server = subprocess.Popen(command(temporary))
        try:
            while server.poll() is None:
                with contextlib.suppress(OSError, MlxError):
                    _mirror(uri, Path(temporary))
                with contextlib.suppress(subprocess.TimeoutExpired):
                    server.wait(MIRROR_S)
        finally:
            server.terminate()
            server.wait()
    sys.exit(server.returncode)


def _mirror(uri: str, folder: Path) -> None:
    """Copy event files that are new or have grown."""
    storage = storage_at(uri)
    found = [item for item in storage.below() if ".tfevents." in item.name and stays_below(item.path)]
    for item in found:
        file = folder / item.path
        if not file.exists() or file.stat().st_size != item.size_bytes:
            storage.download(file, item.path)
