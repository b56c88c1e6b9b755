"""TensorBoard on runs, wherever they are stored."""

import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from mlx_runtime.errors import MlxError, UsageError
from mlx_runtime.runs.folder import find_run
from mlx_runtime.runs.lookup import storage_root
from mlx_runtime.storage.files import Storage, is_uri, joined

MIRROR_S = 10.0
"""Interval at which local copies of an object store are refreshed."""


def serve(name: str | None, run: str | None, port: int) -> None:
    """Replace this process with TensorBoard. Does not return.

    Args:
        name: an experiment in the storage, or the path of any folder with runs; None for the whole storage.
        run: `run_003`, `3` or `latest`; None for all runs.
        port: port on 127.0.0.1.

    Raises:
        UsageError: no such experiment, run or folder.
    """
    path = _log_path(name, run)
    if is_uri(path):
        _serve_mirror(path, port)
    if not Path(path).is_dir():
        raise UsageError(f"there are no runs in {path} yet; start one with: mlx train run")
    os.execv(sys.executable, _command(path, port))


def _log_path(name: str | None, run: str | None) -> str:
    """Return the folder or URI to show. Unlike elsewhere, a path need not be that of a run."""
    if name is None:
        return storage_root()
    if "/" in name:
        return name if is_uri(name) else str(Path(name).resolve())
    root = storage_root()
    found = find_run(root, name, run or "latest")
    return found.location if run else joined(root, name)


def _serve_mirror(uri: str, port: int) -> None:
    """Serve local copies of event files on an object store, and refresh them. Does not return."""
    with tempfile.TemporaryDirectory(prefix="mlx-board-") as temporary:
        if not _mirror(uri, Path(temporary)):
            raise UsageError(f"there are no runs in {uri} yet; start one with: mlx train run")
        server = subprocess.Popen(_command(temporary, port))
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


def _mirror(uri: str, folder: Path) -> int:
    """Copy event files that are new or have grown. Returns how many there are in total."""
    storage = Storage(uri)
    found = [info for info in storage.below() if ".tfevents." in info.base_name]
    for info in found:
        parts = info.path.removeprefix(f"{storage.path}/").split("/")
        file = folder.joinpath(*parts)
        if not file.exists() or file.stat().st_size != info.size:
            storage.download(file, *parts)
    return len(found)


def _command(folder: str, port: int) -> list[str]:
    options = ["--logdir", folder, "--host", "127.0.0.1", "--port", str(port)]
    return [sys.executable, "-m", "tensorboard.main", *options]
