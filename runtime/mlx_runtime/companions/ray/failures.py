"""Decisions about failed workers of Ray Train, and translation of its errors.

Ray Train's controller process imports this module. It loads little else of the runtime, so that workers start quickly.
"""

import re
from typing import Any

import ray.exceptions
import ray.train

from mlx_runtime.errors import MlxError, WorkerLostError, full_message, short_message
from mlx_runtime.events import WorkersLost
from mlx_runtime.training.engines import lost
from mlx_runtime.training.loop import Remote

LARGEST = 3  # processes named after a lack of memory


class Failures(ray.train.UserCallback):  # type: ignore[misc]
    """A callback that ends the run if user code failed, because it would fail again; lost workers are replaced.

    Runs in Ray Train's controller process, and reports to the driver's `Receiver` with this address and key.
    """

    def __init__(self, address: tuple[str, int], key: bytes) -> None:
        self._address, self._key = address, key

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        causes = {rank: _cause(error) for rank, error in sorted(worker_exceptions.items())}
        for cause in causes.values():
            if isinstance(cause, MlxError) and not isinstance(cause, WorkerLostError):
                raise cause  # an error in a callback ends the run
        ranks = [rank for rank, cause in causes.items() if not isinstance(cause, WorkerLostError)] or list(causes)
        sink = Remote(self._address, self._key, rank=-1)
        sink.send(WorkersLost(tuple(ranks), short_message(causes[ranks[0]])))
        sink.close()


def error_of(error: BaseException, cfg: Any) -> MlxError:
    """Translate an error of Ray Train into the first failure of a worker."""
    from mlx_runtime.training.loop import ways_to_save

    failures = getattr(error, "worker_failures", {})
    causes = [_cause(failure) for _, failure in sorted(failures.items())] or [_cause(error)]
    for cause in causes:
        if isinstance(cause, MlxError) and not isinstance(cause, WorkerLostError):
            return cause
    if failures:
        origins = [cause for cause in causes if not isinstance(cause, WorkerLostError)] or causes
        starved = isinstance(origins[0], ray.exceptions.OutOfMemoryError)  # a worker that Ray killed to free memory
        return lost(_problem(origins[0]), cfg.elastic.max_failures, ways_to_save(cfg) if starved else "")
    return MlxError(f"Ray Train failed: {_problem(causes[0])}")


def _problem(cause: BaseException) -> str:
    """Return the first line of an error: if Ray freed memory, with the node, its limit, and its largest processes."""
    text = short_message(cause)
    if isinstance(cause, ray.exceptions.OutOfMemoryError):  # only its text names them
        largest = re.findall(r"^\d+\t([\d.]+)\t(.{1,60})", full_message(cause), re.MULTILINE)[:LARGEST]
        text += (
            f"; largest processes: {', '.join(f'{size} GB {command}' for size, command in largest)}" if largest else ""
        )
    return text


def _cause(failure: Any) -> BaseException:
    """Return the exception of user code, without Ray's wrappers."""
    for name in ("_base_exc", "controller_failure", "cause", "__cause__"):
        inner = getattr(failure, name, None)
        if isinstance(inner, BaseException):
            return _cause(inner)
    return failure  # type: ignore[no-any-return]
