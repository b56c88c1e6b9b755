"""The record of a run, `run.json`: enough to list, judge and repeat it when everything else is gone.

Only the driver writes it, whole and atomically.
"""

import contextlib
import datetime
import importlib.metadata
import json
import math
import os
import platform
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mlx_runtime.errors import StorageError
from mlx_runtime.layout import RunFolder, write_atomic

HEARTBEAT_S = 10
"""How often a living driver refreshes its record; a RUNNING run that is silent for much longer is STALE."""

PACKAGES = ("mlx-runtime", "torch", "torchmetrics", "ray", "hydra-core", "hydra-zen", "numpy")


class Record:
    """The run's record, kept up to date on disk. Statuses: PENDING RUNNING SUCCEEDED FAILED STOPPED.

    Args:
        folder: where the run lives.
        fields: what is known at the start.
    """

    def __init__(self, folder: RunFolder, **fields: Any) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._fields: dict[str, Any] = {"experiment": folder.experiment, "run": folder.name, "status": "PENDING"}
        self.update(**fields)

    def update(self, **fields: Any) -> None:
        """Change fields and store the record.

        Raises:
            StorageError: the run folder can no longer be written.
        """
        with self._lock:
            self._fields |= fields | {"heartbeat": now()}
            try:
                write_atomic(self.folder.record, json.dumps(_finite(self._fields), indent=2) + "\n")
            except OSError as error:
                raise StorageError(f"cannot write {self.folder.record}: {error.strerror or error}") from error

    def finish(self, status: str, **fields: Any) -> None:
        """Write down how the run ended, giving back the space that was held for it.

        Raises:
            StorageError: the run folder can no longer be written.
        """
        self.folder.reserve.unlink(missing_ok=True)
        self.update(status=status, end=now(), **fields)

    @contextlib.contextmanager
    def alive(self, also: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Refresh the heartbeat while the block runs, and call `also` each time."""
        done = threading.Event()

        def beat() -> None:
            while not done.wait(HEARTBEAT_S):
                with contextlib.suppress(StorageError):  # a full disk must not hide the reason a run ends for
                    self.update()
                also()

        thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


def provenance(overrides: Sequence[str]) -> dict[str, Any]:
    """What is needed to run this again: command, code, versions, machine."""
    return {
        "command": shlex.join(sys.orig_argv),
        "overrides": list(overrides),
        "git": _git(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "host": socket.gethostname(),
        "pid": os.getpid(),
    }


def now() -> str:
    """The present, in UTC, to the second."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity; they become null."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(limit_bytes: int = 1 << 20) -> dict[str, Any] | None:
    """Commit and uncommitted changes of the working directory, or None outside a repository."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=10, errors="replace")
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout if done.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    if commit is None:
        return None
    return {"commit": commit.strip(), "diff": (git("diff", "HEAD", "--", ".") or "")[:limit_bytes]}
