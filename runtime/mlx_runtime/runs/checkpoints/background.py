"""Store checkpoints in the background."""

import threading
from collections.abc import Callable

from mlx_runtime.runs.checkpoint_index import Checkpoint
from mlx_runtime.runs.checkpoints.plain import copied
from mlx_runtime.runs.checkpoints.store import Checkpoints, State


class AsyncCheckpointer:
    """Stores checkpoints in a thread, one at a time.

    Args:
        checkpoints: Where to store them.
        stored: Called in the thread with each complete checkpoint.
        allowed: Called in the thread before a checkpoint becomes visible; raises if another driver has the run.
    """

    def __init__(
        self, checkpoints: Checkpoints, stored: Callable[[Checkpoint], None], allowed: Callable[[], None]
    ) -> None:
        self._checkpoints, self._stored, self._allowed = checkpoints, stored, allowed
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def save(self, state: State, checkpoint: Checkpoint) -> None:
        """Copy a state to the CPU and start to store the copy; first wait for the checkpoint before.

        Raises:
            StorageError: The checkpoint before could not be stored.
        """
        self.wait()
        copy = copied(state)
        self._thread = threading.Thread(target=self._save, args=(copy, checkpoint), name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until everything is stored.

        Raises:
            StorageError: It could not be stored.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _save(self, state: State, checkpoint: Checkpoint) -> None:
        try:
            self._stored(self._checkpoints.save(state, checkpoint, self._allowed))
        except Exception as error:
            self._error = error
