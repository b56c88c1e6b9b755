"""What becomes of a worker's failure: replaced by Ray Train, or told.

The process that controls the workers imports this; little else of the runtime is loaded there, so that it starts soon.
"""

from typing import Any

import ray.train

from mlx_runtime.errors import MlxError, WorkerLostError, first_line
from mlx_runtime.progress import Remote


class Failures(ray.train.UserCallback):  # type: ignore[misc]
    """Lets Ray Train replace lost workers, and nothing else: what user code raises it would raise again.

    It works in the process that controls the workers.

    Args:
        address, key: of the driver's `Receiver`.
    """

    def __init__(self, address: tuple[str, int], key: bytes) -> None:
        self._address, self._key = address, key

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        causes = {rank: _cause(error) for rank, error in sorted(worker_exceptions.items())}
        for cause in causes.values():
            if isinstance(cause, MlxError) and not isinstance(cause, WorkerLostError):
                raise cause  # an error in a callback ends the run
        lost = [rank for rank, cause in causes.items() if not isinstance(cause, WorkerLostError)] or list(causes)
        sink = Remote(self._address, self._key, rank=-1)
        sink.send({"kind": "lost", "ranks": lost, "why": first_line(causes[lost[0]])})
        sink.close()


def error_of(error: BaseException, max_failures: int) -> MlxError:
    """The first thing that went wrong on a worker, as an error of ours."""
    failures = getattr(error, "worker_failures", {})
    causes = [_cause(failure) for _, failure in sorted(failures.items())] or [_cause(error)]
    for cause in causes:
        if isinstance(cause, MlxError) and not isinstance(cause, WorkerLostError):
            return cause
    if failures:
        used = f"; {max_failures} replacements (cfg.max_failures) are used up" if max_failures > 0 else ""
        lost = [cause for cause in causes if not isinstance(cause, WorkerLostError)] or causes
        return WorkerLostError(f"a worker was lost: {first_line(lost[0])}{used}")
    return MlxError(f"Ray Train failed: {first_line(causes[0])}")


def _cause(failure: Any) -> BaseException:
    """What user code raised, inside Ray's wrappers."""
    for name in ("_base_exc", "controller_failure", "cause", "__cause__"):
        inner = getattr(failure, name, None)
        if isinstance(inner, BaseException):
            return _cause(inner)
    return failure  # type: ignore[no-any-return]
