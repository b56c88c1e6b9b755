"""Private temporary folders of runs, which the next run removes if their owner was killed."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_LOCK = "owner.lock"
"""File that the owner of a folder has locked; the lock ends with the owner, however that ends."""


class Scratch:
    """A folder that only this user can open, until `close`. Removes those with the same prefix whose owner is dead."""

    def __init__(self, prefix: str) -> None:
        _remove_abandoned(prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        self.lock = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self.lock, fcntl.LOCK_EX)

    def close(self) -> None:
        if self.lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self.lock)
            self.lock = -1


def _remove_abandoned(prefix: str) -> None:
    """Remove folders of this user without an owner. One without a lock is about to get one, and stays."""
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # it is locked, another user's, or gone
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
