"""Recovery from lost workers: all workers of the group are restarted from the last checkpoint."""

import time
from typing import Any

from mlx_runtime.errors import MlxError, WorkerLostError, short_message
from mlx_runtime.events import WorkersLost
from mlx_runtime.loop.job import Handle, lost

ORIGIN_S = 3.0
"""Time to wait for the cause when a worker reports only that it lost another one."""

UNWIND_S = 5.0
"""Time for the other workers to end after user code failed on one; they may be saving a checkpoint."""


class WorkerDied(Exception):  # noqa: N818 - describes a worker, not an error of this process
    """A worker ended without a result."""


class RestartingGroup:
    """Workers that are all restarted if one of them is lost, up to `cfg.elastic.max_failures` times."""

    def __init__(self, cfg: Any, handle: Handle) -> None:
        self._cfg, self._handle = cfg, handle
        self._failures = 0
        self._failed_at: float | None = None  # when the first worker of this attempt failed

    def _start(self) -> None:
        """Start all workers."""
        raise NotImplementedError

    def _kill(self) -> None:
        """Kill all workers. Raises WorkerLostError if some are still running."""
        raise NotImplementedError

    def handle_failure(self, errors: dict[int, BaseException], *, all_ended: bool) -> None:
        """Raise the error of user code once the other workers have ended, or replace lost workers."""
        self._failed_at = self._failed_at or time.monotonic()
        failed_s = time.monotonic() - self._failed_at
        origins = {rank: error for rank, error in errors.items() if not isinstance(error, WorkerLostError)}
        of_users = [error for error in origins.values() if isinstance(error, MlxError)]
        if of_users:
            if all_ended or failed_s > UNWIND_S:
                raise of_users[0]
        elif origins or failed_s >= ORIGIN_S:
            self._replace(origins or errors)

    def _replace(self, errors: dict[int, BaseException]) -> None:
        first, most = next(iter(errors.values())), self._cfg.elastic.max_failures
        why = short_message(first)
        if 0 <= most <= self._failures:
            raise lost(why, most)
        self._handle(WorkersLost(tuple(errors), why))
        self._kill()
        self._failures += 1
        self._failed_at = None
        self._start()
